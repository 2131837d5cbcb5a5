"""torch's own test cases for its averagers, on real gloo processes, with torch's names and with ours.

torch skips all of them without GPUs. Every scenario runs twice and must give the same both times.
"""

import collections
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.averaging.ranks import Rank, Ranks
from tests.compat.worlds import both_of, error_of, filled, units_apart, values

WORLD_SIZES = [2, 4]
PERIOD, NUM_STEPS = 4, 20
WARMUP_STEPS = [12, 13, 14, 15]


def small_net(rank: Rank, names: Any) -> tuple[list[Tensor], list[Tensor]]:
    net = nn.Sequential(nn.Conv2d(3, 3, kernel_size=3, padding=1), nn.ReLU(), nn.Linear(1, 5, bias=False))
    for parameter in net.parameters():
        parameter.data.fill_(1.0)
    names.average_parameters(net.parameters(), None)
    globally = values(net.parameters())
    for parameter in net.parameters():
        parameter.data.fill_(float(rank.rank))
    names.average_parameters(net.parameters(), dist.new_group([0, 1]))
    return globally, values(net.parameters())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_average_parameters_over_all_and_over_a_group_of_two(ranks: Ranks, world_size: int) -> None:
    for rank, (torchs, ours) in enumerate(both_of(ranks, small_net, world_size=world_size)):
        for globally, in_group in (torchs, ours):
            assert all(bool((tensor == 1).all()) for tensor in globally)
            assert all(bool((tensor == (0.5 if rank < 2 else rank)).all()) for tensor in in_group)


def means_by_step(rank: Rank, averager: Any, *, through_optimizer: bool = False) -> list[float]:
    """The parameter after each step, set to the rank before it; and one without a gradient, untouched."""
    parameter, frozen = filled(0), filled(rank.rank, gradient=None)
    optimizer = torch.optim.SGD([parameter, frozen], lr=0.1)
    found = []
    for _ in range(25):
        parameter.data.fill_(float(rank.rank))
        parameter.grad = torch.full((5,), float(rank.rank) if through_optimizer else 1.0)
        averager.average_parameters(optimizer.param_groups if through_optimizer else [parameter, frozen])
        assert len(set(parameter.tolist())) == 1
        found.append(float(parameter.detach()[0]))
    assert bool((frozen == rank.rank).all())
    assert averager.step == 25
    return found


def periodic(rank: Rank, names: Any, through_optimizer: bool) -> list[list[float]]:
    averagers = [names.PeriodicModelAverager(period=PERIOD, warmup_steps=steps) for steps in WARMUP_STEPS]
    return [means_by_step(rank, each, through_optimizer=through_optimizer) for each in averagers]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("through_optimizer", [False, True])
def test_periodic_averager_counts_its_period_from_the_end_of_the_warmup(
    ranks: Ranks, world_size: int, through_optimizer: bool
) -> None:
    mean = (world_size - 1) / 2
    for rank, (torchs, ours) in enumerate(both_of(ranks, periodic, through_optimizer, world_size=world_size)):
        assert torchs == ours
        assert ours == [
            [mean if step >= warmup and (step - warmup) % PERIOD == 0 else rank for step in range(25)]
            for warmup in WARMUP_STEPS
        ]


def one_level(rank: Rank, names: Any) -> tuple[list[list[float]], list[list[float]]]:
    sizes = collections.OrderedDict([(PERIOD, rank.world_size)])
    averagers = [
        names.HierarchicalModelAverager(period_group_size_dict=sizes, warmup_steps=steps)
        for steps in WARMUP_STEPS
    ]
    found = [means_by_step(rank, averager) for averager in averagers]
    return found, periodic(rank, names, through_optimizer=False)


# D4. torch's test that one level equals the periodic averager overwrites the averager it tests, and so
# compares the periodic one with itself. The rule that holds, in torch and here: the hierarchical averager
# counts its periods from step 0, whatever the warm-up; the two agree only if the period divides the warm-up.
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_one_level_equals_periodic_only_if_the_period_divides_the_warmup(ranks: Ranks, world_size: int) -> None:
    mean = (world_size - 1) / 2
    for rank, (torchs, ours) in enumerate(both_of(ranks, one_level, world_size=world_size)):
        assert torchs == ours
        for warmup, one, other in zip(WARMUP_STEPS, *ours, strict=True):
            assert one == [mean if step >= warmup and step % PERIOD == 0 else rank for step in range(25)]
            assert (one == other) == (warmup % PERIOD == 0)


def three_levels(rank: Rank, names: Any) -> tuple[int, list[list[int]], list[float], list[list[int]]]:
    sizes = collections.OrderedDict([(2, 2), (4, 4), (8, 4)])
    averager = names.HierarchicalModelAverager(period_group_size_dict=sizes, warmup_steps=10)
    groups = averager.period_process_group_dict
    members = [dist.get_process_group_ranks(group) for group in groups.values()]
    found = means_by_step(rank, averager)
    due = []
    for step in range(9):
        averager.step = step
        group = averager._find_process_group()
        due.append([] if group is None else dist.get_process_group_ranks(group))
    return dist.get_pg_count(), members, found, due


def test_three_levels_run_the_widest_that_is_due(ranks: Ranks) -> None:
    for rank, (torchs, ours) in enumerate(both_of(ranks, three_levels, world_size=4)):
        assert torchs == ours
        num_groups, members, found, due = ours
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        # The world and the two pairs: our rounds add no process group of torch's.
        assert num_groups == 3
        assert members == [pair, [0, 1, 2, 3], [0, 1, 2, 3]]
        assert due == [members[2], [], pair, [], members[1], [], pair, [], members[2]]
        expected = [float(rank)] * 25
        for step in (12, 16, 20, 24):
            expected[step] = 1.5
        for step in (10, 14, 18, 22):
            expected[step] = sum(pair) / 2
        assert found == expected


HOOK_CASES = {
    "the subgroup is the world": (True, True, 10, 100),
    "no gradients are averaged after the start": (True, False, 10, 10),
    "the subgroup is made, on one node": (False, True, 10, 100),
    "local SGD never starts": (False, True, 1000, 100),
}


def hooked(rank: Rank, names: Any) -> dict[str, list[float]]:
    return {case: gradients(rank, names, *HOOK_CASES[case][:-1]) for case in HOOK_CASES}


def gradients(rank: Rank, names: Any, is_world: bool, post_local: bool, start: int) -> list[float]:
    subgroup = dist.group.WORLD if is_world else None
    if subgroup is None and names.new_subgroups is dist.new_subgroups:
        # torch's hook makes its subgroup itself only with CUDA (D7).
        subgroup, _ = dist.new_subgroups(group_size=rank.world_size)
    state = names.PostLocalSGDState(None, subgroup, start, post_local)
    model = DistributedDataParallel(nn.Linear(1, 5, bias=False))
    model.register_comm_hook(state, names.post_localSGD_hook)
    found = []
    for _ in range(100):
        model.zero_grad()
        (model(torch.ones(1)) * rank.rank).sum().backward()
        gradient = model.module.weight.grad
        assert gradient is not None
        found.append(float(gradient[0, 0]))
    assert state.iter == min(start, 100)
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_hook_gives_what_plain_ddp_gives(ranks: Ranks, world_size: int) -> None:
    for rank, (torchs, ours) in enumerate(both_of(ranks, hooked, world_size=world_size)):
        assert torchs == ours
        for case, found in ours.items():
            num_equal = HOOK_CASES[case][-1]
            assert found == [(world_size - 1) / 2] * num_equal + [float(rank)] * (100 - num_equal), case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def make_averager(rank: Rank, names: Any, kind: str) -> Any:
    if kind == "periodic":
        return names.PeriodicModelAverager(period=4, warmup_steps=10)
    sizes = collections.OrderedDict([(2, 2), (4, rank.world_size)])
    return names.HierarchicalModelAverager(period_group_size_dict=sizes, warmup_steps=4)


def trained(rank: Rank, names: Any, kind: str, grad_is_view: bool, is_wrapped: bool) -> list[list[Tensor]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=grad_is_view)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.03)
    averager = make_averager(rank, names, kind)
    if is_wrapped:
        optimizer = names.PostLocalSGDOptimizer(optim=optimizer, averager=averager)
    torch.manual_seed(rank.rank)
    found = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            nn.functional.mse_loss(model(torch.randn(6, 2)), torch.randn(6, 4)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not is_wrapped:
            averager.average_parameters(model.parameters())
        found.append(values(model.parameters()))
    assert averager.step == NUM_STEPS
    return found


def trained_twice(rank: Rank, names: Any, kind: str, grad_is_view: bool) -> list[list[Tensor]]:
    apart = trained(rank, names, kind, grad_is_view, is_wrapped=False)
    wrapped = trained(rank, names, kind, grad_is_view, is_wrapped=True)
    for here, there in zip(apart, wrapped, strict=True):
        assert all(map(torch.equal, here, there))
    return wrapped


@pytest.mark.parametrize(
    ("kind", "world_size"), [("periodic", 2), ("periodic", 4), ("hierarchical", 2), ("hierarchical", 4)]
)
@pytest.mark.parametrize("grad_is_view", [False, True])
def test_the_wrapped_optimizer_equals_optimizer_and_averager(
    ranks: Ranks, kind: str, world_size: int, grad_is_view: bool
) -> None:
    answers = both_of(ranks, trained_twice, kind, grad_is_view, world_size=world_size)
    for torchs, ours in answers:
        for here, there in zip(torchs, ours, strict=True):
            if world_size == 2:
                assert all(map(torch.equal, here, there))
            else:
                # Five rounds apart, and the steps between them.
                assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(here, there, strict=True))


def reloaded(rank: Rank, names: Any) -> tuple[int, int, int, list[str]]:
    def make() -> tuple[Any, Any]:
        parameter = filled(rank.rank)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        averager = names.PeriodicModelAverager(period=4, warmup_steps=10)
        return names.PostLocalSGDOptimizer(optim=optimizer, averager=averager), averager

    (first, first_averager), (second, second_averager) = make(), make()
    for _ in range(NUM_STEPS):
        first.step()
    state = first.state_dict()
    assert state.keys() == {"state", "param_groups", "step"}
    second.load_state_dict(state)
    loaded = second_averager.step
    del state["step"]
    _, _, warned = error_of(lambda: second.load_state_dict(state))
    return first_averager.step, loaded, second_averager.step, warned


def test_the_step_is_saved_and_loaded_and_missed_with_a_warning(ranks: Ranks) -> None:
    for torchs, ours in both_of(ranks, reloaded, world_size=2):
        assert torchs == ours
        first, loaded, without, warned = ours
        assert (first, loaded, without) == (NUM_STEPS, NUM_STEPS, 0)
        assert warned == [
            "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0."
        ]


def subgroups(rank: Rank, names: Any) -> Any:
    mine, everyone = names.new_subgroups(2)
    half, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])  # type: ignore[no-untyped-call]
    inner, inner_everyone = names.new_subgroups(group_size=1, group=half)
    sizes = [0, -1, 3, 100]
    errors = [error_of(partial(names.new_subgroups, group_size=size))[:2] for size in sizes]
    in_order = names.new_subgroups(2, None, None, "gloo", None, "halves")[0]
    return (
        dist.get_process_group_ranks(mine),
        len(everyone),
        dist.get_process_group_ranks(inner),
        len(inner_everyone),
        errors,
        dist.get_process_group_ranks(in_order),
    )


def test_subgroups_of_a_size_and_their_errors_are_torchs(ranks: Ranks) -> None:
    for rank, (torchs, ours) in enumerate(both_of(ranks, subgroups, world_size=4)):
        assert torchs == ours
        mine, num_groups, inner, num_inner, errors, in_order = ours
        assert mine == in_order == [rank - rank % 2, rank - rank % 2 + 1]
        assert (num_groups, inner, num_inner) == (2, [rank], 2)
        assert all(name == "ValueError" for name, _ in errors)
        assert "must be positive" in errors[0][1]
        assert errors[2][1] == "The world size (4) must be divisible by 'group_size=3'"
        assert "must not exceed the world size (4)" in errors[3][1]


def random_values(rank: int, round_index: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1000 * round_index + rank)
    sizes = [(3, 3, 3, 3), (70_001,), (1,), (17, 5), ()]
    found = []
    for size in sizes:
        scale = 10 ** (4 * torch.rand((), generator=generator) - 2)
        parameter = nn.Parameter(torch.randn(size, generator=generator) * scale)
        parameter.grad = torch.zeros(size)
        found.append(parameter)
    return found


def rounds(rank: Rank, names: Any) -> list[list[Tensor]]:
    found = []
    for round_index in range(3):
        parameters = random_values(rank.rank, round_index)
        names.average_parameters_or_parameter_groups(parameters, None)
        found.append(values(parameters))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_are_torchs_bit_for_bit_on_two_ranks_and_within_four_units_beyond(
    ranks: Ranks, world_size: int
) -> None:
    for torchs, ours in both_of(ranks, rounds, world_size=world_size):
        for round_index in range(3):
            copies = [values(random_values(rank, round_index)) for rank in range(world_size)]
            for index, (here, there) in enumerate(zip(torchs[round_index], ours[round_index], strict=True)):
                if world_size == 2:
                    assert torch.equal(here, there)
                else:
                    assert units_apart(here, there, [copy[index] for copy in copies]) <= 4


def constructed(rank: Rank, names: Any) -> list[Any]:
    ordered = collections.OrderedDict
    size = rank.world_size
    periodic, hierarchical = names.PeriodicModelAverager, names.HierarchicalModelAverager
    attempts = [
        lambda: periodic(period=0),
        lambda: periodic(period=-3),
        lambda: periodic(period=1),
        lambda: periodic(period=2, warmup_steps=-1),
        lambda: periodic(2, 3, None),
        hierarchical,
        lambda: hierarchical(ordered()),
        lambda: hierarchical(ordered([(0, size)])),
        lambda: hierarchical(ordered([(1, size)])),
        lambda: hierarchical(ordered([(2, 1)])),
        lambda: hierarchical(ordered([(2, size)]), warmup_steps=-1),
        lambda: hierarchical(ordered([(2, 3), (4, size)])),
        names.ModelAverager,
        lambda: names.average_parameters_or_parameter_groups([1], None),
        lambda: names.get_params_to_average(["a"]),
    ]
    return [error_of(attempt) for attempt in attempts]


def test_constructors_refuse_and_warn_as_torchs(ranks: Ranks) -> None:
    for torchs, ours in both_of(ranks, constructed, world_size=2):
        assert torchs == ours
        names = [name for name, _, _ in ours]
        assert [*names[:2], names[3]] == ["ValueError"] * 3
        assert len(ours[2][2]) == 1
        assert names[-3:] == ["TypeError", "NotImplementedError", "NotImplementedError"]
