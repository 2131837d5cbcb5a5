"""How the ranks of a new generation agree on the step from which on they work in it. Pure.

Each rank writes an opening once its groups are built, at a step boundary of its own, and does not pass the
step it names before it knows everybody's. So nobody has passed the largest step named, and all enter there
together: grown generations and shrunk ones by the same rule. Invariant: everybody who reads the openings of a
generation comes to the same entry.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_hieravg.errors import DocumentError, Problem
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.plan import GroupKey
from elastic_hieravg.plan.document import Fields, canonical_json, parse_json

_COMMITTED = re.compile(r"([0-9]{1,18}) (.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Opening:
    """What a rank says before it enters a generation.

    `step`: the first boundary at which it can enter; it waits there. `wants_round`: a round of its failed, or
    one was asked for. `committed`: for each group, by its key's name, the last round whose result it took.
    `worked`: it was taken out while it lived, with the model of this generation; 0 if it was not.
    """

    step: int
    holds_model: bool
    wants_round: bool = False
    committed: Mapping[str, int] | None = None
    worked: int = 0

    def to_json(self) -> str:
        flags = {"holds_model": int(self.holds_model), "wants_round": int(self.wants_round)}
        committed = [f"{number} {name}" for name, number in (self.committed or {}).items()]
        numbers = {"step": self.step, "worked": self.worked}
        return canonical_json({**numbers, **flags, "committed": sorted(committed)})


def read_opening(text: str) -> Opening:
    """What `to_json` wrote; anything else is a `DocumentError`."""
    fields = Fields(parse_json(text, where="an opening"), where="an opening")
    committed = [_read_committed(value) for _, value in fields.items("committed")]
    opening = Opening(
        fields.number("step"),
        holds_model=bool(fields.number("holds_model")),
        wants_round=bool(fields.number("wants_round")),
        committed=dict(committed),
        worked=fields.number("worked"),
    )
    fields.close()
    return opening


def _read_committed(value: object) -> tuple[str, int]:
    match = _COMMITTED.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        hint = "run the same version of elastic_hieravg on every node"
        raise DocumentError(Problem(f"an opening has the round {value!r}", hint))
    return match[2], int(match[1])


@dataclass(frozen=True, slots=True)
class Entry:
    """Where everybody enters, and whether with a global round. `committed` is the newest anybody has.

    `is_ownerless`: nobody has the model. Then it is that of the ranks that worked in the generation `owners`:
    they were all taken out at once while they lived. If there are none, it is that of the ranks that stand at
    `step`, if they have made any; otherwise the job starts.
    """

    step: int
    is_round_wanted: bool
    committed: Mapping[str, int]
    is_ownerless: bool = False
    owners: int = 0

    def was_committed(self, group: str, round_index: int) -> bool:
        """Whether somebody took the result of a round: then whoever is in doubt about it takes it too."""
        return self.committed.get(group, 0) >= round_index


def entry_of(openings: Sequence[Opening]) -> Entry:
    """What follows from everybody's opening.

    A rank without the model follows the others' steps.

    >>> entry_of([Opening(7, holds_model=True), Opening(9, holds_model=True), Opening(0, holds_model=False)])
    Entry(step=9, is_round_wanted=True, committed={}, is_ownerless=False, owners=0)
    >>> entry_of([Opening(7, holds_model=False), Opening(0, holds_model=False)])
    Entry(step=7, is_round_wanted=True, committed={}, is_ownerless=True, owners=0)
    """
    # Who regained the model on a way that came to nothing has it like all the others that can.
    is_held = any(opening.holds_model and not opening.worked for opening in openings)
    holders = [opening for opening in openings if opening.holds_model and is_held]
    owners = 0 if holders else max((opening.worked for opening in openings), default=0)
    survivors = [opening for opening in openings if owners and opening.worked == owners]
    steps = [opening.step for opening in holders or survivors or openings]
    committed: dict[str, int] = {}
    for opening in openings:
        for name, number in (opening.committed or {}).items():
            committed[name] = max(number, committed.get(name, 0))
    return Entry(
        max(steps, default=0),
        any(opening.wants_round or not opening.holds_model for opening in openings),
        committed,
        is_ownerless=not holders,
        owners=owners,
    )


def replaced_keys(keys: Iterable[GroupKey], newest: Adopted) -> list[GroupKey]:
    """Those groups that lost somebody, or are built anew: whoever waits in one waits in vain.

    A group that only grows is used until the grown generation is entered.
    """
    incarnations = {(node.node_id, node.incarnation) for node in newest.generation.members}
    listed = {key.members: key for key in newest.keys}
    return [
        key
        for key in keys
        if listed.get(key.members, key) != key
        or not all((member.node_id, member.incarnation) in incarnations for member in key.members)
    ]
