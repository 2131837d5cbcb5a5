"""FSDP2 inside the nodes of an elastic job: a node that dies and one that freezes come back with the model."""

from pathlib import Path

import pytest

from tests.elastic import jobs
from tests.elastic.jobs import running_job


def test_sharded_nodes_are_lost_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SCRIPT", Path(__file__).with_name("sharded.py"))
    with running_job(tmp_path / "job", flags=["--metrics-port=off"]) as job:
        # a serves the store: the loss of its host is another test's.
        job.start("a")
        job.wait_for("a starts", lambda: bool(job.lines()))
        job.start("b")
        job.await_together("a", "b")
        with job.surviving("a"):
            job.kill_worker("b")
            job.await_together("a", "b")
            job.freeze("b")
            job.wait_for("b is lost", lambda: job.generations("a")[-1].kind == "loss")
            job.thaw("b")
            job.await_together("a", "b")
        # Adam's counters came along: they are the job's, not those of a worker that began anew.
        newest = [job.of(pid, "step")[-1] for pid in job.nodes["b"].workers()]
        assert all(line["counters"] == [line["step"]] for line in newest)
        job.finish()
        assert job.faults == {"worker killed": 1, "node frozen": 1}
