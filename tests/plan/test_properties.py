"""What holds for every topology, hierarchy, loss and join."""

import re
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from elastic_hieravg.plan import (
    Hierarchy,
    Misfit,
    Node,
    NoteKind,
    Plan,
    Topology,
    cost,
    difference,
    first_keys,
    fit,
)
from tests.strategies import Job, group_sizes, jobs, nodes

STEPS = range(1, 400)
NUMBERS = re.compile("[0-9]+")


def in_natural_order(name: str) -> tuple[str, str]:
    """A sort key for the names of the strategies, found in another way than the planner's."""
    return NUMBERS.sub(lambda number: number[0].zfill(9), name), name


@given(jobs())
def test_groups_partition_the_world_at_every_level(job: Job) -> None:
    plan = fit(*job)
    for level in plan.levels:
        ranks = [rank for group in level.groups for rank in group]
        assert sorted(ranks) == list(range(plan.world_size))
        assert all(level.groups)
        assert list(level.groups) == sorted(level.groups)


@given(jobs())
def test_ranks_follow_region_zone_rack_then_other_levels_then_node(job: Job) -> None:
    plan = fit(*job)
    others = ["switch"] if "switch" in job.hierarchy.labels() else []
    expected = sorted(
        job.topology.nodes,
        key=lambda node: [
            *(in_natural_order(node.labels.get(key, "")) for key in ("region", "zone", "rack", *others)),
            in_natural_order(node.node_id),
        ],
    )
    seats = [(node.node_id, local_rank) for node in expected for local_rank in range(node.slots)]
    assert [(seat.node_id, seat.local_rank) for seat in plan.topology.seats()] == seats


@given(jobs())
def test_levels_nest_and_the_last_spans_the_world(job: Job) -> None:
    plan = fit(*job)
    for inner, outer in zip(plan.levels, plan.levels[1:], strict=False):
        assert outer.period_steps % inner.period_steps == 0
        assert inner.groups != outer.groups
        for group in inner.groups:
            assert set(group) <= set(outer.group_of(group[0]))
    if plan.world_size > 1:
        assert plan.levels[-1].groups == (tuple(range(plan.world_size)),)
    else:
        assert plan.levels == ()


@given(jobs())
def test_no_group_mixes_a_part_of_a_node_with_another_node(job: Job) -> None:
    plan = fit(*job)
    names = [level.name for level in job.hierarchy.levels]
    for level in plan.levels:
        is_place = not level.name.startswith("size-")
        around_node = "node" in names and names.index(level.name) >= names.index("node")
        for group in level.groups:
            on = {plan.seat(rank).node_id for rank in group}
            is_whole = len(group) == sum(len(plan.topology.ranks_of(node_id)) for node_id in on)
            assert is_whole or (len(on) == 1 and not is_place and not around_node)


@given(jobs())
def test_sized_groups_are_no_larger_than_asked_unless_a_place_inside_is(job: Job) -> None:
    plan = fit(*job)
    names = [level.name for level in job.hierarchy.levels]
    for level in job.hierarchy.levels:
        planned = next((found for found in plan.levels if found.name == level.name), None)
        inside = [name for name in names[: names.index(level.name)] if not name.startswith("size-")]
        if planned and level.group_size and not inside:
            assert max(map(len, planned.groups)) <= level.group_size


@given(jobs())
def test_strict_holds_exactly_if_sizes_were_repaired(job: Job) -> None:
    repaired = fit(*job)
    strict = fit(*job, on_misfit="strict")
    if any(note.kind is NoteKind.RESIZED for note in repaired.notes):
        assert isinstance(strict, Misfit)
    else:
        assert strict == repaired


@given(group_sizes(), st.data())
def test_group_sizes_that_fit_give_torchs_contiguous_blocks(
    period_group_size: dict[int, int], data: st.DataObject
) -> None:
    *_, world_size = sizes = list(period_group_size.values())
    slots = data.draw(st.sampled_from([1, *sizes]))
    topology = Topology([Node(f"n-{index}", slots) for index in range(world_size // slots)])
    plan = fit(Hierarchy.from_group_sizes(period_group_size), topology, on_misfit="strict")
    assert isinstance(plan, Plan)
    assert [(level.period_steps, level.groups) for level in plan.levels] == [
        (period, tuple(tuple(range(start, start + size)) for start in range(0, world_size, size)))
        for period, size in period_group_size.items()
    ]


@given(jobs(), st.randoms(use_true_random=False))
def test_same_nodes_in_any_order_give_the_same_digest(job: Job, random: Random) -> None:
    shuffled = list(job.topology.nodes)
    random.shuffle(shuffled)
    again = fit(job.hierarchy, Topology(shuffled), generation=7)
    first = fit(*job)
    assert again.digest == first.digest
    assert again.levels == first.levels
    assert again.notes == first.notes


@given(jobs(), st.integers(0, 50), st.integers(0, 10**6))
def test_json_round_trips(job: Job, warmup_steps: int, generation: int) -> None:
    plan = fit(*job, generation=generation, warmup_steps=warmup_steps)
    assert Plan.from_json(plan.to_json()) == plan


@given(jobs(), st.integers(0, 50))
def test_at_most_one_level_is_due_and_it_is_the_widest(job: Job, warmup_steps: int) -> None:
    plan = fit(*job, warmup_steps=warmup_steps)
    for step in STEPS:
        due = [
            level
            for level in plan.levels
            if step > warmup_steps and (step - warmup_steps) % level.period_steps == 0
        ]
        assert plan.due(step) == (due[-1] if due else None)


@given(jobs(), st.integers(0, 50))
def test_next_due_step_is_the_first_one_that_is_due(job: Job, warmup_steps: int) -> None:
    plan = fit(*job, warmup_steps=warmup_steps)
    for level in plan.levels:
        for after_step in (0, warmup_steps, warmup_steps + level.period_steps, 77):
            found = plan.next_due_step(level, after_step=after_step)
            dues = [
                step
                for step in range(after_step + 1, found + 1)
                if step > warmup_steps and (step - warmup_steps) % level.period_steps == 0
            ]
            assert dues == [found]


@given(jobs(nodes_min=2), st.data())
def test_the_phase_of_a_period_survives_a_resize(job: Job, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(job.topology.nodes))
    before, after = fit(*job), fit(job.hierarchy, job.topology.lose(lost.node_id), generation=2)
    for level in before.levels:
        survivor = next((found for found in after.levels if found.name == level.name), None)
        if survivor:
            assert [s for s in STEPS if before.next_due_step(level, after_step=s - 1) == s] == [
                s for s in STEPS if after.next_due_step(survivor, after_step=s - 1) == s
            ]


@given(jobs(nodes_min=2), st.data())
def test_losing_and_joining_the_same_node_gives_the_first_plan_again(job: Job, data: st.DataObject) -> None:
    node = data.draw(st.sampled_from(job.topology.nodes))
    first = fit(*job)
    again = fit(job.hierarchy, job.topology.lose(node.node_id).join(node))
    assert again == first


@given(jobs(nodes_min=2), st.data())
def test_losing_a_node_moves_no_rank_before_it_and_the_others_by_its_slots(
    job: Job, data: st.DataObject
) -> None:
    before = fit(*job)
    index = data.draw(st.integers(0, len(before.topology.nodes) - 1))
    node = before.topology.nodes[index]
    after = fit(job.hierarchy, job.topology.lose(node.node_id), generation=2)
    change = difference(before, after, keys=first_keys(before))
    first_lost = before.topology.first_ranks[index]
    assert {move.rank_before - move.rank for move in change.moves} <= {node.slots}
    assert len(change.moves) == before.world_size - first_lost - node.slots
    assert all(move.rank_before > first_lost for move in change.moves)


@given(jobs(nodes_min=2), st.data())
def test_groups_are_kept_exactly_if_their_members_are_the_same_and_sound(job: Job, data: st.DataObject) -> None:
    before = fit(*job, generation=4)
    keys = first_keys(before)
    broken = data.draw(st.lists(st.sampled_from(keys), unique=True) if keys else st.just([]))
    lost = data.draw(st.sampled_from(job.topology.nodes))
    joined = data.draw(nodes(node_id="n-999"))
    after = fit(job.hierarchy, job.topology.lose(lost.node_id).join(joined), generation=5)
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


@given(jobs(), st.integers(1, 10**9))
def test_cost_is_that_of_bringing_every_copy_to_the_sum_and_back(job: Job, model_bytes: int) -> None:
    plan = fit(*job)
    costs = cost(plan, model_bytes=model_bytes)
    for level, found in zip(plan.levels, costs.levels, strict=True):
        copies = sum(len(group) - 1 for group in level.groups)
        moved = found.per_round.inside_nodes_bytes + found.per_round.network_bytes
        assert abs(moved - 2 * copies * model_bytes) <= 1e-9 * moved
    rounds = sum(found.rounds_per_step for found in costs.levels)
    assert abs(rounds - (1 / plan.levels[0].period_steps if plan.levels else 0)) < 1e-12
