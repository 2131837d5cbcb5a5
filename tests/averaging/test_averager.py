"""The averager over a plan, on real processes: schedule, weights, plans that change, hooks, state."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic_hieravg.averaging import memory
from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.errors import HierAvgError, ParametersError
from elastic_hieravg.events import RoundDone
from elastic_hieravg.plan import Hierarchy, Node, Plan, Topology, difference, first_keys, fit
from tests.averaging.ranks import Raised, Rank, Ranks


def make_plan(hierarchy: str, *slots: int, warmup_steps: int = 0, generation: int = 1) -> Plan:
    """Nodes a, b, c, ... of so many slots, two to a zone."""
    nodes = [
        Node(name, count, {"zone": f"z{index // 2}"})
        for index, (name, count) in enumerate(zip("abcdefgh", slots, strict=False))
    ]
    return fit(Hierarchy.parse(hierarchy), Topology(nodes), warmup_steps=warmup_steps, generation=generation)


class Scalar(nn.Module):
    """A model of one number, so that averages can be followed by hand."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), value))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.count: torch.Tensor


def answers_of(answers: list[Any]) -> list[Any]:
    raised = [answer.text for answer in answers if isinstance(answer, Raised)]
    assert not raised, raised[0]
    return answers


def record_levels(rank: Rank, plan: Plan, num_steps: int) -> tuple[list[str], list[float]]:
    model, rounds = Scalar(float(rank.rank)), []
    with HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store()) as averager:
        values = [model.value.item()]
        for _ in range(num_steps):
            model.value.data += rank.rank
            done = averager.step()
            rounds.append(done.level if done else "")
            values.append(model.value.item())
    return rounds, values


def test_the_widest_level_due_runs_and_everybody_begins_with_rank_0s_model(ranks: Ranks) -> None:
    plan = make_plan("node=2,zone=4,global=8", 2, 1, 1)
    answers = answers_of(ranks.call(record_levels, plan, 8, world_size=4))
    assert [levels for levels, _ in answers] == [
        # Rank 2 is alone on its node, rank 3 alone in its zone: nobody to average with there.
        ["", "node", "", "zone", "", "node", "", "global"],
        ["", "node", "", "zone", "", "node", "", "global"],
        ["", "", "", "zone", "", "", "", "global"],
        ["", "", "", "", "", "", "", "global"],
    ]
    assert [values[0] for _, values in answers] == [0.0] * 4
    assert [values[2] for _, values in answers] == [1.0, 1.0, 4.0, 6.0]
    assert [values[4] for _, values in answers] == [pytest.approx(4.0)] * 3 + [12.0]
    assert [values[8] for _, values in answers] == [pytest.approx(8 * 1.5)] * 4


def test_during_warm_up_every_step_ends_with_a_global_round(ranks: Ranks) -> None:
    plan = make_plan("node=2,global=4", 2, 2, warmup_steps=3)
    for levels, _ in answers_of(ranks.call(record_levels, plan, 8, world_size=4)):
        assert levels == ["global", "global", "global", "", "node", "", "global", ""]


def test_a_world_of_one_has_nothing_to_average(ranks: Ranks) -> None:
    plan = make_plan("node=2,global=4", 1, warmup_steps=2)
    assert answers_of(ranks.call(record_levels, plan, 6, world_size=1)) == [([""] * 6, [0.0] * 7)]


def weighted(rank: Rank, plan: Plan, samples: list[list[int]]) -> float:
    """Each rank's model ends where its samples weigh it: value += rank in steps of different samples."""
    model = Scalar(0.0)
    with HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store()) as averager:
        model.value.data.fill_(float(rank.rank))
        for count in samples[rank.rank]:
            averager.step(num_samples=count)
    return float(model.value.item())


def test_the_average_over_levels_is_the_sample_weighted_mean(ranks: Ranks) -> None:
    plan = make_plan("node=1,zone=2,global=4", 2, 1, 1)
    samples = [[1, 2, 3, 4], [10, 0, 0, 5], [7, 7, 7, 7], [100, 0, 1, 0]]
    # After an inner round its group shares one model, whose weight further out is all their samples.
    ab_node = (0 * 1 + 1 * 10) / 11
    zone = (ab_node * 13 + 2 * 14) / 27
    expected = (zone * (13 + 14 + 12 + 14) + 3 * 101) / (13 + 14 + 12 + 14 + 101)
    for value in answers_of(ranks.call(weighted, plan, samples, world_size=4)):
        assert value == pytest.approx(expected, rel=1e-6)


def replanned(rank: Rank) -> tuple[float, list[str], float, int]:
    """Rank 3 leaves after step 2 and the others go on; then it comes back."""
    observed: list[RoundDone] = []
    hierarchy = "node=1,global=2"
    first = make_plan(hierarchy, 2, 1, 1)
    store = rank.store()
    model = Scalar(float(rank.rank))
    averager = HierarchicalAverager(
        model, plan=first, rank=rank.rank, store=store, observe=observed.append, timeout_s=30
    )
    keys = first_keys(first)
    smaller = make_plan(hierarchy, 2, 1, generation=2)
    shrink = difference(first, smaller, keys=keys)
    again = make_plan(hierarchy, 2, 1, 1, generation=3)
    grow = difference(smaller, again, keys=shrink.keys)
    for _ in range(2):
        averager.step()
    groups_before = dict(averager._groups)
    if rank.rank < 3:
        model.value.data.fill_(float(rank.rank))
        averager.adopt(smaller, rank=rank.rank, keys=shrink.keys)
        kept = sum(averager._groups.get(key) is group for key, group in groups_before.items())
        for _ in range(2):
            averager.step()
        alone = model.value.item()
    else:
        averager.close()
        kept, alone = 0, -1.0
        averager = HierarchicalAverager(
            model, plan=again, rank=3, store=store, keys=grow.keys, equalize=False, timeout_s=30
        )
    if rank.rank < 3:
        averager.adopt(again, rank=rank.rank, keys=grow.keys)
    model.value.data.fill_(float(rank.rank))
    for _ in range(2):
        averager.step()
    averager.close()
    return alone, [done.level for done in observed], float(model.value.item()), kept


def test_groups_that_did_not_change_are_kept_between_plans(ranks: Ranks) -> None:
    answers = answers_of(ranks.call(replanned, world_size=4))
    assert [alone for alone, _, _, _ in answers[:3]] == [pytest.approx(1.0)] * 3
    assert [value for _, _, value, _ in answers] == [pytest.approx(1.5)] * 4
    # The node group of ranks 0 and 1 is kept; the global one is not.
    assert [kept for *_, kept in answers] == [1, 1, 0, 0]


def attached(rank: Rank, plan: Plan) -> dict[str, Any]:
    model = Scalar(0.0)
    averager = HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = averager.attach(optimizer, num_samples=lambda: 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model.value * (rank.rank + 1)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    counts = {}
    optimizer.step(closure)
    counts["closure"] = averager.step_count
    # Two micro-batches, one step.
    closure()
    (model.value * 1.0).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    counts["accumulated"] = averager.step_count
    # A scaler that meets an infinity does not call the optimizer at all.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.zero_grad()
    scaler.scale((model.value * float("inf")).sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    counts["skipped by the scaler"] = averager.step_count
    state = averager.state_dict()
    handle.remove()
    # A fused optimizer is called all the same, and finds out itself.
    fused = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    handle = averager.attach(fused)
    before = model.value.item()
    scaler.step(fused)
    counts["skipped by the optimizer"] = averager.step_count
    assert model.value.item() == before
    handle.remove()
    optimizer.step()
    counts["detached"] = averager.step_count
    averager.close()
    return {"counts": counts, "state": state}


def test_an_attached_averager_counts_the_steps_that_were_made(ranks: Ranks) -> None:
    plan = make_plan("global=64", 2)
    for answer in answers_of(ranks.call(attached, plan, world_size=2)):
        assert answer["counts"] == {
            "closure": 1,
            "accumulated": 2,
            "skipped by the scaler": 2,
            "skipped by the optimizer": 2,
            "detached": 2,
        }
        assert answer["state"] == {"version": 1, "step": 2, "samples": {"global": 8.0}}


def resumed(rank: Rank, plan: Plan) -> tuple[list[str], list[str], float]:
    straight, _ = record_levels(Rank(rank.rank, rank.world_size, rank.port, rank.scope + "/straight"), plan, 8)
    model, levels = Scalar(float(rank.rank)), []
    first = HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store("first"))
    for _ in range(3):
        done = first.step(num_samples=2)
        levels.append(done.level if done else "")
    state = first.state_dict()
    first.close()
    second = HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store("second"))
    second.load_state_dict(state)
    assert second.state_dict() == state
    for _ in range(5):
        done = second.step(num_samples=2)
        levels.append(done.level if done else "")
    second.close()
    return straight, levels, second.state_dict()["samples"]["global"]


def test_a_restored_averager_goes_on_where_it_was(ranks: Ranks) -> None:
    plan = make_plan("node=2,global=4", 2, 2, warmup_steps=1)
    for straight, levels, left in answers_of(ranks.call(resumed, plan, world_size=4)):
        assert levels == straight
        # Warm-up 1, then global at 5: three steps of two samples are not averaged yet.
        assert left == 6.0


def test_a_state_that_is_none_is_refused() -> None:
    plan = make_plan("global=2", 1)
    averager = HierarchicalAverager(Scalar(0.0), plan=plan, rank=0, store=dist.HashStore())
    with pytest.raises(ParametersError, match="version None, step None and samples None"):
        averager.load_state_dict({})
    with pytest.raises(ParametersError, match="version 1, step '3'"):
        averager.load_state_dict({"version": 1, "step": "3", "samples": {}})


@pytest.mark.parametrize("num_samples", [-1, float("nan"), float("inf")])
def test_a_step_over_no_sensible_number_of_samples_is_refused(num_samples: float) -> None:
    plan = make_plan("global=2", 1)
    averager = HierarchicalAverager(Scalar(0.0), plan=plan, rank=0, store=dist.HashStore())
    with pytest.raises(ParametersError, match=rf"averager\.step\(num_samples={num_samples}\)"):
        averager.step(num_samples=num_samples)
    assert averager.step_count == 0


def deserted(rank: Rank) -> tuple[str, float]:
    """A new plan names a rank that never comes; the plan of before stays."""
    before = make_plan("node=1,global=2", 2)
    after = make_plan("node=1,global=2", 2, 1, generation=2)
    model = Scalar(float(rank.rank))
    averager = HierarchicalAverager(model, plan=before, rank=rank.rank, store=rank.store(), timeout_s=2)
    change = difference(before, after, keys=first_keys(before))
    try:
        averager.adopt(after, rank=rank.rank, keys=change.keys)
        told = ""
    except HierAvgError as exc:
        told = str(exc)
    model.value.data.fill_(float(rank.rank))
    averager.step()
    averager.close()
    return told, float(model.value.item())


def test_a_plan_whose_groups_cannot_be_built_leaves_the_one_before_in_place(ranks: Ranks) -> None:
    for told, value in answers_of(ranks.call(deserted, world_size=2)):
        assert "rank 2 (b/0)" in told
        assert value == 0.5


def sharded(rank: Rank, plan: Plan) -> tuple[torch.Tensor, list[str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=rank.store("fsdp"), rank=rank.rank, world_size=rank.world_size)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "slot"))
        torch.manual_seed(rank.rank // 2)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        fully_shard(model, mesh=mesh["slot"])
        rounds: list[RoundDone] = []
        averager = HierarchicalAverager(
            model, plan=plan, rank=rank.rank, store=rank.store(), equalize=False, observe=rounds.append
        )
        model(torch.ones(3, 4)).sum().backward()
        averager.step()
        averager.step()
        whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
        output = model(torch.ones(1, 4))
        averager.close()
        return torch.cat([tensor.detach().flatten() for tensor in (*whole, output)]), [
            done.level for done in rounds
        ]
    finally:
        dist.destroy_process_group()


def test_shards_are_averaged_among_ranks_that_hold_the_same(ranks: Ranks) -> None:
    plan = make_plan("node=1,global=2", 2, 2)
    answers = answers_of(ranks.call(sharded, plan, world_size=4))
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    expected = [
        (first + second) / 2
        for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True)
    ]
    flat = torch.cat([tensor.detach().flatten() for tensor in expected])
    for parameters, levels in answers:
        # The node level would average different shards; only the global one runs.
        assert levels == ["global"]
        assert torch.allclose(parameters[: flat.numel()], flat)
        assert torch.equal(parameters, answers[0][0])


def test_nodes_of_different_size_cannot_hold_the_same_shards(ranks: Ranks) -> None:
    plan = make_plan("node=1,global=2", 3, 1)
    for answer in ranks.call(sharded, plan, world_size=4):
        assert isinstance(answer, Raised)
        assert "the nodes have different numbers of slots (a:3 b:1)" in answer.text


def without_memory(rank: Rank, plan: Plan) -> tuple[list[str], str, float]:
    available = memory._available_bytes
    if rank.rank == 1:
        memory._available_bytes = lambda: iter([0])
    try:
        model = Scalar(float(rank.rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            averager = HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store())
            model.value.data.fill_(float(rank.rank))
            done = averager.step()
            averager.close()
        assert done
        told = [str(each.message) for each in caught if "shared memory" in str(each.message)]
        return told, done.link, float(model.value.item())
    finally:
        memory._available_bytes = available


def test_without_shared_memory_one_warning_names_the_size_and_the_group_averages_all_the_same(
    ranks: Ranks,
) -> None:
    plan = make_plan("node=1,global=2", 2)
    answers = answers_of(ranks.call(without_memory, plan, world_size=2))
    assert [link for _, link, _ in answers] == ["network", "network"]
    assert [value for *_, value in answers] == [0.5, 0.5]
    assert answers[0][0] == []
    (told,) = answers[1][0]
    assert told.startswith("8192 bytes of shared memory cannot be had")


def leaving(rank: Rank, plan: Plan) -> str:
    model = Scalar(float(rank.rank))
    averager = HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store(), timeout_s=30)
    if rank.rank == 1:
        averager.close()
        return "left"
    try:
        averager.step()
    except HierAvgError as exc:
        averager.close()
        return str(exc)
    return "averaged"


def test_a_rank_that_leaves_is_named_to_the_others(ranks: Ranks) -> None:
    plan = make_plan("global=1", 2, 1)
    answers = answers_of(ranks.call(leaving, plan, world_size=3))
    assert answers[1] == "left"
    assert answers[0].startswith("rank 1 (a/1) is lost to its group")
    assert "hint:" in answers[2]


def counted(rank: Rank, plan: Plan) -> dict[str, float]:
    with HierarchicalAverager(Scalar(0.0), plan=plan, rank=rank.rank, store=rank.store()) as averager:
        averager.step(num_samples=1 + 2 * rank.rank)
        samples: dict[str, float] = averager.state_dict()["samples"]
    return samples


def test_after_an_inner_round_its_ranks_stand_for_the_same_samples_further_out(ranks: Ranks) -> None:
    # So that the loss of one of them loses only its part.
    plan = make_plan("node=1,zone=2,global=4", 2, 1, 1)
    assert answers_of(ranks.call(counted, plan, world_size=4)) == [
        {"node": 0.0, "zone": 2.0, "global": 2.0},
        {"node": 0.0, "zone": 2.0, "global": 2.0},
        {"node": 0.0, "zone": 5.0, "global": 5.0},
        {"node": 0.0, "zone": 7.0, "global": 7.0},
    ]


def normalised(rank: Rank, plan: Plan, average_buffers: bool) -> tuple[list[float], int]:
    model = nn.BatchNorm1d(2)
    with HierarchicalAverager(
        model, plan=plan, rank=rank.rank, store=rank.store(), average_buffers=average_buffers
    ) as averager:
        for _ in range(rank.rank + 1):
            model(torch.full((4, 2), float(rank.rank)) + torch.randn(4, 2) * 0)
        averager.step()
    assert model.running_mean is not None
    assert model.num_batches_tracked is not None
    return model.running_mean.tolist(), int(model.num_batches_tracked)


@pytest.mark.parametrize(("average_buffers", "batches"), [(True, [2, 2]), (False, [1, 2])])
def test_batch_statistics_are_averaged_unless_switched_off(
    ranks: Ranks, average_buffers: bool, batches: list[int]
) -> None:
    plan = make_plan("global=1", 1, 1)
    answers = answers_of(ranks.call(normalised, plan, average_buffers, world_size=2))
    assert [count for _, count in answers] == batches
    # Rank 0 saw one batch of zeros, rank 1 two of ones: with momentum 0.1 their means are 0 and 0.19.
    own = [0.0, 0.19]
    expected = [sum(own) / 2] * 2 if average_buffers else own
    assert [means for means, _ in answers] == [pytest.approx([mean, mean]) for mean in expected]


def averaged_early(rank: Rank, plan: Plan) -> tuple[str, float, list[str]]:
    model = Scalar(0.0)
    with HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store()) as averager:
        model.value.data.fill_(float(rank.rank))
        averager.step()
        done = averager.average()
        assert done
        later = [averager.step() for _ in range(3)]
    return done.level, float(model.value.item()), [each.level if each else "" for each in later]


def test_a_global_round_can_be_run_before_it_is_due_and_the_schedule_keeps_its_phase(ranks: Ranks) -> None:
    plan = make_plan("node=2,global=4", 2, 1)
    answers = answers_of(ranks.call(averaged_early, plan, world_size=3))
    assert [answer[:2] for answer in answers] == [("global", 1.0)] * 3
    assert [later for *_, later in answers] == [["node", "", "global"]] * 2 + [["", "", "global"]]
