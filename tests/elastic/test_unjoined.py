"""Nodes that cannot be in the job, and scripts that never join it: each is told, and nobody else is hurt."""

from pathlib import Path

from tests.elastic.jobs import running_job

USAGE = 2


def test_node_without_a_label_fails_alone_and_at_once(tmp_path: Path) -> None:
    with running_job(tmp_path / "job", hierarchy="node=1,zone=4,global=16") as job:
        job.start("a", flags=["--label=zone=z1"])
        job.await_together("a")
        with job.surviving("a"):
            job.start("b", flags=["--label=rack=r1"])
            assert job.await_exit("b") == USAGE
            assert "needs a label zone, and node b has none; its labels: host=" in job.log("b")
            assert "rack=r1" in job.log("b")
            assert "Traceback" not in job.log("b")
            job.await_together("a")
        # It was never seen: nothing happened to the job.
        assert len(job.generations("a")) == 1
        job.finish()
