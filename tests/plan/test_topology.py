"""Nodes and their order."""

import copy
import pickle

import pytest

from elastic_hieravg.errors import TopologyError
from elastic_hieravg.plan import Node, Seat, Topology, natural_key
from elastic_hieravg.plan.topology import RANKS_MAX


@pytest.mark.parametrize(
    "names",
    [
        ["node-2", "node-10"],
        ["a", "a1", "b"],
        ["n-02", "n-2", "n-3"],
        ["1", "2", "10", "a"],
        ["rack9-node10", "rack10-node2"],
    ],
)
def test_numbers_in_names_sort_as_numbers(names: list[str]) -> None:
    backwards = names[::-1]
    assert sorted(backwards, key=natural_key) == names


def test_ranks_follow_zone_rack_node_then_slot() -> None:
    topology = Topology(
        [
            Node("n1", 1, {"zone": "z10"}),
            Node("n3", 2, {"zone": "z2", "rack": "r1"}),
            Node("n2", 1, {"zone": "z2", "rack": "r2"}),
            Node("n9", 1),
        ]
    )
    assert list(topology.seats()) == [
        Seat(0, "n9", 0),
        Seat(1, "n3", 0),
        Seat(2, "n3", 1),
        Seat(3, "n2", 0),
        Seat(4, "n1", 0),
    ]
    assert [topology.seat(rank) for rank in range(5)] == list(topology.seats())


def test_ranks_follow_regions_before_zones() -> None:
    east = Node("a", 1, {"region": "r2", "zone": "z1"})
    west = Node("b", 1, {"region": "r1", "zone": "z2"})
    assert Topology([east, west]).nodes == (west, east)


@pytest.mark.parametrize("node_ids", [("n-2", "n-02"), ("n-02", "n-2")])
def test_names_with_equal_numbers_have_one_order(node_ids: tuple[str, str]) -> None:
    topology = Topology([Node(node_id, 1) for node_id in node_ids])
    assert [node.node_id for node in topology.nodes] == ["n-02", "n-2"]


def test_asking_for_what_is_not_there_fails() -> None:
    topology = Topology([Node("a", 2)])
    with pytest.raises(IndexError, match="rank 2 is not in a world of 2"):
        topology.seat(2)
    with pytest.raises(IndexError, match="rank -1"):
        topology.seat(-1)
    with pytest.raises(KeyError, match="b"):
        topology.ranks_of("b")


def test_a_node_is_a_value() -> None:
    node = Node("a", 2, {"zone": "z1", "rack": "r1"}, incarnation="x")
    same = Node("a", 2, {"rack": "r1", "zone": "z1"}, incarnation="x")
    assert node == same
    assert hash(node) == hash(same)
    assert pickle.loads(pickle.dumps(node)) == node
    assert copy.deepcopy(node) == node
    with pytest.raises(TypeError, match="does not support item assignment"):
        node.labels["zone"] = "z2"  # type: ignore[index]


def test_the_hash_of_a_node_is_of_everything_it_is() -> None:
    nodes = [
        Node("a", 2, {"zone": "z1"}, incarnation="x"),
        Node("b", 2, {"zone": "z1"}, incarnation="x"),
        Node("a", 3, {"zone": "z1"}, incarnation="x"),
        Node("a", 2, {"zone": "z2"}, incarnation="x"),
        Node("a", 2, {"rack": "z1"}, incarnation="x"),
        Node("a", 2, {"zone": "z1"}, incarnation="y"),
    ]
    assert len(set(map(hash, nodes))) == len(nodes)


def test_a_node_does_not_change_with_the_dict_it_was_made_from() -> None:
    labels = {"zone": "z1"}
    node = Node("a", 1, labels)
    labels["zone"] = "z2"
    assert node.labels == {"zone": "z1"}


@pytest.mark.parametrize(
    ("node_id", "slots", "labels", "found"),
    [
        ("", 1, {}, "node id '' is not a name"),
        ("a b", 1, {}, "node id 'a b' is not a name"),
        ("a:1", 1, {}, "node id 'a:1' is not a name"),
        ("a" * 254, 1, {}, "is not a name"),
        ("a", 1, {"k" * 254: "x"}, "which is not a name"),
        ("a", 1, {"zone": "v" * 254}, "which is not a name"),
        ("a", 0, {}, "node a has 0 slots"),
        ("a", -1, {}, "node a has -1 slots"),
        ("a", True, {}, "node a has True slots"),
        ("a", 1, {"z one": "x"}, "a label with the key 'z one'"),
        ("a", 1, {"zone": ""}, "the label zone with the value ''"),
        ("a", 1, {"zone": 7}, "the label zone with the value 7"),
        ("a", 1, {"node": "x"}, "has a label node, which is the name of a level"),
        ("a", 1, {"global": "x"}, "has a label global"),
        ("a", 1, {"size-8": "x"}, "has a label size-8"),
        ("a", 1, [("zone", "z1")], "node a has the labels [('zone', 'z1')]"),
    ],
)
def test_rejects_a_node_that_makes_no_sense(
    node_id: str, slots: int, labels: dict[str, str], found: str
) -> None:
    with pytest.raises(TopologyError) as error:
        Node(node_id, slots, labels)
    assert found in error.value.problems[0].message


def test_rejects_an_incarnation_that_is_no_text() -> None:
    with pytest.raises(TopologyError, match="node a has the incarnation 7"):
        Node("a", 1, {}, incarnation=7)  # type: ignore[arg-type]


def test_a_name_may_have_253_letters() -> None:
    node = Node("a" * 253, 1, {"k" * 253: "v" * 253})
    assert Topology([node]).nodes == (node,)


def test_rejects_memberships_that_make_no_sense() -> None:
    with pytest.raises(TopologyError, match="there are no nodes"):
        Topology([])
    with pytest.raises(TopologyError, match="node id a is used by 2 nodes"):
        Topology([Node("a", 1), Node("b", 1), Node("a", 2)])
    with pytest.raises(TopologyError, match=f"more than the {RANKS_MAX} a plan may have"):
        Topology([Node("a", RANKS_MAX), Node("b", 1)])


def test_lose_and_join_name_what_is_wrong() -> None:
    topology = Topology([Node("a", 1), Node("b", 1)])
    with pytest.raises(TopologyError, match="node c cannot be lost: there is no such node"):
        topology.lose("a", "c")
    with pytest.raises(TopologyError, match=r"every node is lost \(a:1 b:1\)"):
        topology.lose("a", "b")
    with pytest.raises(TopologyError, match="node id b is used by 2 nodes"):
        topology.join(Node("b", 1))


def test_a_long_listing_is_shortened() -> None:
    topology = Topology([Node(f"n{index}", 1) for index in range(10)])
    assert topology.listing() == "n0:1 n1:1 n2:1 n3:1 n4:1 n5:1 n6:1 n7:1 and 2 more"
