"""A program of somebody who uses the package, with types: checked by mypy against the installed wheel.

Where a type is expected to be known, `assert_type` says which.
"""

from collections.abc import Sequence
from typing import Any, assert_type

import torch

import elastic_hieravg as eh
from elastic_hieravg.averaging import HierarchicalAverager
from elastic_hieravg.compat import HierarchicalModelAverager
from elastic_hieravg.errors import HierAvgError, Problem
from elastic_hieravg.events import RoundDone
from elastic_hieravg.plan import Misfit, PlannedLevel


def plan_of(nodes: Sequence[eh.Node]) -> eh.Plan:
    hierarchy = eh.Hierarchy.parse("node=4,global=64")
    plan = eh.fit(hierarchy, eh.Topology(nodes), generation=1)
    assert_type(plan, eh.Plan)
    strict = eh.fit(hierarchy, eh.Topology(nodes), on_misfit="strict")
    assert_type(strict, eh.Plan | Misfit)
    assert_type(plan.levels, tuple[PlannedLevel, ...])
    assert_type(eh.Plan.from_json(plan.to_json()), eh.Plan)
    assert_type(plan.due(8), PlannedLevel | None)
    return plan


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor]) -> int:
    done: list[RoundDone] = []
    with eh.join() as job:
        assert_type(job, eh.Job)
        averager = job.averager(model, optimizer, hierarchy="node=4,global=64", observe=done.append)
        digests: list[str] = []
        job.on_change(lambda changed: digests.append(changed.plan.digest))
        for batch in batches:
            loss = model(batch).square().mean()
            averager.step(num_samples=len(batch))
            job.report(loss=loss, rate=0.1)
            with job.quiet():
                assert_type(
                    (job.rank, job.world_size, job.local_rank, job.node_rank), tuple[int, int, int, int]
                )
            if job.should_stop:
                break
        assert_type(job.process_group("node"), torch.distributed.ProcessGroup)
    assert_type(job.step, int)
    return job.step


def attached(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> eh.Job:
    job = eh.attach(model, optimizer, num_samples=lambda: 8)
    job.close()
    return job


def engine(model: torch.nn.Module, plan: eh.Plan, store: Any) -> RoundDone | None:
    with HierarchicalAverager(model, plan=plan, rank=0, store=store) as averager:
        return averager.step(num_samples=8)


def problems_of(error: HierAvgError) -> tuple[Problem, ...]:
    return error.problems


def torch_s_own(model: torch.nn.Module, averager: HierarchicalModelAverager) -> None:
    averager.average_parameters(model.parameters())
