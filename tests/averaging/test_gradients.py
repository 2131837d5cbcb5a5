"""Gradient averaging for DDP, on real processes."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.plan import Plan, difference, first_keys
from tests.averaging.ranks import Rank, Ranks
from tests.averaging.test_averager import Scalar, answers_of, make_plan


def hooked(rank: Rank, plan: Plan) -> list[float]:
    dist.init_process_group("gloo", store=rank.store("ddp"), rank=rank.rank, world_size=rank.world_size)
    model = Scalar(0.0)
    averager = HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store())
    ddp = nn.parallel.DistributedDataParallel(_Times(model), broadcast_buffers=False)
    averager.register_hook(ddp)
    gradients = []
    for _ in range(4):
        gradients.append(_gradient(ddp, model, float(rank.rank)))
        averager.step()
    # Without synchronisation DDP does not call the hook, and nothing is counted twice.
    with ddp.no_sync():
        gradients.append(_gradient(ddp, model, float(rank.rank)))
    averager.close()
    dist.destroy_process_group()
    return gradients


def _gradient(ddp: nn.Module, model: Scalar, factor: float) -> float:
    model.value.grad = None
    ddp(torch.tensor(factor)).backward()
    gradient: Any = model.value.grad
    return float(gradient.item())


class _Times(nn.Module):
    def __init__(self, scalar: Scalar) -> None:
        super().__init__()
        self.scalar = scalar

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.scalar.value * factor).sum()


def test_the_gradient_hook_averages_over_the_world_then_over_the_innermost_group(ranks: Ranks) -> None:
    plan = make_plan("node=4,global=16", 2, 1, 1, warmup_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = answers_of(ranks.call(hooked, plan, world_size=4))
    assert answers[0] == [1.5, 1.5, 0.5, 0.5, 0.0]
    assert answers[1] == [1.5, 1.5, 0.5, 0.5, 1.0]
    assert answers[2] == [1.5, 1.5, 2.0, 2.0, 2.0]
    assert answers[3] == [1.5, 1.5, 3.0, 3.0, 3.0]


def rehooked(rank: Rank) -> list[float]:
    """The hook follows a plan in which rank 1 has moved to rank 0's place of the innermost group."""
    dist.init_process_group("gloo", store=rank.store("ddp"), rank=rank.rank, world_size=rank.world_size)
    model, gradients = Scalar(0.0), []
    apart = make_plan("node=4,global=16", 1, 2)
    together = make_plan("node=4,global=16", 2, 1, generation=2)
    averager = HierarchicalAverager(model, plan=apart, rank=rank.rank, store=rank.store())
    ddp = nn.parallel.DistributedDataParallel(_Times(model), broadcast_buffers=False)
    averager.register_hook(ddp)
    gradients.append(_gradient(ddp, model, float(rank.rank)))
    change = difference(apart, together, keys=first_keys(apart))
    averager.adopt(together, rank=rank.rank, keys=change.keys)
    gradients.append(_gradient(ddp, model, float(rank.rank)))
    averager.close()
    dist.destroy_process_group()
    return gradients


def test_the_gradient_hook_follows_a_new_plan(ranks: Ranks) -> None:
    answers = answers_of(ranks.call(rehooked, world_size=3))
    assert answers == [[0.0, 0.5], [1.5, 0.5], [1.5, 2.0]]
