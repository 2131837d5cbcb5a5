"""A job of one worker, without an agent: what training scripts see of it, and what a step costs."""

import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elastic_hieravg as eh
from elastic_hieravg.averaging.optimizers import on_each_step
from elastic_hieravg.config import WorkerPlace
from elastic_hieravg.errors import InputError, MembershipError
from elastic_hieravg.membership.local import FromWorker, Progress
from elastic_hieravg.worker import job as job_module

NUM_STEPS = 20_000
NUM_TRIES = 5
STEP_MAX_S = 20e-6
WITHIN_S = 60.0


def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_alone_a_job_is_a_world_of_one() -> None:
    model, optimizer = make()
    with eh.join() as job:
        averager = job.averager(model, optimizer)
        assert (job.rank, job.world_size, job.local_rank, job.node_rank) == (0, 1, 0, 0)
        for _ in range(3):
            train(model, optimizer)
            averager.step(num_samples=4)
        assert job.step == 3
        assert not job.should_stop
    assert job.step == 3
    assert job.should_stop


def test_a_job_that_starts_goes_on_from_a_checkpoint_s_step() -> None:
    model = nn.Linear(2, 2)
    with eh.join() as job:
        averager = job.averager(model, step=500)
        assert job.step == 500
        averager.step()
    assert job.step == 501


@pytest.mark.parametrize("step", [-1, 1.5, "500", True])
def test_a_step_that_is_none_is_refused(step: Any) -> None:
    with eh.join() as job, pytest.raises(InputError, match=r"was given step=.*\n\nhint: give the job\.step"):
        job.averager(nn.Linear(2, 2), step=step)


def test_samples_may_be_counted_by_torch() -> None:
    model, optimizer = make()
    with eh.join() as job:
        averager = job.averager(model, optimizer)
        averager.step(num_samples=torch.ones(3).sum())  # type: ignore[arg-type]
        samples = job._samples()
        assert samples.counters["hieravg_samples_total", ()] == 3
        assert "3.0" in samples.to_json()


def test_a_job_has_one_averager() -> None:
    model, optimizer = make()
    with eh.join() as job:
        job.averager(model, optimizer)
        with pytest.raises(MembershipError, match="was called twice"):
            job.averager(model, optimizer)


def test_a_process_joins_once() -> None:
    """Its agent would wait for both."""
    job_module._enter_once("agent-7", 0)
    job_module._enter_once("agent-7", 1)
    with pytest.raises(MembershipError, match=r"has joined the job already\n\nhint: call eh.join\(\)"):
        job_module._enter_once("agent-7", 0)


def test_a_script_may_name_the_job_s_hierarchy_and_no_other() -> None:
    model, optimizer = make()
    job = job_module.Job(WorkerPlace(hierarchy="node=4,global=16"))
    with pytest.raises(
        InputError, match=r"asks for .* node=8,global=16.* runs with node=4,global=16\n\nhint: start"
    ):
        job.averager(model, optimizer, hierarchy="node=8,global=16")
    with job:
        job.averager(model, optimizer, hierarchy="node=4, global=16")


def test_a_step_with_nothing_due_costs_microseconds() -> None:
    model, _ = make()
    with eh.join() as job:
        averager = job.averager(model)
        found = []
        for _ in range(NUM_TRIES):
            started_s = time.perf_counter()
            for _ in range(NUM_STEPS):
                averager.step(8)
            found.append((time.perf_counter() - started_s) / NUM_STEPS)
    assert min(found) < STEP_MAX_S


def test_the_newest_number_of_each_name_is_kept() -> None:
    job = eh.join()
    # A loss as it is, with its gradient: no warning either.
    job.report(loss=torch.tensor(2.5, requires_grad=True), accuracy=0.5)
    job.report(loss=1)
    assert dict(job.reported) == {"loss": 1.0, "accuracy": 0.5}


@pytest.mark.parametrize("value", ["1.0", None, True, [1.0], torch.ones(2)])
def test_only_numbers_are_reported(value: object) -> None:
    job = eh.join()
    with pytest.raises(InputError, match=r"job.report\(\) was given loss=") as caught:
        job.report(accuracy=0.5, loss=value)  # type: ignore[arg-type]
    assert "hint: report numbers" in str(caught.value)
    assert dict(job.reported) == {}, "nothing is kept of a report that is wrong"


def test_so_many_names_and_no_more_are_reported() -> None:
    job = eh.join()
    job.report(**{f"name{index}": float(index) for index in range(50)})
    job.report(name7=0.5)
    with pytest.raises(InputError, match=r"was given 51 names, more than 50; new: another"):
        job.report(another=1.0)
    assert len(job.reported) == 50


def test_a_process_group_of_the_node_is_one_of_torchs_and_ends_with_the_job() -> None:
    model, _ = make()
    with eh.join() as job:
        group = job.process_group("node")
        assert job.process_group() is group
        assert dist.get_world_size(group) == 1
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 1.0
        averager = job.averager(model)
        ddp = nn.parallel.DistributedDataParallel(model, process_group=group)
        averager.register_hook(ddp)
        ddp(torch.ones(1, 3)).sum().backward()
        averager.step()
        assert averager.num_local_gradients == 0
    assert not dist.is_initialized()


def test_a_default_group_that_the_script_made_is_taken_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with eh.join() as job:
            assert job.process_group("node") is dist.group.WORLD
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_another_name_of_a_process_group_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(InputError, match="there is no process group 'zone'") as caught:
        eh.join().process_group("zone")
    assert "hint: ask for 'node'" in str(caught.value)


def test_progress_is_excused_while_the_script_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "PROGRESS_S", 0.005)
    model, _ = make()
    told: queue.Queue[FromWorker] = queue.Queue()
    with eh.join() as job:
        job.averager(model)
        monkeypatch.setattr(job, "_tell", told.put)
        reporter = threading.Thread(target=job._report, daemon=True)
        reporter.start()
        assert told.get(timeout=WITHIN_S) == Progress(0, is_excused=False)
        with job.quiet():
            with job.quiet():
                pass
            assert await_change(told, Progress(0, is_excused=False)) == Progress(0, is_excused=True)
        assert await_change(told, Progress(0, is_excused=True)) == Progress(0, is_excused=False)
    reporter.join(WITHIN_S)
    assert not reporter.is_alive()


def await_change(told: "queue.Queue[FromWorker]", before: FromWorker) -> FromWorker:
    deadline_s = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline_s:
        found = told.get(timeout=WITHIN_S)
        if found != before:
            return found
    raise AssertionError(f"nothing but {before}")


def test_attach_counts_the_steps_that_are_really_made() -> None:
    model, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    samples = iter([3, 4, 5])
    job = eh.attach(model, optimizer, num_samples=lambda: next(samples))
    train(model, optimizer)
    train(model, optimizer)
    # What AMP tells a fused optimizer: this step is to be skipped.
    optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    train(model, optimizer)
    del optimizer.found_inf  # type: ignore[attr-defined]
    assert job.step == 2
    job.close()
    job.close()
    train(model, optimizer)
    assert job.step == 2, "a loop that goes on after the job is its own"


def test_once_the_end_is_agreed_an_attached_loop_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    job = eh.attach(model, optimizer)
    train(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    monkeypatch.setattr(type(job), "should_stop", True)
    train(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert job.step == 1
    monkeypatch.undo()
    job.close()


def test_closures_are_counted_once() -> None:
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    counted: list[float] = []
    on_each_step(optimizer, counted.append, num_samples=2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert counted == [2]


ATTACHED = """
import atexit, torch, elastic_hieravg as eh
from elastic_hieravg.worker.averager import ElasticAverager
finish = ElasticAverager.finish
ElasticAverager.finish = lambda self: print("last round", self.step_count) or finish(self)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
atexit.register(lambda: print("end", job.step))
job = eh.attach(model, optimizer)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("last_line", "printed", "code"),
    [
        ("", "last round 1\nend 1\n", 0),
        ("job.close()", "last round 1\nend 1\n", 0),
        ("raise ValueError('wrong')", "end 1\n", 1),
    ],
)
def test_the_last_round_comes_with_the_end_of_a_script_but_not_with_an_exception(
    tmp_path: Path, last_line: str, printed: str, code: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ATTACHED + last_line + "\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    assert (done.stdout, done.returncode) == (printed, code), done.stderr
