"""What `fit` refuses, holds and repairs. What it gives is told by the scenarios and the properties."""

import pytest

from elastic_hieravg.errors import InputError, TopologyError
from elastic_hieravg.plan import Hierarchy, Misfit, Node, NoteKind, Plan, Topology, fit
from elastic_hieravg.plan.fitting import NODES_NAMED_MAX

TWO_BY_TWO = Topology([Node("a", 2), Node("b", 2)])


def test_rejects_a_level_no_node_has_a_label_for() -> None:
    with pytest.raises(TopologyError, match="level rack is unknown: no node has a label rack") as error:
        fit(Hierarchy.parse("rack=2,global=4"), Topology([Node("a", 1, {"zone": "z1"})]))
    assert "they have zone" in error.value.problems[0].hint
    with pytest.raises(TopologyError, match="they have no labels"):
        fit(Hierarchy.parse("rack=2,global=4"), TWO_BY_TWO)


def test_rejects_a_label_missing_on_some_nodes_and_names_them() -> None:
    bare = [Node(f"n{index}", 1) for index in range(NODES_NAMED_MAX + 2)]
    with pytest.raises(TopologyError, match="it is missing on n0, n1, n2, n3, n4 and 2 more"):
        fit(Hierarchy.parse("zone=2,global=4"), Topology([Node("x", 1, {"zone": "z1"}), *bare]))


def test_rejects_a_rack_in_two_zones_and_names_the_nodes() -> None:
    nodes = [Node("a", 1, {"zone": "z1", "rack": "r1"}), Node("b", 1, {"zone": "z2", "rack": "r1"})]
    with pytest.raises(TopologyError, match=r"rack r1 is in more than one zone: z1 \(a\) and z2 \(b\)"):
        fit(Hierarchy.parse("rack=2,zone=4,global=8"), Topology(nodes))


def test_rejects_a_rack_in_two_zones_even_if_zones_are_no_level() -> None:
    nodes = [Node("a", 1, {"zone": "z1", "rack": "r1"}), Node("b", 1, {"zone": "z2", "rack": "r1"})]
    with pytest.raises(TopologyError, match="rack r1 is in more than one zone"):
        fit(Hierarchy.parse("rack=2,global=8"), Topology(nodes))


def test_labels_that_are_no_level_need_not_nest() -> None:
    nodes = [Node("a", 1, {"zone": "z1", "rack": "r1"}), Node("b", 1, {"zone": "z2", "rack": "r1"})]
    assert fit(Hierarchy.parse("zone=2,global=8"), Topology(nodes)).world_size == 2


def test_ranks_follow_well_known_labels_before_others() -> None:
    nodes = [
        Node("a", 1, {"zone": "z1", "switch": "s1"}),
        Node("b", 1, {"zone": "z2", "switch": "s2"}),
        Node("c", 1, {"zone": "z1", "switch": "s3"}),
    ]
    plan = fit(Hierarchy.parse("switch=2,global=8"), Topology(nodes))
    assert [node.node_id for node in plan.topology.nodes] == ["a", "c", "b"]


def test_reports_all_label_problems_together() -> None:
    nodes = [
        Node("a", 1, {"zone": "z1", "rack": "r1"}),
        Node("b", 1, {"zone": "z2", "rack": "r1"}),
        Node("c", 1),
    ]
    with pytest.raises(TopologyError) as error:
        fit(Hierarchy.parse("rack=2,zone=4,room=8,global=16"), Topology(nodes))
    assert len(error.value.problems) == 4


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"warmup_steps": -1}, "there are -1 warm-up steps"),
        ({"generation": -1}, "the generation is -1"),
        ({"generation": 1.5}, "the generation is 1.5"),
        ({"generation": True}, "the generation is True"),
        ({"on_misfit": "ignore"}, "on_misfit is 'ignore'"),
    ],
)
def test_rejects_arguments_that_make_no_sense(arguments: dict[str, int], found: str) -> None:
    with pytest.raises(InputError, match=found):
        fit(Hierarchy.parse("global=4"), TWO_BY_TWO, **arguments)  # type: ignore[call-overload]


def test_generations_are_counted_from_0() -> None:
    assert fit(Hierarchy.parse("global=4"), TWO_BY_TWO, generation=0).generation == 0


def test_strict_returns_the_misfit_with_its_reason() -> None:
    hierarchy = Hierarchy.parse("size-8=4,global=16")
    misfit = fit(hierarchy, Topology([Node("a", 4), Node("b", 2)]), on_misfit="strict")
    assert misfit == Misfit(
        "level size-8 averages groups of 8 ranks, which does not divide the world of 6 (a:4 b:2)",
        "give --on-misfit repair to average over uneven groups, or wait for 2 more ranks",
    )


def test_strict_holds_if_sizes_divide_the_world_but_would_split_a_node() -> None:
    hierarchy = Hierarchy.from_group_sizes({2: 2, 8: 4})
    misfit = fit(hierarchy, Topology([Node("a", 1), Node("b", 2), Node("c", 1)]), on_misfit="strict")
    assert isinstance(misfit, Misfit)
    assert "cannot be made of whole nodes in rank order in the world of 4 (a:1 b:2 c:1)" in misfit.reason
    assert misfit.hint == "give --on-misfit repair to average over uneven groups"


def test_strict_holds_if_the_last_size_is_not_the_world() -> None:
    misfit = fit(Hierarchy.from_group_sizes({2: 2, 8: 8}), TWO_BY_TWO, on_misfit="strict")
    assert isinstance(misfit, Misfit)
    assert "groups of 8 ranks, which is not the world of 4" in misfit.reason
    assert misfit.hint.endswith("or wait for 4 more ranks")
    misfit = fit(Hierarchy.from_group_sizes({2: 1, 8: 3}), TWO_BY_TWO, on_misfit="strict")
    assert isinstance(misfit, Misfit)
    assert misfit.hint.endswith("or wait for 1 fewer rank")


def test_the_reason_names_the_level_around_if_that_is_what_does_not_divide() -> None:
    nodes = [Node("a", 2, {"zone": "z1"}), *(Node(name, 2, {"zone": "z2"}) for name in "bcd")]
    plan = fit(Hierarchy.parse("size-4=2,zone=4,global=8"), Topology(nodes))
    assert plan.notes[0].reason == (
        "level size-4 averages groups of 4 ranks, which does not divide the groups of zone, "
        "2 to 6 ranks each: 3 groups of 2 to 4 ranks instead"
    )


def test_strict_gives_a_plan_where_the_sizes_fit() -> None:
    plan = fit(Hierarchy.from_group_sizes({2: 2, 8: 4}), TWO_BY_TWO, on_misfit="strict")
    assert isinstance(plan, Plan)
    assert plan.notes == ()


def test_strict_concerns_sizes_only() -> None:
    plan = fit(Hierarchy.parse("node=2,global=4"), Topology([Node("a", 2)]), on_misfit="strict")
    assert isinstance(plan, Plan)
    assert [note.kind for note in plan.notes] == [NoteKind.MERGED]


def test_sizes_give_torchs_contiguous_blocks_where_torch_gives_any() -> None:
    plan = fit(Hierarchy.from_group_sizes({2: 2, 4: 4, 8: 8}), Topology([Node("a", 4), Node("b", 4)]))
    assert [level.groups for level in plan.levels] == [
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((0, 1, 2, 3, 4, 5, 6, 7),),
    ]


# Rack r1 stands on both sides of r2 in rank order, because only one of its nodes has a zone.
INTERLEAVED = Topology(
    [
        Node("a", 2, {"rack": "r1"}),
        Node("b", 2, {"rack": "r2"}),
        Node("c", 2, {"rack": "r1", "zone": "z1"}),
    ]
)


def test_sized_groups_inside_interleaved_places_are_in_order() -> None:
    plan = fit(Hierarchy.parse("size-2=2,rack=4,global=8"), INTERLEAVED)
    assert [level.groups for level in plan.levels] == [
        ((0, 1), (2, 3), (4, 5)),
        ((0, 1, 4, 5), (2, 3)),
        ((0, 1, 2, 3, 4, 5),),
    ]


def test_sized_groups_around_interleaved_places_are_in_order() -> None:
    topology = INTERLEAVED.join(Node("d", 2, {"rack": "r3", "zone": "z2"}))
    plan = fit(Hierarchy.parse("rack=2,size-6=4,global=8"), topology)
    assert plan.levels[1].groups == ((0, 1, 2, 3, 4, 5), (6, 7))
