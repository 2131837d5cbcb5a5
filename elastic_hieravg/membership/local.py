"""What an agent and its workers tell each other, over a socket of their own host. Values and their JSON.

Invariant: what arrives is one of these values, or a `FrameError`.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from elastic_hieravg.membership.frames import FrameError

# --- from a worker --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first word of a worker."""

    token: str
    local_rank: int
    process_id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Its model is there: it can be connected to."""


@dataclass(frozen=True, slots=True)
class Entered:
    """It works in this generation now."""

    number: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A group failed, known by its key's name."""

    group: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is. `is_excused`: it makes no steps for a reason: it waits for others, or it said so."""

    step: int
    is_excused: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """What it has measured since it started, as the JSON of `metrics.samples.Samples`."""

    samples: str


@dataclass(frozen=True, slots=True)
class Drained:
    """It made its part of the last global round of a node that leaves, and waits for its end."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The training script ended with an exception, told as it would be printed."""

    text: str


@dataclass(frozen=True, slots=True)
class Bye:
    """It is done: that its connection ends is no death."""


# --- from an agent --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Follow:
    """The newest generation, as JSON, the job's record too, and where the group store of it is."""

    job: str
    generation: str
    address: str
    port: int
    node_id: str


@dataclass(frozen=True, slots=True)
class Fence:
    """This node is out while its workers live: they wait at the next boundary, and join again."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The node leaves: one more global round, in the next generation that is made for it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The job is over."""

    is_success: bool
    reason: str


FromWorker = Hello | Ready | Entered | Broken | Progress | Measured | Drained | Raised | Bye
FromAgent = Follow | Fence | Drain | Stop

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for union in (FromWorker, FromAgent)
    for kind in typing.get_args(union)
    if isinstance(union, types.UnionType)
}


def to_message(value: FromWorker | FromAgent) -> dict[str, Any]:
    return {"kind": type(value).__name__, **asdict(value)}


def from_message(message: Mapping[str, Any]) -> FromWorker | FromAgent:
    kind = _KINDS.get(str(message.get("kind")))
    if kind is None:
        raise FrameError(f"there is no message {message.get('kind')!r}")
    wanted = {each.name: each.type for each in fields(kind)}
    found = {name: value for name, value in message.items() if name != "kind"}
    if wanted.keys() != found.keys() or any(type(found[name]) is not wanted[name] for name in wanted):
        raise FrameError(f"a message {kind.__name__} has {found}")
    value: FromWorker | FromAgent = kind(**found)
    return value
