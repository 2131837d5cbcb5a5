"""What happened, as values. Code below the agent and the worker does not log: it tells an observer."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    COMMITTED = "committed"  # every rank has the result
    FAILED = "failed"  # a peer was lost; it is tried once more in the next generation
    SKIPPED = "skipped"  # nobody could contribute, or it failed for good; no parameter changed


@dataclass(frozen=True, slots=True)
class RoundDone:
    """One averaging of one group, as seen by one rank. Of one that did not commit, only the first fields tell.

    `divergence_ratio`: how far apart the replicas were before, as the root of the mean square difference
    from the result over that of the result; None if this rank does not know. `repaired` names tensors that
    somebody had pointed elsewhere.
    """

    level: str
    step: int
    outcome: Outcome
    seconds: float = 0.0
    wait_seconds: float = 0.0
    sent_bytes: int = 0
    link: str = ""
    divergence_ratio: float | None = None
    num_nonfinite: int = 0
    repaired: tuple[str, ...] = ()


Observe = Callable[[RoundDone], None]


def ignore(_: RoundDone) -> None:
    """The observer that does not care."""
