"""Random topologies, hierarchies and changes for the property tests."""

from itertools import accumulate
from operator import mul

from hypothesis import strategies as st

from elastic_hieravg.plan import Hierarchy, Level, Node, Topology


def nodes(*, node_id: str) -> st.SearchStrategy[Node]:
    """A node whose racks nest in zones, because a rack is named after its zone."""

    def build(slots: int, zone: int, rack: int) -> Node:
        return Node(node_id, slots, {"zone": f"z{zone}", "rack": f"z{zone}-r{rack}"})

    return st.builds(build, st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))


@st.composite
def topologies(draw: st.DrawFn, *, nodes_min: int = 1) -> Topology:
    numbers = draw(st.lists(st.integers(0, 120), min_size=nodes_min, max_size=9, unique=True))
    return Topology([draw(nodes(node_id=f"node-{number}")) for number in numbers])


@st.composite
def hierarchies(draw: st.DrawFn) -> Hierarchy:
    """Places and sizes in any order that makes sense: sizes may stand inside, between and around places."""
    places = draw(st.lists(st.sampled_from(["node", "rack", "zone"]), unique=True))
    names = sorted(places, key=["node", "rack", "zone"].index)
    factors = draw(st.lists(st.integers(2, 4), max_size=2))
    at = 0
    for size in accumulate(factors, mul):
        at = draw(st.integers(at, len(names)))
        names.insert(at, f"size-{size}")
        at += 1
    names.append("global")
    growth = draw(st.lists(st.integers(2, 5), min_size=len(names), max_size=len(names)))
    return Hierarchy(tuple(map(Level, names, accumulate(growth, mul))))
