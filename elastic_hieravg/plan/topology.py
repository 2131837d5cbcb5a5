"""Which ranks sit on which node.

A `Topology` is a membership put in order. It knows nothing of periods or levels; `fit` orders it by the
levels' labels too, so ranks are final in a plan's topology. Invariant: the same nodes in any order give the
same topology, and so the same ranks.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import TypeGuard

from elastic_hieravg.errors import Problem, TopologyError, raise_if_any
from elastic_hieravg.plan.document import Fields

# The labels everybody has, widest first: ranks follow them even if no level names them.
WELL_KNOWN_LABELS = ("region", "zone", "rack")
RANKS_MAX = 1 << 20
NAME_LENGTH_MAX = 253

# The key of a label, and so the name of a level.
KEY = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
SIZE_KEY = re.compile(r"size-([0-9]+)")
NODE = "node"
GLOBAL = "global"

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_DIGITS = re.compile(r"([0-9]+)")

NaturalKey = tuple[tuple[str | int, ...], str]


def natural_key(name: str) -> NaturalKey:
    """Sort key under which numbers inside names count as numbers.

    >>> sorted(["node-10", "node-2"], key=natural_key)
    ['node-2', 'node-10']
    """
    # Text and digits alternate, text first, so equal positions always hold equal types.
    # The name itself comes last: "n-2" and "n-02" are equal as numbers, yet their order must be fixed.
    parts = _DIGITS.split(name)
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts)), name


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: its name, how many ranks it runs, and where it stands.

    `incarnation` tells two starts of the same node apart. It is part of a group's identity, not of a
    plan's digest, and the planner never reads it.
    """

    node_id: str
    slots: int
    labels: Mapping[str, str] = field(default_factory=dict)
    incarnation: str = ""

    def __post_init__(self) -> None:
        raise_if_any(TopologyError, list(_node_problems(self)))
        ordered = dict(sorted(self.labels.items()))
        object.__setattr__(self, "labels", MappingProxyType(ordered))

    def __hash__(self) -> int:
        return hash((self.node_id, self.slots, tuple(self.labels.items()), self.incarnation))

    def __reduce__(self) -> tuple[type["Node"], tuple[object, ...]]:
        # A mapping proxy cannot be pickled or copied; the dict it was made from can.
        return Node, (self.node_id, self.slots, dict(self.labels), self.incarnation)

    def document(self) -> dict[str, object]:
        return {
            "node_id": self.node_id,
            "slots": self.slots,
            "labels": dict(self.labels),
            "incarnation": self.incarnation,
        }

    @classmethod
    def read(cls, value: object, *, where: str) -> "Node":
        """A node from a document; labels and incarnation may be missing."""
        fields = Fields(value, where=where)
        node = cls(
            fields.text("node_id"),
            fields.number("slots"),
            fields.texts("labels"),
            fields.text("incarnation", default=""),
        )
        fields.close()
        return node


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits."""

    rank: int
    node_id: str
    local_rank: int


@dataclass(frozen=True, slots=True, init=False)
class Topology:
    """A non-empty set of nodes, in rank order.

    Nodes are sorted by the labels in `sort_by` (widest first; a node without the label comes first), then
    by name, all in natural order. Rank 0 is the first slot of the first node.

    >>> Topology([Node("n10", 2), Node("n9", 1)]).ranks_of("n10")
    range(1, 3)
    """

    nodes: tuple[Node, ...]
    sort_by: tuple[str, ...]
    first_ranks: tuple[int, ...] = field(repr=False, compare=False)

    def __init__(self, nodes: Iterable[Node], *, sort_by: tuple[str, ...] = WELL_KNOWN_LABELS) -> None:
        given = tuple(nodes)
        raise_if_any(TopologyError, list(_membership_problems(given)))

        values = {node.labels.get(key, "") for node in given for key in sort_by}
        key_of = {value: natural_key(value) for value in values}

        def sort_key(node: Node) -> tuple[NaturalKey, ...]:
            labels = (key_of[node.labels.get(key, "")] for key in sort_by)
            return (*labels, natural_key(node.node_id))

        ordered = tuple(sorted(given, key=sort_key))
        starts = accumulate((node.slots for node in ordered[:-1]), initial=0)
        object.__setattr__(self, "nodes", ordered)
        object.__setattr__(self, "sort_by", sort_by)
        object.__setattr__(self, "first_ranks", tuple(starts))

    @property
    def world_size(self) -> int:
        return self.first_ranks[-1] + self.nodes[-1].slots

    def seat(self, rank: int) -> Seat:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}")
        index = bisect_right(self.first_ranks, rank) - 1
        return Seat(rank, self.nodes[index].node_id, rank - self.first_ranks[index])

    def seats(self) -> Iterator[Seat]:
        """All seats, in rank order."""
        for node, ranks in self.placed():
            for local_rank, rank in enumerate(ranks):
                yield Seat(rank, node.node_id, local_rank)

    def placed(self) -> Iterator[tuple[Node, range]]:
        """All nodes with their ranks, in rank order."""
        for node, first in zip(self.nodes, self.first_ranks, strict=True):
            yield node, range(first, first + node.slots)

    def ranks_of(self, node_id: str) -> range:
        for node, ranks in self.placed():
            if node.node_id == node_id:
                return ranks
        raise KeyError(node_id)

    def lose(self, *node_ids: str) -> "Topology":
        """This topology without the named nodes."""
        known = {node.node_id for node in self.nodes}
        problems = [
            Problem(
                f"node {node_id} cannot be lost: there is no such node",
                f"name one of the nodes (NAME:SLOTS): {self.listing()}",
            )
            for node_id in sorted(set(node_ids) - known)
        ]
        problems += [
            Problem(f"node {node_id} is lost {count} times", "name every lost node once")
            for node_id, count in sorted(Counter(node_ids).items())
            if count > 1
        ]
        if not problems and known == set(node_ids):
            problems = [
                Problem(
                    f"every node is lost ({self.listing()}), and a plan needs at least one",
                    "keep at least one node",
                )
            ]
        raise_if_any(TopologyError, problems)
        return Topology((node for node in self.nodes if node.node_id not in node_ids), sort_by=self.sort_by)

    def join(self, *nodes: Node) -> "Topology":
        """This topology with further nodes."""
        return Topology((*self.nodes, *nodes), sort_by=self.sort_by)

    def listing(self, *, shown_max: int = 8) -> str:
        """Nodes and slots for messages: `a:4 b:2`, shortened if there are many."""
        shown = " ".join(f"{node.node_id}:{node.slots}" for node in self.nodes[:shown_max])
        hidden = len(self.nodes) - shown_max
        return f"{shown} and {hidden} more" if hidden > 0 else shown


def _node_problems(node: Node) -> Iterator[Problem]:
    if not is_name(node.node_id, _NODE_ID):
        yield Problem(
            f"node id {node.node_id!r} is not a name",
            f"use 1 to {NAME_LENGTH_MAX} letters, digits, dots, dashes and underscores, "
            "beginning with a letter or digit",
        )
    # A bool is an int to Python, and `slots=True` is a slip, not one slot.
    if type(node.slots) is not int or node.slots < 1:
        yield Problem(
            f"node {node.node_id} has {node.slots!r} slots",
            "give the number of ranks the node runs: a whole number, 1 or more",
        )
    # Typed as objects: what is checked here comes from files and from callers without a type checker.
    incarnation: object = node.incarnation
    if not isinstance(incarnation, str):
        yield Problem(f"node {node.node_id} has the incarnation {incarnation!r}", "give a text")
    labels: object = node.labels
    if not isinstance(labels, Mapping):
        hint = 'map keys to values, for example {"zone": "z1"}'
        yield Problem(f"node {node.node_id} has the labels {labels!r}", hint)
        return
    for key, value in labels.items():
        yield from _label_problems(node.node_id, key=key, value=value)


def _label_problems(node_id: str, *, key: object, value: object) -> Iterator[Problem]:
    if not is_name(key, KEY):
        yield Problem(
            f"node {node_id} has a label with the key {key!r}, which is not a name",
            "use letters, digits, dots, dashes, slashes and underscores, beginning with a letter",
        )
    # A label of that name would never be looked at.
    elif key in (NODE, GLOBAL) or SIZE_KEY.fullmatch(key):
        yield Problem(
            f"node {node_id} has a label {key}, which is the name of a level that needs no label",
            "choose another key",
        )
    if not is_name(value, _LABEL_VALUE):
        yield Problem(
            f"node {node_id} has the label {key} with the value {value!r}, which is not a name",
            "use letters, digits, dots, dashes, slashes and underscores, beginning with a letter or digit",
        )


def is_name(text: object, pattern: re.Pattern[str]) -> TypeGuard[str]:
    return isinstance(text, str) and len(text) <= NAME_LENGTH_MAX and bool(pattern.fullmatch(text))


def _membership_problems(nodes: tuple[Node, ...]) -> Iterator[Problem]:
    if not nodes:
        yield Problem("there are no nodes", "give at least one node")
    counts = Counter(node.node_id for node in nodes)
    for node_id in sorted((n for n, count in counts.items() if count > 1), key=natural_key):
        yield Problem(
            f"node id {node_id} is used by {counts[node_id]} nodes",
            "give every node a name of its own",
        )
    ranks = sum(node.slots for node in nodes)
    if ranks > RANKS_MAX:
        yield Problem(
            f"the nodes have {ranks} slots together, more than the {RANKS_MAX} a plan may have",
            "check the slots of each node",
        )
