"""What a job of one node keeps of itself, against a clock that the tests move."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic_hieravg.config import WorkerPlace
from elastic_hieravg.errors import ParametersError, Problem
from elastic_hieravg.membership.local import FromWorker, Ready, Stop
from elastic_hieravg.worker import job as job_module
from elastic_hieravg.worker.keeping import TIME_SHARE_MAX, Keeper
from elastic_hieravg.worker.snapshots import Kept, SnapshotFile, read_newest


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Callable[..., tuple[nn.Linear, Keeper]]:
    def made(width: int = 3) -> tuple[nn.Linear, Keeper]:
        model = nn.Linear(width, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, Keeper(model, optimizer, path=tmp_path / "kept", period_steps=16, clock=clock)

    return made


Make = Callable[..., tuple[nn.Linear, Keeper]]


def kept_step(tmp_path: Path) -> int | None:
    found = read_newest(tmp_path / "kept")
    return found.state.moment.step if found else None


def test_what_was_kept_is_there_for_whoever_starts_anew(make: Make) -> None:
    model, keeper = make()
    assert keeper.restore() is None
    keeper.keep(step=32, generation=1)
    keeper.close()
    again, restoring = make()
    assert not torch.equal(again.weight, model.weight)
    assert restoring.restore(after_step=32) is None, "a checkpoint of that step is as new"
    assert not torch.equal(again.weight, model.weight)
    assert restoring.restore(after_step=31) == 32
    assert torch.equal(again.weight, model.weight)


def test_another_model_is_not_taken(make: Make) -> None:
    make()[1].keep(step=32, generation=1)
    assert make(width=4)[1].restore() is None


def test_keeping_takes_its_share_of_the_time_and_no_more(
    make: Make, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SnapshotFile.write

    def slowly(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        clock.now_s += 2.0

    monkeypatch.setattr(SnapshotFile, "write", slowly)
    _, keeper = make()
    keeper.keep(step=16, generation=1)
    clock.now_s = 2.0 / TIME_SHARE_MAX - 0.1
    keeper.keep(step=32, generation=1)
    assert kept_step(tmp_path) == 16
    clock.now_s = 2.0 / TIME_SHARE_MAX
    keeper.keep(step=48, generation=1)
    assert kept_step(tmp_path) == 48


def test_training_goes_on_without_room(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SnapshotFile, "write", no_room)
    _, keeper = make()
    for step in (16, 32):
        keeper.keep(step=step, generation=1)
        clock.now_s += 100.0
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no snapshot of step 16 can be kept in /dev/shm" in caplog.text


def test_a_model_that_cannot_be_kept_is_tried_once(
    make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def refuse(*_: object) -> None:
        tries.append(1)
        raise ParametersError(Problem("a tensor of type float8 cannot be kept", "convert it"))

    monkeypatch.setattr(Kept, "state", refuse)
    _, keeper = make()
    for step in (16, 32):
        keeper.keep(step=step, generation=1)
        clock.now_s += 100.0
    assert len(tries) == 1
    assert "no snapshots are kept of this model" in caplog.text


def test_a_snapshot_that_does_not_load_is_none(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make()[1].keep(step=32, generation=1)

    def refuse(*_: object) -> None:
        raise RuntimeError("it does not fit")

    monkeypatch.setattr(Kept, "restore", refuse)
    assert make()[1].restore() is None
    assert "the snapshot of step 32 cannot be taken: it does not fit" in caplog.text


def test_a_worker_has_its_snapshot_before_it_says_anything(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its way into the job begins with the word that it is ready: then others hear of its step and model."""
    kept, keeper = make()
    keeper.keep(step=32, generation=1)
    model = nn.Linear(3, 2)
    job = job_module.Job(WorkerPlace(socket="nowhere", hierarchy="global=16", run_id="job", owner="1.1.1"))
    found: list[tuple[int, bool]] = []

    class Link:
        """The agent's end: it ends the job as soon as the worker is ready."""

        num_dropped = 0

        def send(self, message: FromWorker) -> None:
            if isinstance(message, Ready):
                found.append((job.step, torch.equal(model.weight, kept.weight)))
                job._told(Stop(is_success=True, reason="told by the test"))

        offer = send

        def close(self) -> None: ...

    monkeypatch.setattr(job_module, "AgentLink", lambda *_, **__: Link())
    monkeypatch.setattr(job_module, "path_of", lambda **_: tmp_path / "kept")
    with pytest.raises(SystemExit), job:
        job.averager(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert found == [(32, True)]
