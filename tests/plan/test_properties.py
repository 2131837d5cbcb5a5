"""What holds for every topology, hierarchy, loss and join."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from elastic_hieravg.plan import Hierarchy, Plan, Topology, cost, difference, first_keys, fit
from tests.strategies import hierarchies, nodes, topologies

STEPS = range(1, 400)


@given(hierarchies(), topologies())
def test_groups_partition_the_world_at_every_level(hierarchy: Hierarchy, topology: Topology) -> None:
    plan = fit(hierarchy, topology)
    for level in plan.levels:
        ranks = [rank for group in level.groups for rank in group]
        assert sorted(ranks) == list(range(plan.world_size))
        assert all(level.groups)
        assert list(level.groups) == sorted(level.groups)


@given(hierarchies(), topologies())
def test_levels_nest_and_the_last_spans_the_world(hierarchy: Hierarchy, topology: Topology) -> None:
    plan = fit(hierarchy, topology)
    for inner, outer in zip(plan.levels, plan.levels[1:], strict=False):
        assert outer.period_steps % inner.period_steps == 0
        assert inner.groups != outer.groups
        for group in inner.groups:
            assert set(group) <= set(outer.group_of(group[0]))
    if plan.world_size > 1:
        assert plan.levels[-1].groups == (tuple(range(plan.world_size)),)
    else:
        assert plan.levels == ()


@given(hierarchies(), topologies())
def test_no_group_mixes_a_part_of_a_node_with_another_node(hierarchy: Hierarchy, topology: Topology) -> None:
    plan = fit(hierarchy, topology)
    names = [level.name for level in hierarchy.levels]
    for level in plan.levels:
        is_place = not level.name.startswith("size-")
        around_node = "node" in names and names.index(level.name) >= names.index("node")
        for group in level.groups:
            on = {plan.seat(rank).node_id for rank in group}
            is_whole = len(group) == sum(len(plan.topology.ranks_of(node_id)) for node_id in on)
            assert is_whole or (len(on) == 1 and not is_place and not around_node)


@given(hierarchies(), topologies())
def test_sized_groups_are_no_larger_than_asked_unless_a_place_inside_is(
    hierarchy: Hierarchy, topology: Topology
) -> None:
    plan = fit(hierarchy, topology)
    names = [level.name for level in hierarchy.levels]
    for level in hierarchy.levels:
        planned = next((found for found in plan.levels if found.name == level.name), None)
        inside = [name for name in names[: names.index(level.name)] if not name.startswith("size-")]
        if planned and level.group_size and not inside:
            assert max(map(len, planned.groups)) <= level.group_size


@given(hierarchies(), topologies(), st.randoms(use_true_random=False))
def test_same_nodes_in_any_order_give_the_same_digest(
    hierarchy: Hierarchy, topology: Topology, random: Random
) -> None:
    shuffled = list(topology.nodes)
    random.shuffle(shuffled)
    again = fit(hierarchy, Topology(shuffled), generation=7)
    first = fit(hierarchy, topology)
    assert again.digest == first.digest
    assert again.levels == first.levels
    assert again.notes == first.notes


@given(hierarchies(), topologies(), st.integers(0, 50), st.integers(0, 10**6))
def test_json_round_trips(hierarchy: Hierarchy, topology: Topology, warmup_steps: int, generation: int) -> None:
    plan = fit(hierarchy, topology, generation=generation, warmup_steps=warmup_steps)
    assert Plan.from_json(plan.to_json()) == plan


@given(hierarchies(), topologies(), st.integers(0, 50))
def test_at_most_one_level_is_due_and_it_is_the_widest(
    hierarchy: Hierarchy, topology: Topology, warmup_steps: int
) -> None:
    plan = fit(hierarchy, topology, warmup_steps=warmup_steps)
    for step in STEPS:
        due = [
            level
            for level in plan.levels
            if step > warmup_steps and (step - warmup_steps) % level.period_steps == 0
        ]
        assert plan.due(step) == (due[-1] if due else None)


@given(hierarchies(), topologies(), st.integers(0, 50))
def test_next_due_step_is_the_first_one_that_is_due(
    hierarchy: Hierarchy, topology: Topology, warmup_steps: int
) -> None:
    plan = fit(hierarchy, topology, warmup_steps=warmup_steps)
    for level in plan.levels:
        for after_step in (0, warmup_steps, warmup_steps + level.period_steps, 77):
            found = plan.next_due_step(level, after_step=after_step)
            dues = [
                step
                for step in range(after_step + 1, found + 1)
                if step > warmup_steps and (step - warmup_steps) % level.period_steps == 0
            ]
            assert dues == [found]


@given(hierarchies(), topologies(nodes_min=2), st.data())
def test_the_phase_of_a_period_survives_a_resize(
    hierarchy: Hierarchy, topology: Topology, data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(topology.nodes))
    before, after = fit(hierarchy, topology), fit(hierarchy, topology.lose(lost.node_id), generation=2)
    for level in before.levels:
        survivor = next((found for found in after.levels if found.name == level.name), None)
        if survivor:
            assert [s for s in STEPS if before.next_due_step(level, after_step=s - 1) == s] == [
                s for s in STEPS if after.next_due_step(survivor, after_step=s - 1) == s
            ]


@given(hierarchies(), topologies(nodes_min=2), st.data())
def test_losing_and_joining_the_same_node_gives_the_first_plan_again(
    hierarchy: Hierarchy, topology: Topology, data: st.DataObject
) -> None:
    node = data.draw(st.sampled_from(topology.nodes))
    first = fit(hierarchy, topology)
    again = fit(hierarchy, topology.lose(node.node_id).join(node))
    assert again == first


@given(hierarchies(), topologies(nodes_min=2), st.data())
def test_losing_a_node_moves_no_rank_before_it_and_the_others_by_its_slots(
    hierarchy: Hierarchy, topology: Topology, data: st.DataObject
) -> None:
    before = fit(hierarchy, topology)
    index = data.draw(st.integers(0, len(before.topology.nodes) - 1))
    node = before.topology.nodes[index]
    after = fit(hierarchy, topology.lose(node.node_id), generation=2)
    change = difference(before, after, keys=first_keys(before))
    first_lost = before.topology.first_ranks[index]
    assert {move.rank_before - move.rank for move in change.moves} <= {node.slots}
    assert len(change.moves) == before.world_size - first_lost - node.slots
    assert all(move.rank_before > first_lost for move in change.moves)


@given(hierarchies(), topologies(nodes_min=2), st.data())
def test_groups_are_kept_exactly_if_their_members_are_the_same_and_sound(
    hierarchy: Hierarchy, topology: Topology, data: st.DataObject
) -> None:
    before = fit(hierarchy, topology, generation=4)
    keys = first_keys(before)
    broken = data.draw(st.lists(st.sampled_from(keys), unique=True) if keys else st.just([]))
    lost = data.draw(st.sampled_from(topology.nodes))
    joined = data.draw(nodes(node_id="node-999"))
    after = fit(hierarchy, topology.lose(lost.node_id).join(joined), generation=5)
    change = difference(before, after, keys=keys, broken=broken)
    members_before = {key.members for key in keys}
    assert {group.key for group in change.kept} == {
        key for key in keys if key not in broken and key.members in {k.members for k in change.keys}
    }
    assert all(group.key.generation == 5 for group in change.new)
    assert {group.key for group in change.gone} == set(keys) - {group.key for group in change.kept}
    sound = {key.members for key in keys if key not in broken}
    assert not {group.key.members for group in change.new} & (members_before & sound)
    assert len({key.name for key in (*keys, *change.keys)}) == len({*keys, *change.keys})


@given(hierarchies(), topologies(), st.integers(1, 10**9))
def test_cost_is_that_of_bringing_every_copy_to_the_sum_and_back(
    hierarchy: Hierarchy, topology: Topology, model_bytes: int
) -> None:
    plan = fit(hierarchy, topology)
    costs = cost(plan, model_bytes=model_bytes)
    for level, found in zip(plan.levels, costs.levels, strict=True):
        copies = sum(len(group) - 1 for group in level.groups)
        moved = found.per_round.inside_nodes_bytes + found.per_round.network_bytes
        assert abs(moved - 2 * copies * model_bytes) <= 1e-9 * moved
    rounds = sum(found.rounds_per_step for found in costs.levels)
    assert abs(rounds - (1 / plan.levels[0].period_steps if plan.levels else 0)) < 1e-12
