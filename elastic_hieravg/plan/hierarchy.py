"""The levels somebody asked for: who averages together, and how often.

A `Hierarchy` says nothing of nodes; laying it over a topology is `fit`'s work. Invariant: a `Hierarchy`
that exists is consistent in itself (names, periods, order); everything wrong with it is reported at once.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from elastic_hieravg.errors import HierarchyError, Problem, raise_if_any
from elastic_hieravg.plan.topology import GLOBAL, KEY, NODE, SIZE_KEY, is_name

# More than anybody's machines have; headers have room for so many.
LEVELS_MAX = 16
EXAMPLE = "node=4,zone=16,global=64"

_PERIOD = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Level:
    """One level: its groups average every `period_steps` steps.

    The name says which ranks: `node`, `global`, `size-8` (groups of 8 ranks), or a label key.
    """

    name: str
    period_steps: int

    @property
    def group_size(self) -> int | None:
        """Ranks per group, if the level asks for a number and not for a place."""
        match = SIZE_KEY.fullmatch(self.name)
        return int(match[1]) if match else None

    @property
    def is_label(self) -> bool:
        return self.name not in (NODE, GLOBAL) and self.group_size is None

    def __str__(self) -> str:
        return f"{self.name}={self.period_steps}"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Levels, innermost first. `world_size` is the size torch's form asks for; None means any.

    >>> print(Hierarchy.parse("node=4, global=64"))
    node=4,global=64
    """

    levels: tuple[Level, ...]
    world_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        raise_if_any(HierarchyError, list(_problems(self)))

    @classmethod
    def parse(cls, text: str) -> "Hierarchy":
        """Read `level=period,level=period,...`, innermost first."""
        if not text.strip():
            raise HierarchyError(
                Problem("the hierarchy is empty", f"write level=period_steps, for example {EXAMPLE}")
            )
        read = [_read_level(item.strip()) for item in text.split(",")]
        raise_if_any(HierarchyError, [item for item in read if isinstance(item, Problem)])
        return cls(tuple(item for item in read if isinstance(item, Level)))

    @classmethod
    def from_group_sizes(cls, period_group_size: Mapping[int, int]) -> "Hierarchy":
        """Read torch's form: period in steps to ranks per group, innermost first; the last spans the world.

        >>> print(Hierarchy.from_group_sizes({4: 8, 16: 32}))
        size-8=4,global=16
        """
        raise_if_any(HierarchyError, list(_group_size_problems(period_group_size)))
        *inner, (last_period, world_size) = period_group_size.items()
        levels = [Level(f"size-{size}", period) for period, size in inner]
        return cls((*levels, Level(GLOBAL, last_period)), world_size=world_size)

    def __str__(self) -> str:
        """The form that `parse` reads; `world_size` has no place in it."""
        return ",".join(map(str, self.levels))

    def labels(self) -> tuple[str, ...]:
        """The label keys it needs on every node, widest first."""
        return tuple(level.name for level in reversed(self.levels) if level.is_label)


def _read_level(item: str) -> Level | Problem:
    name, equals, rest = item.partition("=")
    period, *options = rest.split(":")
    if not equals or not is_name(name, KEY) or not _PERIOD.fullmatch(period) or "" in options:
        return Problem(
            f"{item!r} is not a level" if item else "the hierarchy has a comma without a level",
            f"write level=period_steps without spaces, for example {EXAMPLE}",
        )
    if options:
        return Problem(
            f"level {name} has the option {options[0]}, and there are no level options yet",
            f"write {name}={period}",
        )
    return Level(name, int(period))


def _group_size_problems(period_group_size: Mapping[int, int]) -> Iterator[Problem]:
    hint = "map periods in steps to ranks per group, innermost first, for example {4: 8, 16: 32}"
    if not isinstance(period_group_size, Mapping) or not period_group_size:
        yield Problem(f"the group sizes are {period_group_size!r}", hint)
        return
    for period, size in period_group_size.items():
        if type(period) is not int or type(size) is not int:
            yield Problem(f"the group sizes hold {period!r}: {size!r}, which are not whole numbers", hint)
        elif size < 1:
            yield Problem(f"period {period} has groups of {size} ranks", "give every group at least one rank")


def _problems(hierarchy: Hierarchy) -> Iterator[Problem]:
    levels = hierarchy.levels
    if not levels:
        yield Problem("the hierarchy has no levels", f"write level=period_steps, for example {EXAMPLE}")
        return
    if len(levels) > LEVELS_MAX:
        yield Problem(f"the hierarchy has {len(levels)} levels", f"use {LEVELS_MAX} at most")
    yield from _name_problems(levels)
    yield from _order_problems(levels)
    yield from _period_problems(levels)
    sizes = [(level.name, level.group_size) for level in levels]
    yield from _size_problems([*sizes, (GLOBAL, hierarchy.world_size)])


def _name_problems(levels: tuple[Level, ...]) -> Iterator[Problem]:
    names = [level.name for level in levels]
    for level in levels:
        if not is_name(level.name, KEY):
            yield Problem(
                f"level name {level.name!r} is not a name",
                "name a level node, global, size-8 or the key of a label",
            )
    for name in sorted({name for name in names if names.count(name) > 1}):
        periods = _listing(str(level.period_steps) for level in levels if level.name == name)
        yield Problem(
            f"level {name} is written {names.count(name)} times, with the periods {periods}",
            "name every level once",
        )


def _order_problems(levels: tuple[Level, ...]) -> Iterator[Problem]:
    names = [level.name for level in levels]
    if GLOBAL not in names:
        yield Problem(
            f"the hierarchy has no level global, only {_listing(names)}",
            "end with global and its period: without it the nodes' models drift apart for ever",
        )
    elif names[-1] != GLOBAL:
        yield Problem(
            f"level {names[-1]} comes after global, and nothing is wider than global",
            "write the levels innermost first, global last",
        )
    if NODE in names:
        wider = next((level.name for level in levels[: names.index(NODE)] if level.is_label), None)
        if wider:
            yield Problem(
                f"level {NODE} comes after {wider}, and a {wider} is made of whole nodes",
                "write the levels innermost first: node before any label",
            )


def _period_problems(levels: tuple[Level, ...]) -> Iterator[Problem]:
    for level in levels:
        if type(level.period_steps) is not int or level.period_steps < 1:
            yield Problem(
                f"level {level.name} has the period {level.period_steps!r}",
                "give a whole number of steps, 1 or more",
            )
            return
    for inner, outer in pairwise(levels):
        if outer.period_steps <= inner.period_steps:
            yield Problem(
                f"level {outer.name} has the period {outer.period_steps}, "
                f"not longer than the {inner.period_steps} of {inner.name} inside it",
                f"give {outer.name} the period {2 * inner.period_steps} "
                f"or another multiple of {inner.period_steps}; periods grow outwards",
            )
        elif outer.period_steps % inner.period_steps:
            below = outer.period_steps - outer.period_steps % inner.period_steps
            nearest = [n for n in (below, below + inner.period_steps) if n > inner.period_steps]
            yield Problem(
                f"level {outer.name} has the period {outer.period_steps}, "
                f"not a multiple of the {inner.period_steps} of {inner.name} inside it",
                f"give {outer.name} the period {_listing(map(str, nearest), last=' or ')}",
            )


def _size_problems(asked: list[tuple[str, int | None]]) -> Iterator[Problem]:
    sized = [(name, size) for name, size in asked if size is not None]
    for name, size in sized:
        if size < 1:
            yield Problem(f"level {name} has groups of {size} ranks", "give every group at least one rank")
            return
    for (inner_name, inner), (outer_name, outer) in pairwise(sized):
        if outer <= inner or outer % inner:
            wanted = "larger than" if outer <= inner else "a multiple of"
            yield Problem(
                f"level {outer_name} has groups of {outer} ranks, "
                f"not {wanted} the {inner} of {inner_name} inside it",
                f"take a multiple of {inner}, for example {2 * inner}: group sizes grow outwards",
            )


def _listing(items: Iterable[str], *, last: str = " and ") -> str:
    *first, end = items
    return f"{', '.join(first)}{last}{end}" if first else end
