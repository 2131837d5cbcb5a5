"""What compat's tests share: a default process group on the pool's ranks, and torch's names beside ours."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hooks
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager, utils

from elastic_hieravg import compat
from elastic_hieravg.compat.torch_internals import TorchPostLocalSGDOptimizer
from tests.averaging.ranks import Died, Raised, Rank, Ranks

TORCH = SimpleNamespace(
    ModelAverager=averagers.ModelAverager,
    PeriodicModelAverager=averagers.PeriodicModelAverager,
    HierarchicalModelAverager=hierarchical_model_averager.HierarchicalModelAverager,
    PostLocalSGDState=torch_hooks.PostLocalSGDState,
    post_localSGD_hook=torch_hooks.post_localSGD_hook,
    PostLocalSGDOptimizer=TorchPostLocalSGDOptimizer,
    average_parameters=utils.average_parameters,
    average_parameters_or_parameter_groups=utils.average_parameters_or_parameter_groups,
    get_params_to_average=utils.get_params_to_average,
    new_subgroups=dist.new_subgroups,
)


@contextlib.contextmanager
def world(rank: Rank, name: str = "default") -> Iterator[dist.ProcessGroup]:
    """The default process group over the ranks of a call."""
    dist.init_process_group("gloo", store=rank.store(name), rank=rank.rank, world_size=rank.world_size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def with_both(rank: Rank, scenario: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """What a scenario gives with torch's names and with ours. It is called with the rank and the names."""
    found = []
    for label, names in (("torch", TORCH), ("ours", compat)):
        with world(rank, label):
            torch.manual_seed(rank.rank)
            found.append(scenario(rank, names, *arguments))
    return found[0], found[1]


def answers_of(ranks: Ranks, function: Callable[..., Any], *arguments: Any, world_size: int) -> list[Any]:
    """Like `call`, but a rank that raised or died fails the test."""
    answers = ranks.call(function, *arguments, world_size=world_size)
    for answer in answers:
        assert not isinstance(answer, Raised), answer.text
        assert not isinstance(answer, Died), answer
    return answers


def both_of(
    ranks: Ranks, scenario: Callable[..., Any], *arguments: Any, world_size: int
) -> list[tuple[Any, Any]]:
    """For each rank what the scenario gave with torch's names and with ours."""
    return answers_of(ranks, with_both, scenario, *arguments, world_size=world_size)


def filled(value: float, *, gradient: float | None = 1.0, size: tuple[int, ...] = (5,)) -> nn.Parameter:
    parameter = nn.Parameter(torch.full(size, float(value)))
    if gradient is not None:
        parameter.grad = torch.full(size, float(gradient))
    return parameter


def values(parameters: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def units_apart(here: Tensor, there: Tensor, copies: list[Tensor]) -> float:
    """The largest difference, in units in the last place of the largest of the copies that were summed."""
    largest = torch.stack([copy.abs() for copy in copies]).amax(dim=0)
    unit = torch.exp2(torch.floor(torch.log2(largest.double()))) * torch.finfo(here.dtype).eps
    return float(((here.double() - there.double()).abs() / unit).max())


def error_of(make: Callable[[], Any]) -> tuple[str, str, list[str]]:
    """The type and text of what a call raises, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            make()
        except Exception as exc:  # noqa: BLE001 - whatever is raised is compared
            return type(exc).__name__, str(exc), [str(each.message) for each in given]
    return "", "", [str(each.message) for each in given]
