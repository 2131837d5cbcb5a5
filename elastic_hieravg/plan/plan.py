"""A hierarchy laid over a topology: the concrete rank groups of one generation, and when they average.

A `Plan` is a value. `fit` makes it; process groups, stores and sockets only carry it out. Invariant: at
every level the groups partition the world, and each lies inside one group of the next level.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from elastic_hieravg.errors import DocumentError, Problem, TopologyError, raise_if_any
from elastic_hieravg.plan.document import Fields, canonical_json, parse_json, wrong_type
from elastic_hieravg.plan.topology import Node, Seat, Topology

FORMAT = "elastic_hieravg/plan"
VERSION = 1


class NoteKind(StrEnum):
    DROPPED = "dropped"  # every group of the level was a single rank
    MERGED = "merged"  # the level had the groups of the one inside it
    RESIZED = "resized"  # the level asked for group sizes the world does not give


@dataclass(frozen=True, slots=True)
class Note:
    """What `fit` repaired at a level, and why, in words for a person."""

    level: str
    kind: NoteKind
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedLevel:
    """A level with its groups: tuples of ascending ranks, in order of their first rank."""

    name: str
    period_steps: int
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...]:
        for group in self.groups:
            if rank in group:
                return group
        raise IndexError(f"rank {rank} is in no group of level {self.name}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Levels innermost first. `topology` holds the nodes in rank order.

    A plan of one rank has no levels. The last level spans the world; its rounds are the global rounds.
    A plan that is none is a `DocumentError`: `fit` never makes one, a document may hold one.
    """

    generation: int
    topology: Topology
    levels: tuple[PlannedLevel, ...]
    notes: tuple[Note, ...] = field(default=(), kw_only=True)
    warmup_steps: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        raise_if_any(DocumentError, list(_problems(self)))

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    def seat(self, rank: int) -> Seat:
        return self.topology.seat(rank)

    def is_warmup(self, step: int) -> bool:
        """Whether the job is synchronous at this step; no level is due then."""
        return step <= self.warmup_steps

    def due(self, step: int) -> PlannedLevel | None:
        """The one level that averages after this step (counted from 1): the widest that is due."""
        # Widest first: its groups contain the narrower ones, which are then redundant.
        for level in reversed(self.levels):
            if not self.is_warmup(step) and (step - self.warmup_steps) % level.period_steps == 0:
                return level
        return None

    def next_due_step(self, level: PlannedLevel, *, after_step: int) -> int:
        """The level's first due step after `after_step`, whether or not a wider one is due then too."""
        trained = max(0, after_step - self.warmup_steps)
        return self.warmup_steps + (trained // level.period_steps + 1) * level.period_steps

    def rounds_per_step(self) -> Iterator[tuple[PlannedLevel, float]]:
        """How often each level really runs after warm-up: its own rate less that of the next wider one."""
        rates = [1 / level.period_steps for level in self.levels]
        for level, rate, wider_rate in zip(self.levels, rates, [*rates[1:], 0.0], strict=False):
            yield level, rate - wider_rate

    @property
    def digest(self) -> str:
        """SHA-256 of what the ranks act on: nodes, groups, periods, warm-up.

        Equal plans of different generations have equal digests, so a digest comes back when a node does:
        it tells whether two agents agree, and is never the name of a group. Computed anew on each call.
        """
        nodes = [{**node.document(), "incarnation": ""} for node in self.topology.nodes]
        acted_on = {
            "version": VERSION,
            "nodes": nodes,
            "levels": _level_documents(self.levels),
            "warmup_steps": self.warmup_steps,
        }
        return hashlib.sha256(canonical_json(acted_on).encode()).hexdigest()

    def to_json(self) -> str:
        notes = [{"level": note.level, "kind": note.kind, "reason": note.reason} for note in self.notes]
        document = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "digest": self.digest,
            "sort_by": list(self.topology.sort_by),
            "nodes": [node.document() for node in self.topology.nodes],
            "levels": _level_documents(self.levels),
            "warmup_steps": self.warmup_steps,
            "notes": notes,
        }
        return canonical_json({**document, "checksum": _checksum(document)})

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote, of this version; anything else is a `DocumentError`."""
        try:
            return cls._read(Fields(parse_json(text, where="the plan"), where="the plan"))
        except TopologyError as exc:
            raise DocumentError(*exc.problems) from exc

    @classmethod
    def _read(cls, fields: Fields) -> "Plan":
        _check_version(fields)
        digest, checksum = fields.text("digest"), fields.text("checksum")
        generation, warmup_steps = fields.number("generation"), fields.number("warmup_steps")
        sort_by = tuple(_read_text(value, where=where) for where, value in fields.items("sort_by"))
        nodes = tuple(Node.read(value, where=where) for where, value in fields.items("nodes"))
        plan = cls(
            generation,
            Topology(nodes, sort_by=sort_by),
            tuple(_read_level(value, where=where) for where, value in fields.items("levels")),
            notes=tuple(_read_note(value, where=where) for where, value in fields.items("notes")),
            warmup_steps=warmup_steps,
        )
        fields.close()
        if plan.topology.nodes != nodes:
            raise DocumentError(_unusable("does not list its nodes in rank order"))
        # Written again, it must come out the same: nothing was altered, lost or added on the way.
        again = Fields(parse_json(plan.to_json(), where="the plan"), where="the plan")
        if (digest, checksum) != (plan.digest, again.text("checksum")):
            raise DocumentError(_unusable(f"has the checksum {checksum}, which is not that of its content"))
        return plan


def _level_documents(levels: tuple[PlannedLevel, ...]) -> list[dict[str, object]]:
    return [
        {"name": level.name, "period_steps": level.period_steps, "groups": level.groups} for level in levels
    ]


def _unusable(what: str) -> Problem:
    return Problem(f"the plan {what}", "have it written again: it was altered or damaged on its way")


def _check_version(fields: Fields) -> None:
    found = fields.text("format"), fields.number("version")
    if found != (FORMAT, VERSION):
        raise DocumentError(
            Problem(
                f"the plan has the format {found[0]} version {found[1]}; "
                f"this version reads {FORMAT} version {VERSION}",
                "run the same version of elastic_hieravg on every node",
            )
        )


def _read_text(value: object, *, where: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, where=where, expected=str)
    return value


def _read_level(value: object, *, where: str) -> PlannedLevel:
    fields = Fields(value, where=where)
    groups = (_read_group(value, where=where) for where, value in fields.items("groups"))
    level = PlannedLevel(fields.text("name"), fields.number("period_steps"), tuple(groups))
    fields.close()
    return level


def _read_group(value: object, *, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong_type(value, where=where, expected=list)
    for rank in value:
        if type(rank) is not int:
            raise wrong_type(rank, where=where, expected=int)
    return tuple(value)


def _read_note(value: object, *, where: str) -> Note:
    fields = Fields(value, where=where)
    level, kind, reason = fields.text("level"), fields.text("kind"), fields.text("reason")
    fields.close()
    if kind not in list(NoteKind):
        raise DocumentError(_unusable(f"has a note of the kind {kind}"))
    return Note(level, NoteKind(kind), reason)


def _checksum(document: dict[str, object]) -> str:
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def _problems(plan: Plan) -> Iterator[Problem]:
    if plan.generation < 0 or plan.warmup_steps < 0:
        yield _unusable(f"has the generation {plan.generation} and {plan.warmup_steps} warm-up steps")
    names = [level.name for level in plan.levels]
    if len(set(names)) < len(names):
        yield _unusable(f"has the levels {', '.join(names)}, one of them twice")
    for level in plan.levels:
        if level.period_steps < 1:
            yield _unusable(f"has the period {level.period_steps} at level {level.name}")
        # Ranks ascend in a group and groups in a level, so sorting must change nothing but the grouping.
        ranks = sorted(rank for group in level.groups for rank in group)
        ordered = all(list(group) == sorted(group) and group for group in level.groups)
        if ranks != list(range(plan.world_size)) or not ordered or list(level.groups) != sorted(level.groups):
            yield _unusable(f"has groups at level {level.name} that do not partition {plan.world_size} ranks")
            return
    for inner, outer in pairwise(plan.levels):
        is_growing = 1 <= inner.period_steps < outer.period_steps
        if not is_growing or outer.period_steps % inner.period_steps:
            yield _unusable(f"has the period {outer.period_steps} at {outer.name}, which does not nest")
        if not _nests(inner, outer):
            yield _unusable(f"has a group at level {inner.name} that lies in two groups of {outer.name}")
    spans_world = bool(plan.levels) and len(plan.levels[-1].groups) == 1
    if spans_world != (plan.world_size > 1):
        yield _unusable(f"has no level that spans its {plan.world_size} ranks, or needs none")


def _nests(inner: PlannedLevel, outer: PlannedLevel) -> bool:
    group_of = {rank: index for index, group in enumerate(outer.groups) for rank in group}
    return all(len({group_of[rank] for rank in group}) == 1 for group in inner.groups)
