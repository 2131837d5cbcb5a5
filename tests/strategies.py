"""Random topologies, hierarchies and changes for the property tests."""

from collections.abc import Collection
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from hypothesis import strategies as st

from elastic_hieravg.plan import Hierarchy, Level, Node, Topology

# Widest first. The planner knows what the first three mean; `switch` is any other label.
LABELS = ("region", "zone", "rack", "switch")
# A label that no level names and no order follows.
UNUSED_LABEL = "room"
# n-2 and n-02 are equal as numbers and differ as names; n-10 is behind n-9.
NODE_IDS = [f"n-{zero}{number}" for number in range(12) for zero in ("", "0")]


class Job(NamedTuple):
    """What a plan is made of; every node has the labels that the levels need."""

    hierarchy: Hierarchy
    topology: Topology


@st.composite
def jobs(draw: st.DrawFn, *, nodes_min: int = 1) -> Job:
    hierarchy = draw(hierarchies() | group_sizes().map(Hierarchy.from_group_sizes))
    node_ids = draw(st.lists(st.sampled_from(NODE_IDS), min_size=nodes_min, max_size=9, unique=True))
    unneeded = [key for key in (*LABELS, UNUSED_LABEL) if key not in hierarchy.labels()]
    sparse = draw(st.sets(st.sampled_from(unneeded)))
    return Job(hierarchy, Topology([draw(nodes(node_id=node_id, sparse=sparse)) for node_id in node_ids]))


@st.composite
def nodes(draw: st.DrawFn, *, node_id: str, sparse: Collection[str] = ()) -> Node:
    """A node with all labels but some of the `sparse` ones; a place is named after the one around it."""
    place = ""
    labels = {UNUSED_LABEL: draw(st.sampled_from("ab"))}
    for key in LABELS:
        place += f"{key}{draw(st.sampled_from([2, 10]))}"
        labels[key] = place
        place += "/"
    missing = [key for key in labels if key in sparse and draw(st.booleans())]
    present = {key: value for key, value in labels.items() if key not in missing}
    return Node(node_id, draw(st.integers(1, 5)), present)


@st.composite
def hierarchies(draw: st.DrawFn) -> Hierarchy:
    """Places and sizes in any order that makes sense: sizes may stand inside, between and around places."""
    places = ("node", *reversed(LABELS))
    names = sorted(draw(st.lists(st.sampled_from(places), unique=True)), key=places.index)
    at = 0
    for size in draw(growing(len_max=2)):
        at = draw(st.integers(at, len(names)))
        names.insert(at, f"size-{size}")
        at += 1
    names.append("global")
    return Hierarchy(tuple(map(Level, names, draw(growing(len_min=len(names), len_max=len(names))))))


@st.composite
def group_sizes(draw: st.DrawFn) -> dict[int, int]:
    """Torch's form, period in steps to ranks per group, for `Hierarchy.from_group_sizes`."""
    sizes = draw(growing(len_min=1, len_max=3))
    periods = draw(growing(len_min=len(sizes), len_max=len(sizes)))
    return dict(zip(periods, sizes, strict=True))


def growing(*, len_min: int = 0, len_max: int) -> st.SearchStrategy[list[int]]:
    """Numbers of which each is a multiple of the one before."""
    factors = st.lists(st.integers(2, 4), min_size=len_min, max_size=len_max)
    return factors.map(lambda found: list(accumulate(found, mul)))
