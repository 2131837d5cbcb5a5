"""What torch's averagers get wrong and ours get right: one test or more for each defect in compat's reach.

The numbers are those of the README's table. Elsewhere: D4 (two schedule rules, kept as they are) and the
equality with torch are in test_upstream.py; D6 (uneven groups), D14 (buffers) and D15 (one blocking piece)
are the engine's, in tests/averaging, and uneven nodes are here with D7.
"""

import collections
import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.nn.parallel import DistributedDataParallel

from elastic_hieravg import compat
from elastic_hieravg.compat import nodes
from elastic_hieravg.compat.torch_internals import TorchPostLocalSGDOptimizer
from tests.averaging.ranks import Rank, Ranks
from tests.compat.worlds import TORCH, answers_of, both_of, error_of, filled, values, world


def gradients_by_rank(rank: Rank, sizes: tuple[int, int]) -> list[Tensor]:
    """Rank 0 has a gradient on the first parameter only, the others on the second only."""
    with world(rank):
        parameters = [filled(100 * index + rank.rank, gradient=None, size=(sizes[index],)) for index in (0, 1)]
        mine = parameters[0 if rank.rank == 0 else 1]
        mine.grad = torch.ones_like(mine)
        averager = compat.PeriodicModelAverager(period=2)
        averager.average_parameters(parameters)
        return values(parameters)


# D1: torch averages the two parameters into each other. D2: with other sizes it aborts the process.
@pytest.mark.parametrize("sizes", [(5, 5), (5, 7)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_d1_d2_ranks_with_other_gradients_average_all_parameters(
    ranks: Ranks, sizes: tuple[int, int], world_size: int
) -> None:
    mean = (world_size - 1) / 2
    for first, second in answers_of(ranks, gradients_by_rank, sizes, world_size=world_size):
        assert torch.equal(first, torch.full((sizes[0],), mean))
        assert torch.equal(second, torch.full((sizes[1],), 100 + mean))


def no_gradients(rank: Rank) -> tuple[list[Tensor], int, str]:
    with world(rank):
        parameters = [filled(rank.rank), filled(10 * rank.rank)]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.zero_grad()
        averager = compat.PeriodicModelAverager(period=2)
        averager.average_parameters(optimizer.param_groups)
        nothing = error_of(lambda: compat.average_parameters(iter([]), None))
        return values(parameters), averager.step, nothing[0]


def test_d3_without_any_gradient_all_are_averaged_and_the_step_counts(ranks: Ranks) -> None:
    for (first, second), step, nothing in answers_of(ranks, no_gradients, world_size=2):
        assert torch.equal(first, torch.full((5,), 0.5))
        assert torch.equal(second, torch.full((5,), 5.0))
        assert step == 1
        # An empty list is an error, as with torch.
        assert nothing == "ValueError"


def gradients_come_and_go(rank: Rank) -> list[list[float]]:
    """Which parameters are averaged as gradients are agreed on, differ, and are agreed on again."""
    with world(rank):
        parameters = [filled(0) for _ in range(3)]
        found = []
        for with_gradient in [(0, 1), (0, 1), (0, 2), (rank.rank,), (), (1,), (0, 1, 2)]:
            for index, parameter in enumerate(parameters):
                parameter.data.fill_(float(rank.rank))
                parameter.grad = torch.ones(5) if index in with_gradient else None
            compat.average_parameters_or_parameter_groups(parameters, None)
            found.append([float(parameter.detach()[0]) for parameter in parameters])
        return found


def test_parameters_without_a_gradient_are_left_out_if_all_ranks_agree(ranks: Ranks) -> None:
    for rank, found in enumerate(answers_of(ranks, gradients_come_and_go, world_size=2)):
        assert found == [
            [0.5, 0.5, rank],
            [0.5, 0.5, rank],
            [0.5, rank, 0.5],
            [0.5, 0.5, 0.5],
            [0.5, 0.5, 0.5],
            [rank, 0.5, rank],
            [0.5, 0.5, 0.5],
        ]


def frozen_infinity(rank: Rank) -> tuple[list[Tensor], int]:
    """A frozen parameter that is not finite, such as a mask, has no part in the round."""
    with world(rank):
        mask = nn.Parameter(torch.full((5,), float("-inf")), requires_grad=False)
        parameter = filled(rank.rank)
        address = mask.data_ptr()
        compat.average_parameters_or_parameter_groups([mask, parameter], None)
        return values([mask, parameter]), mask.data_ptr() - address


def test_a_frozen_mask_of_infinities_does_not_keep_the_rest_from_averaging(ranks: Ranks) -> None:
    for (mask, parameter), moved in answers_of(ranks, frozen_infinity, world_size=2):
        assert torch.equal(parameter, torch.full((5,), 0.5))
        assert bool(torch.isinf(mask).all())
        assert moved == 0


def odd_hierarchies(rank: Rank, names: Any, which: str) -> list[float] | None:
    ordered = collections.OrderedDict
    sizes = {
        "unsorted": ordered([(4, 2), (2, 1), (8, 4)]),
        "negative": ordered([(2, 2), (-3, 2), (4, 4)]),
        "zero": ordered([(2, 2), (0, 2), (4, 4)]),
        "not growing": ordered([(2, 4), (4, 2), (8, 4)]),
    }[which]
    averager = names.HierarchicalModelAverager(sizes)
    parameter = filled(0)
    found = []
    for _ in range(9):
        parameter.data.fill_(float(rank.rank))
        try:
            averager.average_parameters([parameter])
        except ZeroDivisionError:
            return None
        found.append(float(parameter.detach()[0]))
    return found


@pytest.mark.parametrize(
    ("which", "pairs", "everyone"),
    [
        # At step 4 the period 2 comes before 4, whose group is the rank alone.
        ("unsorted", [], [0, 8]),
        ("negative", [2, 3, 6], [0, 4, 8]),
        # torch accepts this one and divides by zero at the first step that is not divided by 4.
        ("zero", [2, 6], [0, 4, 8]),
        ("not growing", [4], [0, 2, 6, 8]),
    ],
)
def test_d5_hierarchies_that_torch_accepts_run_by_torchs_rule(
    ranks: Ranks, which: str, pairs: list[int], everyone: list[int]
) -> None:
    for rank, (torchs, ours) in enumerate(both_of(ranks, odd_hierarchies, which, world_size=4)):
        pair = rank - rank % 2 + 0.5
        expected = [1.5 if step in everyone else pair if step in pairs else rank for step in range(9)]
        assert ours == expected
        assert torchs == (None if which == "zero" else expected)


def by_node(rank: Rank, places: str) -> tuple[list[int], int, Tensor, str]:
    """Groups by node, and an averaging over all ranks, as if ranks were on several nodes."""
    identity = mock.patch.object(nodes, "node_identity", return_value=places[rank.rank])
    is_loopback = mock.patch("ipaddress.IPv4Address.is_loopback", False)
    with world(rank), identity, is_loopback:
        mine, everyone = compat.new_subgroups()
        assert mine is not None
        parameter = filled(rank.rank)
        compat.average_parameters(iter([parameter]), None)
        torchs = error_of(dist.new_subgroups)[0]
        return dist.get_process_group_ranks(mine), len(everyone), parameter.detach().clone(), torchs


# D6, D7: torch needs CUDA to know a node's ranks, and as many on every node.
@pytest.mark.parametrize("places", ["aaaa", "aabb", "aaab", "abab", "abcd"])
def test_d7_without_a_size_there_is_one_subgroup_for_each_node(ranks: Ranks, places: str) -> None:
    for rank, answer in enumerate(answers_of(ranks, by_node, places, world_size=4)):
        mine, num_groups, parameter, torchs = answer
        assert mine == [other for other in range(4) if places[other] == places[rank]]
        assert num_groups == len(set(places))
        assert torch.equal(parameter, torch.full((5,), 1.5))
        assert torchs == "ValueError"


def unreachable(rank: Rank) -> str:
    identity = mock.patch.object(nodes, "node_identity", return_value=f"node {rank.rank}")
    address = mock.patch.object(nodes, "own_address", return_value="127.0.1.1")
    with world(rank), identity, address:
        return error_of(lambda: compat.average_parameters(iter([filled(1)]), None))[1]


def test_a_host_whose_name_is_its_loopback_is_an_error_and_not_a_wait(ranks: Ranks) -> None:
    for error in answers_of(ranks, unreachable, world_size=2):
        assert error.startswith("rank 0 gives its address as 127.0.1.1, where ranks of other nodes cannot")
        assert "hint: make each host's name resolve" in error


def wrapped(rank: Rank, inner: Any = None) -> Any:
    optimizer = inner or torch.optim.SGD([filled(rank.rank)], lr=0.1, momentum=0.9)
    return compat.PostLocalSGDOptimizer(optimizer, compat.PeriodicModelAverager(period=2))


def views_after_loading(rank: Rank) -> None:
    with world(rank):
        optimizer = wrapped(rank)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups is optimizer.optim.param_groups
        assert optimizer.state is optimizer.optim.state
        optimizer.param_groups[0]["lr"] = 0.5
        assert optimizer.optim.param_groups[0]["lr"] == 0.5
        optimizer.add_param_group({"params": [filled(1)]})
        assert len(optimizer.optim.param_groups) == len(optimizer.param_groups) == 2
        assert repr(optimizer) == repr(optimizer.optim)
        optimizer.zero_grad()
        assert all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])


def test_d8_the_wrapper_shows_the_inner_optimizer_after_loading(ranks: Ranks) -> None:
    answers_of(ranks, views_after_loading, world_size=2)


def is_an_optimizer(rank: Rank) -> None:
    with world(rank):
        optimizer = wrapped(rank)
        assert issubclass(type(optimizer), TorchPostLocalSGDOptimizer)
        assert isinstance(optimizer.averager, torch_averagers.ModelAverager)
        assert optimizer.defaults["momentum"] == 0.9
        told: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: told.append("before"))
        optimizer.register_step_post_hook(lambda *_: told.append("after"))
        optimizer.register_state_dict_pre_hook(lambda _: told.append("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "step": 17})
        optimizer.register_load_state_dict_post_hook(lambda _: told.append("loaded"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        assert optimizer.step(lambda: 3.0) == 3.0
        scheduler.step()
        assert optimizer.optim.param_groups[0]["lr"] == 0.05
        assert optimizer.averager.step == 1
        state = optimizer.state_dict()
        assert state["mine"] == 1
        optimizer.load_state_dict(state)
        assert told == ["before", "after", "saving", "loaded"]
        assert optimizer.averager.step == 17
        assert state["step"] == 1


def test_d9_the_wrapper_is_an_optimizer_with_hooks_schedulers_and_closures(ranks: Ranks) -> None:
    answers_of(ranks, is_an_optimizer, world_size=2)


def copied(rank: Rank, whose: str) -> tuple[float, ...]:
    """A copy steps and averages by itself, over the same groups."""
    with world(rank):
        names: Any = TORCH if whose == "torch" else compat
        sizes = collections.OrderedDict([(1, 1), (2, rank.world_size)])
        averager = names.HierarchicalModelAverager(sizes)
        inner = torch.optim.SGD([filled(rank.rank, gradient=0)], lr=0.1, momentum=0.9)
        optimizer = compat.PostLocalSGDOptimizer(inner, averager)
        twin = copy.deepcopy(optimizer)
        twin.param_groups[0]["lr"] = 7.0
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert twin.averager.process_group is averager.process_group
        twin.param_groups[0]["params"][0].grad = torch.zeros(5)
        twin.step()
        assert (twin.averager.step, averager.step) == (1, 0)
        return tuple(float(each.param_groups[0]["params"][0].detach()[0]) for each in (twin, inner))


@pytest.mark.parametrize("whose", ["torch", "ours"])
def test_d9_a_deep_copy_counts_for_itself(ranks: Ranks, whose: str) -> None:
    for rank, found in enumerate(answers_of(ranks, copied, whose, world_size=2)):
        assert found == (0.5, float(rank))


def pickled_state(rank: Rank) -> tuple[list[str], list[float]]:
    with world(rank) as group:
        state = compat.PostLocalSGDState(group, group, start_localSGD_iter=2)
        state.iter = 1
        loaded = pickle.loads(pickle.dumps(state))
        assert (loaded.iter, loaded.start_localSGD_iter, loaded.post_local_gradient_allreduce) == (1, 2, True)
        assert copy.deepcopy(state).subgroup is group
        errors, gradients = [], []
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        bucket = mock.Mock(spec=["buffer", "is_last"])
        for name in ("process_group", "subgroup"):
            errors.append(error_of(lambda: compat.post_localSGD_hook(loaded, bucket))[1])
            setattr(loaded, name, group)
            loaded.iter = 2
        loaded.iter = 1
        model.register_comm_hook(loaded, compat.post_localSGD_hook)
        for _ in range(3):
            model.zero_grad()
            (model(torch.ones(1)) * rank.rank).sum().backward()
            gradients.append(float(model.module.weight.grad))
        assert loaded.iter == 2
        without_groups = pickle.loads(pickle.dumps(compat.PostLocalSGDState(None, None, 2)))
        assert (without_groups.process_group, without_groups.subgroup) == (None, None)
        return errors, gradients


def test_d10_a_pickled_hook_state_keeps_its_count_and_asks_for_its_groups(ranks: Ranks) -> None:
    for errors, gradients in answers_of(ranks, pickled_state, world_size=2):
        for name, error in zip(("process_group", "subgroup"), errors, strict=True):
            assert f"the {name} of this PostLocalSGDState was not pickled with it" in error
            assert f"hint: set state.{name}" in error
        assert gradients == [0.5] * 3


def accumulated(rank: Rank, follows: bool) -> tuple[list[float], int]:
    """Two synchronised backward passes for every optimizer step; local from the third step on."""
    with world(rank):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        averager = compat.PeriodicModelAverager(period=100, warmup_steps=2)
        state = compat.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
        if follows:
            state.follow(averager)
        model.register_comm_hook(state, compat.post_localSGD_hook)
        found = []
        for _ in range(4):
            for _ in range(2):
                model.zero_grad()
                (model(torch.ones(1)) * rank.rank).sum().backward()
                gradient = model.module.weight.grad
                assert gradient is not None
                found.append(float(gradient))
                # Read at any time, the count is the averager's.
                assert not follows or state.iter == averager.step
            averager.average_parameters(model.parameters())
        return found, state.iter


# D11: torch counts gradient averagings in the hook and steps in the averager. Without `follow` so do we.
@pytest.mark.parametrize(("follows", "num_global", "count"), [(True, 4, 3), (False, 2, 2)])
def test_d11_a_state_that_follows_an_averager_leaves_the_warmup_with_it(
    ranks: Ranks, follows: bool, num_global: int, count: int
) -> None:
    for rank, (found, iterations) in enumerate(answers_of(ranks, accumulated, follows, world_size=2)):
        assert found == [0.5] * num_global + [float(rank)] * (8 - num_global)
        assert iterations == count


def layout(rank: Rank) -> None:
    with world(rank):
        model: Any = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3))
        model = model.to(memory_format=torch.channels_last)
        places = []
        for _ in range(3):
            for parameter in model.parameters():
                parameter.data.fill_(float(rank.rank))
            compat.average_parameters(model.parameters(), None)
            assert all(bool((parameter == 0.5).all()) for parameter in model.parameters())
            places.append([parameter.data_ptr() for parameter in model.parameters()])
            outside = model[0].weight.data
            assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert places == [places[0]] * 3
        # Somebody who holds the memory sees the next average.
        outside.fill_(float(10 * rank.rank))
        compat.average_parameters(model.parameters(), None)
        assert bool((outside == 5).all())


def test_d12_layout_and_memory_stay_as_they_are(ranks: Ranks) -> None:
    answers_of(ranks, layout, world_size=2)


def whole_numbers(rank: Rank) -> list[Tensor]:
    with world(rank):
        counts = nn.Parameter(torch.tensor([rank.rank, 10 - rank.rank, 2**40]), requires_grad=False)
        flags = nn.Parameter(torch.tensor([rank.rank == 1, False]), requires_grad=False)
        mixed = [counts, flags, filled(rank.rank), nn.Parameter(torch.full((3,), 1.0 * rank.rank).double())]
        compat.average_parameters(iter(mixed), None)
        return values(mixed)


def test_d13_whole_numbers_take_the_maximum_beside_other_types(ranks: Ranks) -> None:
    for counts, flags, single, double in answers_of(ranks, whole_numbers, world_size=2):
        assert counts.tolist() == [1, 10, 2**40]
        assert flags.tolist() == [True, False]
        assert torch.equal(single, torch.full((5,), 0.5))
        assert torch.equal(double, torch.full((3,), 0.5, dtype=torch.float64))


def half_precision(rank: Rank, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    found = []
    for label, names in (("torch", TORCH), ("ours", compat)):
        with world(rank, label):
            parameter = nn.Parameter(narrow(rank.rank, dtype))
            names.average_parameters(iter([parameter]), None)
            found.append(parameter.detach().clone())
    return found[0], found[1]


def narrow(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(10_000, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_d16_half_precision_is_summed_in_single(ranks: Ranks, dtype: torch.dtype) -> None:
    in_single = sum((narrow(rank, dtype).double() for rank in range(4)), torch.zeros(1)) / 4
    for torchs, ours in answers_of(ranks, half_precision, dtype, world_size=4):
        off = (ours.double() - in_single).abs()
        # Rounded once: at most half a unit of the result away, but for the rounding of the sum itself.
        unit = torch.exp2(torch.floor(torch.log2(in_single.abs()))) * torch.finfo(dtype).eps
        assert bool((off <= 0.501 * unit + 1e-7).all())
        assert float(off.mean()) < 0.8 * float((torchs.double() - in_single).abs().mean())
