"""Lay a hierarchy over a topology.

`fit` decides ranks and groups; it does not say what changed since the last plan (`difference`) nor what the
plan costs (`cost`). Invariant: for any nodes whose labels the levels apply to there is a plan, and it
depends on nothing but the arguments.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise
from typing import Literal, overload

from elastic_hieravg.errors import InputError, Problem, TopologyError, raise_if_any
from elastic_hieravg.plan.hierarchy import Hierarchy, Level
from elastic_hieravg.plan.plan import Note, NoteKind, Plan, PlannedLevel
from elastic_hieravg.plan.topology import GLOBAL, NODE, WELL_KNOWN_LABELS, Node, Topology, natural_key

OnMisfit = Literal["repair", "strict"]
ON_MISFIT: tuple[OnMisfit, ...] = ("repair", "strict")
NODES_NAMED_MAX = 5

Group = tuple[int, ...]
Groups = tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a hierarchy does not fit under `on_misfit="strict"`, and what to do: the job holds until it does."""

    reason: str
    hint: str


@overload
def fit(
    hierarchy: Hierarchy,
    topology: Topology,
    *,
    generation: int = 1,
    warmup_steps: int = 0,
    on_misfit: Literal["repair"] = "repair",
) -> Plan: ...


@overload
def fit(
    hierarchy: Hierarchy,
    topology: Topology,
    *,
    generation: int = 1,
    warmup_steps: int = 0,
    on_misfit: OnMisfit,
) -> Plan | Misfit: ...


def fit(
    hierarchy: Hierarchy,
    topology: Topology,
    *,
    generation: int = 1,
    warmup_steps: int = 0,
    on_misfit: OnMisfit = "repair",
) -> Plan | Misfit:
    """The plan for these nodes.

    A label that is missing or does not nest is a `TopologyError`. Group sizes the world does not give are
    repaired with a note, or returned as a `Misfit` under `on_misfit="strict"`.

    >>> plan = fit(Hierarchy.parse("node=2,global=8"), Topology([Node("a", 2), Node("b", 1)]))
    >>> [(level.name, level.groups) for level in plan.levels]
    [('node', ((0, 1), (2,))), ('global', ((0, 1, 2),))]
    """
    problems = _argument_problems(generation=generation, warmup_steps=warmup_steps, on_misfit=on_misfit)
    raise_if_any(InputError, list(problems))
    raise_if_any(TopologyError, list(_label_problems(hierarchy, topology)))
    sort_by = _sort_keys(hierarchy)
    ordered = topology if topology.sort_by == sort_by else Topology(topology.nodes, sort_by=sort_by)
    asked = _group_levels(hierarchy, ordered)
    resizes = list(_resizes(hierarchy, ordered, asked))
    if resizes and on_misfit == "strict":
        return Misfit("; ".join(resize.cause for resize in resizes), _misfit_hint(hierarchy, ordered))
    levels, notes = _simplify(hierarchy, asked)
    notes = (*map(_Resize.note, resizes), *notes)
    return Plan(generation, ordered, levels, notes=notes, warmup_steps=warmup_steps)


def _argument_problems(*, generation: int, warmup_steps: int, on_misfit: str) -> Iterator[Problem]:
    if type(generation) is not int or generation < 0:
        yield Problem(f"the generation is {generation!r}", "give a whole number, 0 or more")
    if type(warmup_steps) is not int or warmup_steps < 0:
        yield Problem(f"there are {warmup_steps!r} warm-up steps", "give a whole number of steps, 0 or more")
    if on_misfit not in ON_MISFIT:
        yield Problem(f"on_misfit is {on_misfit!r}", f"use {' or '.join(ON_MISFIT)}")


# --- labels -----------------------------------------------------------------------------------------------


def _label_problems(hierarchy: Hierarchy, topology: Topology) -> Iterator[Problem]:
    keys = hierarchy.labels()
    for key in reversed(keys):
        without = [node.node_id for node in topology.nodes if key not in node.labels]
        if len(without) == len(topology.nodes):
            found = sorted({key for node in topology.nodes for key in node.labels})
            yield Problem(
                f"level {key} is unknown: no node has a label {key}",
                f"name node, global, size-8 or a label of the nodes (--label {key}=...); "
                f"they have {', '.join(found) if found else 'no labels'}",
            )
        elif without:
            yield Problem(
                f"level {key} needs the label {key} on every node; it is missing on {_named(without)}",
                f"give these nodes a {key}, or leave the level {key} out",
            )
    # A level's label nests in the next level's, and in the well-known ones that are wider by their meaning.
    known = [(outer, inner) for outer, inner in combinations(WELL_KNOWN_LABELS, 2) if inner in keys]
    for outer, inner in dict.fromkeys([*pairwise(keys), *known]):
        yield from _nesting_problems(topology, inner=inner, outer=outer)


def _nesting_problems(topology: Topology, *, inner: str, outer: str) -> Iterator[Problem]:
    places: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node in topology.nodes:
        if inner in node.labels and outer in node.labels:
            places[node.labels[inner]][node.labels[outer]].append(node.node_id)
    for value in sorted(places, key=natural_key):
        parents = places[value]
        if len(parents) > 1:
            found = [f"{parent} ({_named(parents[parent])})" for parent in sorted(parents, key=natural_key)]
            yield Problem(
                f"{inner} {value} is in more than one {outer}: {' and '.join(found)}",
                f"correct the labels of these nodes, or name each {inner} for its {outer}, "
                f"as in {min(parents, key=natural_key)}-{value}",
            )


def _sort_keys(hierarchy: Hierarchy) -> tuple[str, ...]:
    """Labels that order the ranks, widest first: the levels' own, and the well-known ones in their place.

    That is behind a wider well-known one, else in front of all.
    """
    keys = list(hierarchy.labels())
    for index, known in enumerate(WELL_KNOWN_LABELS):
        if known not in keys:
            wider = [keys.index(key) + 1 for key in WELL_KNOWN_LABELS[:index] if key in keys]
            keys.insert(max(wider, default=0), known)
    return tuple(keys)


def _named(node_ids: list[str]) -> str:
    shown = ", ".join(node_ids[:NODES_NAMED_MAX])
    hidden = len(node_ids) - NODES_NAMED_MAX
    return f"{shown} and {hidden} more" if hidden > 0 else shown


# --- groups -----------------------------------------------------------------------------------------------


def _group_levels(hierarchy: Hierarchy, topology: Topology) -> list[Groups]:
    """The groups of each level as asked for, innermost first, nothing dropped or merged yet."""
    placed: list[Groups | None] = [
        None if level.group_size else _groups_by_place(level, topology) for level in hierarchy.levels
    ]
    # Widest first: a sized level divides the groups of the level around it. Global is last and never sized.
    found: list[Groups] = []
    for index in reversed(range(len(placed))):
        groups, size = placed[index], hierarchy.levels[index].group_size
        if groups is None:
            assert size is not None
            whole = next((groups for groups in reversed(placed[:index]) if groups is not None), None)
            groups = _groups_by_size(size, topology, parents=found[-1], whole=whole)
        found.append(groups)
    return found[::-1]


def _groups_by_place(level: Level, topology: Topology) -> Groups:
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for node, ranks in topology.placed():
        ranks_at[_place(level, node)].extend(ranks)
    # Nodes come in rank order, so groups do too.
    return tuple(map(tuple, ranks_at.values()))


def _place(level: Level, node: Node) -> str:
    if level.name == GLOBAL:
        return ""
    return node.node_id if level.name == NODE else node.labels[level.name]


def _groups_by_size(size: int, topology: Topology, *, parents: Groups, whole: Groups | None) -> Groups:
    """Divide each parent into groups of at most `size` ranks, as far as that is possible without harm.

    `whole` are groups of an inner level that must not be divided. Without them a node of more than `size`
    ranks is cut into parts, and smaller nodes are packed together in rank order. So no group mixes a part of
    one node with ranks of another.
    """
    parent_of = [0] * topology.world_size
    for index, parent in enumerate(parents):
        for rank in parent:
            parent_of[rank] = index
    packed: list[list[list[int]]] = [[] for _ in parents]
    for unit in whole or tuple(tuple(ranks) for _, ranks in topology.placed()):
        for index, ranks in groupby(unit, key=parent_of.__getitem__):
            _pack(packed[index], list(ranks), size=size, may_cut=whole is None)
    # Places may interleave in rank order, if a wider label is missing on some of their nodes.
    return tuple(sorted(tuple(sorted(group)) for groups in packed for group in groups if group))


def _pack(groups: list[list[int]], unit: list[int], *, size: int, may_cut: bool) -> None:
    """Append a unit to the last group if it fits there, else as a group of its own, or in parts."""
    if groups and len(groups[-1]) + len(unit) <= size:
        groups[-1].extend(unit)
    elif may_cut and len(unit) > size:
        groups.extend(unit[start : start + size] for start in range(0, len(unit), size))
        # The last part may have room left, but not for another node: the next one starts anew.
        groups.append([])
    else:
        groups.append(unit)


# --- repairs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Resize:
    """Group sizes that were asked for and cannot be had, and what is done instead."""

    level: str
    cause: str
    repair: str

    def note(self) -> Note:
        return Note(self.level, NoteKind.RESIZED, f"{self.cause}: {self.repair}")


def _resizes(hierarchy: Hierarchy, topology: Topology, asked: list[Groups]) -> Iterator[_Resize]:
    world = f"the world of {topology.world_size} ({topology.listing()})"
    for index, (level, groups) in enumerate(zip(hierarchy.levels, asked, strict=True)):
        size = level.group_size
        if size is None or all(len(group) == size for group in groups):
            continue
        # Global is last and never sized, so there is always a level around this one.
        around, parents = hierarchy.levels[index + 1].name, asked[index + 1]
        if topology.world_size % size:
            why_not = f"does not divide {world}"
        elif any(len(parent) % size for parent in parents):
            why_not = f"does not divide the groups of {around}, {_sizes(parents)} ranks each"
        else:
            why_not = f"cannot be made of whole nodes in rank order in {world}"
        count = "1 group" if len(groups) == 1 else f"{len(groups)} groups"
        yield _Resize(
            level.name,
            f"level {level.name} averages groups of {size} ranks, which {why_not}",
            f"{count} of {_sizes(groups)} ranks instead",
        )
    if hierarchy.world_size not in (None, topology.world_size):
        yield _Resize(
            GLOBAL,
            f"level {GLOBAL} averages groups of {hierarchy.world_size} ranks, which is not {world}",
            f"all {topology.world_size} ranks instead",
        )


def _misfit_hint(hierarchy: Hierarchy, topology: Topology) -> str:
    repair = "give --on-misfit repair to average over uneven groups"
    if hierarchy.world_size is None:
        missing = -topology.world_size % max(level.group_size or 1 for level in hierarchy.levels)
    else:
        missing = hierarchy.world_size - topology.world_size
    if not missing:
        return repair
    ranks = f"{abs(missing)} {'more' if missing > 0 else 'fewer'} rank{'s' if abs(missing) > 1 else ''}"
    return f"{repair}, or wait for {ranks}"


def _sizes(groups: Groups) -> str:
    smallest, largest = min(map(len, groups)), max(map(len, groups))
    return str(smallest) if smallest == largest else f"{smallest} to {largest}"


def _simplify(hierarchy: Hierarchy, asked: list[Groups]) -> tuple[tuple[PlannedLevel, ...], tuple[Note, ...]]:
    """Drop levels of single ranks and merge levels with the same groups, with a note for each."""
    levels: list[PlannedLevel] = []
    notes: list[Note] = []
    for level, groups in zip(hierarchy.levels, asked, strict=True):
        if all(len(group) == 1 for group in groups):
            reason = f"every group of level {level.name} is a single rank, so there is nothing to average"
            notes.append(Note(level.name, NoteKind.DROPPED, reason))
        elif levels and levels[-1].groups == groups:
            inner = levels[-1]
            reason = (
                f"level {level.name} has the same groups as {inner.name} inside it: "
                f"they are one level, {inner.name}, every {inner.period_steps} steps"
            )
            notes.append(Note(level.name, NoteKind.MERGED, reason))
        else:
            levels.append(PlannedLevel(level.name, level.period_steps, groups))
    return tuple(levels), tuple(notes)
