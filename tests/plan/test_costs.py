"""Bytes by level and link, against figures worked out by hand, and how they are shown."""

from elastic_hieravg.plan import Hierarchy, Node, Topology, Traffic, cost, cost_text, fit, plan_text


def test_bytes_of_a_round_by_link() -> None:
    nodes = [
        Node("a", 4, {"zone": "z1"}),
        Node("b", 4, {"zone": "z1"}),
        Node("c", 2, {"zone": "z2"}),
    ]
    plan = fit(Hierarchy.parse("node=4,zone=16,global=64"), Topology(nodes))
    node, zone, last = cost(plan, model_bytes=300).levels
    # Inside nodes 3 + 3 + 1 copies go to the sum and back, at every level.
    assert node.per_round == Traffic(7 * 2 * 300, 0, 0)
    # Zone z1 has a ring of two nodes: each sends one model's worth. Zone z2 is one node.
    assert zone.per_round == Traffic(7 * 2 * 300, 2 * 300, 0)
    # A ring of three nodes has three links of 4/3 of a model; two of them cross zones.
    assert last.per_round == Traffic(7 * 2 * 300, 400, 800)


def test_bytes_of_a_step_count_only_the_rounds_that_run() -> None:
    plan = fit(Hierarchy.parse("node=4,global=16"), Topology([Node("a", 2), Node("b", 2)]))
    costs = cost(plan, model_bytes=160)
    assert [level.rounds_per_step for level in costs.levels] == [1 / 4 - 1 / 16, 1 / 16]
    assert costs.per_step == Traffic(640 / 4, 320 / 16, 0)
    assert costs.synchronous == Traffic(640, 320, 0)


def test_a_world_of_one_moves_nothing() -> None:
    plan = fit(Hierarchy.parse("global=4"), Topology([Node("a", 1)]))
    costs = cost(plan, model_bytes=100)
    assert costs.per_step == costs.synchronous == Traffic()
    assert "times less" not in cost_text(costs)


def test_many_nodes_are_shown_shortened() -> None:
    plan = fit(Hierarchy.parse("node=2,global=4"), Topology([Node(f"n{index}", 2) for index in range(100)]))
    text = plan_text(plan)
    assert "  ... and 76 more" in text
    assert "{14-15} and 92 more" in text
    assert len(text) < 2000


def test_the_saving_on_the_network_is_told() -> None:
    plan = fit(Hierarchy.parse("node=4,global=64"), Topology([Node("a", 2), Node("b", 2)]))
    last_line = cost_text(cost(plan, model_bytes=1000)).splitlines()[-1]
    assert last_line == "  between nodes and zones 64 times less than with a global round every step"
