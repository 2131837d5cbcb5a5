"""Gradient averaging for DDP, on real processes."""

import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic_hieravg.averaging import gradients
from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.averaging.gradients import Company
from elastic_hieravg.plan import Plan, difference, first_keys
from tests.averaging.ranks import Died, Rank, Ranks
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


WIDTH = 300
KILLED_IN_STEP = 2


@contextmanager
def ddp_alone(model: nn.Module) -> Iterator[nn.parallel.DistributedDataParallel]:
    """A DDP model whose own process group is this rank alone; every layer has a bucket, and a chunk."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    chunk_bytes, gradients.CHUNK_BYTES = gradients.CHUNK_BYTES, 4 * WIDTH * (WIDTH + 1)
    try:
        yield nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-3)
    finally:
        gradients.CHUNK_BYTES = chunk_bytes
        dist.destroy_process_group()


def lose_peer(rank: Rank, victim: int) -> tuple[list[str], int, int, float]:
    """What the gradients were in each step, and how many passes were counted; the victim dies in one."""
    torch.manual_seed(0)
    plan = make_plan("global=100", 1, 1, 1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = nn.Sequential(*layers)
    averager = HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store(), timeout_s=60)
    found, longest_s = [], 0.0
    with warnings.catch_warnings(), ddp_alone(model) as ddp:
        warnings.simplefilter("ignore")
        averager.register_hook(ddp)
        for step in range(1, 5):
            local, mean = expected(model, rank, step)
            if rank.rank == victim and step == KILLED_IN_STEP:
                # In the middle: the gradients of the last layers are on their way already.
                layers[1].weight.register_hook(die)  # type: ignore[no-untyped-call]
            started_s = time.monotonic()
            ddp.zero_grad()
            ddp(inputs(rank.rank, step)).square().sum().backward()
            longest_s = max(longest_s, time.monotonic() - started_s)
            own = [parameter.grad for parameter in model.parameters()]
            kinds = [kind_of(*each) for each in zip(own, local, mean, strict=True)]
            found.append("/".join(dict.fromkeys(reversed(kinds))))
            averager.step()
    averager.close()
    return found, averager.num_local_gradients, len(averager.gradient_keys), longest_s


def die(_: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def expected(model: nn.Module, rank: Rank, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A rank's own gradients, and their mean over all: all ranks have the same model."""
    by_rank = []
    for other in range(rank.world_size):
        loss = model(inputs(other, step)).square().sum()
        by_rank.append(torch.autograd.grad(loss, list(model.parameters())))
    means = [torch.stack(each).mean(0) for each in zip(*by_rank, strict=True)]
    return list(by_rank[rank.rank]), means


def kind_of(gradient: torch.Tensor | None, local: torch.Tensor, mean: torch.Tensor) -> str:
    assert gradient is not None
    if torch.equal(gradient, local):
        return "local"
    return "mean" if torch.allclose(gradient, mean, rtol=1e-4, atol=1e-4) else "torn"


def test_after_a_lost_peer_the_rest_of_the_backward_pass_stays_local_and_nothing_raises(ranks: Ranks) -> None:
    *others, died = ranks.call(lose_peer, 2, world_size=3)
    assert died == Died(-signal.SIGKILL)
    for kinds, num_local, num_groups, seconds in answers_of(others):
        assert kinds[0] == "mean"
        # What came before the loss may be everybody's; from the loss on it is the rank's own, and whole.
        assert kinds[1] in ("mean/local", "local")
        assert kinds[2:] == ["local", "local"]
        assert num_local == 3
        assert num_groups == 0
        assert seconds < 30, "a killed peer is seen by the end of its connection, not by a timeout"


class _Backwards(nn.Module):
    """Its layers are used in another order than they are listed: DDP orders its buckets anew for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=index % 2 == 0) for index in range(3)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[2], self.layers[0], self.layers[1]):
            values = layer(values)
        return values


def meet_newcomer(rank: Rank) -> list[str]:
    """Rank 0 has made passes before; rank 1 makes its first one."""
    torch.manual_seed(0)
    model = _Backwards()
    plan = make_plan("global=100", 1, 1)
    averager = HierarchicalAverager(model, plan=plan, rank=rank.rank, store=rank.store(), timeout_s=20)
    found = []
    with warnings.catch_warnings(), ddp_alone(model) as ddp:
        warnings.simplefilter("ignore")
        averager.register_hook(ddp)
        if rank.rank == 0:
            assert averager._hook is not None
            averager._hook.replace(Company(), Company())
            for step in range(2):
                ddp(inputs(rank.rank, step)).sum().backward()
            averager.use_gradients({})
        for step in range(4):
            local, mean = expected(model, rank, step)
            ddp.zero_grad()
            ddp(inputs(rank.rank, step)).square().sum().backward()
            own = [parameter.grad for parameter in model.parameters()]
            found += [kind_of(*each) for each in zip(own, local, mean, strict=True)]
    averager.close()
    assert averager.num_local_gradients == 0
    return found


def test_a_newcomers_gradients_meet_those_of_ranks_whose_buckets_are_laid_out_otherwise(ranks: Ranks) -> None:
    for kinds in answers_of(ranks.call(meet_newcomer, world_size=2)):
        assert set(kinds) == {"mean"}
