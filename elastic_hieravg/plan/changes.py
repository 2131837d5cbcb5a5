"""What differs between two plans, and which groups live on.

A group is known by its key: its members' incarnations and the generation that built it. A group whose
members are the same and that nobody reported broken keeps its key, whatever its ranks or its level are
called now; every other group gets a new key. Invariant: a key, once gone, never comes back.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from elastic_hieravg.plan.document import canonical_json
from elastic_hieravg.plan.plan import Plan


class Member(NamedTuple):
    """A rank by what it is, not by its number, which changes from plan to plan."""

    node_id: str
    incarnation: str
    local_rank: int


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The identity of a group that was built: `generation` is the one that built it."""

    members: tuple[Member, ...]
    generation: int

    @property
    def name(self) -> str:
        """A short text for store prefixes and messages, never the same for two keys."""
        digest = hashlib.sha256(canonical_json(self.members).encode()).hexdigest()
        return f"{self.generation}-{digest[:24]}"


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group of two or more ranks in a plan, with the levels that use it."""

    key: GroupKey
    ranks: tuple[int, ...]
    levels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A slot that has another rank than before."""

    node_id: str
    local_rank: int
    rank_before: int
    rank: int


@dataclass(frozen=True, slots=True)
class Change:
    """From one plan to the next. `gone` groups carry their old ranks, the others their new ones."""

    generation: int
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    restarted: tuple[str, ...]
    moves: tuple[Move, ...]
    kept: tuple[PlannedGroup, ...]
    new: tuple[PlannedGroup, ...]
    gone: tuple[PlannedGroup, ...]

    @property
    def keys(self) -> tuple[GroupKey, ...]:
        """The keys of all groups of the new plan: the next record."""
        return tuple(group.key for group in (*self.kept, *self.new))


def first_keys(plan: Plan) -> tuple[GroupKey, ...]:
    """The keys of a plan that follows no other: every group is built in its generation."""
    return tuple(GroupKey(members, plan.generation) for members in _groups(plan))


def difference(
    before: Plan, after: Plan, *, keys: Collection[GroupKey], broken: Collection[GroupKey] = ()
) -> Change:
    """How `after` follows from `before`, whose groups have the given `keys`, some of them reported broken."""
    assert after.generation > before.generation, "generations only grow"
    groups_before, groups_after = _groups(before), _groups(after)
    key_of = {key.members: key for key in keys}
    assert key_of.keys() == groups_before.keys(), "every group of the plan before has a key"
    kept, new = [], []
    for members, (ranks, levels) in groups_after.items():
        key = key_of.get(members)
        if key is not None and key not in broken:
            kept.append(PlannedGroup(key, ranks, levels))
        else:
            new.append(PlannedGroup(GroupKey(members, after.generation), ranks, levels))
    kept_keys = {group.key for group in kept}
    gone = [
        PlannedGroup(key_of[members], ranks, levels)
        for members, (ranks, levels) in groups_before.items()
        if key_of[members] not in kept_keys
    ]
    was = {node.node_id: node.incarnation for node in before.topology.nodes}
    now = {node.node_id: node.incarnation for node in after.topology.nodes}
    return Change(
        generation=after.generation,
        lost=tuple(node_id for node_id in was if node_id not in now),
        joined=tuple(node_id for node_id in now if node_id not in was),
        restarted=tuple(node_id for node_id in now if was.get(node_id, now[node_id]) != now[node_id]),
        moves=_moves(before, after),
        kept=tuple(kept),
        new=tuple(new),
        gone=tuple(gone),
    )


def _groups(plan: Plan) -> dict[tuple[Member, ...], tuple[tuple[int, ...], tuple[str, ...]]]:
    """Ranks and levels of each group, innermost first; a rank alone needs no group."""
    seats = [
        Member(node.node_id, node.incarnation, local_rank)
        for node in plan.topology.nodes
        for local_rank in range(node.slots)
    ]
    found: dict[tuple[Member, ...], tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for level in plan.levels:
        for ranks in level.groups:
            if len(ranks) > 1:
                members = tuple(seats[rank] for rank in ranks)
                _, levels = found.get(members, ((), ()))
                found[members] = ranks, (*levels, level.name)
    return found


def _moves(before: Plan, after: Plan) -> tuple[Move, ...]:
    ranks_before = {node.node_id: ranks for node, ranks in before.topology.placed()}
    moves = []
    for node, ranks in after.topology.placed():
        old_ranks = ranks_before.get(node.node_id, range(0))
        for local_rank, (old, new) in enumerate(zip(old_ranks, ranks, strict=False)):
            if old != new:
                moves.append(Move(node.node_id, local_rank, rank_before=old, rank=new))
    return tuple(moves)
