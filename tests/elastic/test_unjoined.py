"""Nodes that cannot be in the job, and scripts that never join it: each is told, and nobody else is hurt."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.jobs import WITHIN_S, running_job
from tests.membership.etcd_servers import free_ports

USAGE, DO_NOT_RETRY = 2, 78
# As `hieravg run`, with another patience for workers that have not joined.
AGENT = (
    "import sys; from elastic_hieravg.agent import joins; joins.LATE_S = 1.0;"
    "from elastic_hieravg.cli import main; sys.exit(main(['run', '--metrics-port=off', *sys.argv[1:]]))"
)


def agent(*arguments: str) -> "subprocess.Popen[str]":
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", AGENT, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Its exit code, and what it said."""
    _, told = process.communicate(timeout=WITHIN_S)
    return process.returncode, told


@pytest.fixture
def script(tmp_path: Path) -> str:
    """It trains as it would under torchrun, and ends well."""
    path = tmp_path / "train.py"
    path.write_text("import os, sys, time; time.sleep(float(sys.argv[1])); print(os.environ['WORLD_SIZE'])")
    return str(path)


def test_script_that_never_joins_is_an_error_where_others_could_have(script: str) -> None:
    (port,) = free_ports(1)
    flags = ["--nnodes=2:2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=unjoined"]
    agents = [agent(*flags, f"--node-id={name}", script, "0.1") for name in "ab"]
    for code, told in map(ended, agents):
        assert code == DO_NOT_RETRY, told
        assert "the script ended without calling eh.join(): every node has trained by itself" in told
        assert "start a script without it with torchrun" in told


def test_script_that_never_joins_is_a_warning_where_nobody_else_can_be(script: str) -> None:
    # A second in which importing torch is not counted: the script has none.
    code, told = ended(agent("--standalone", "--nproc-per-node=2", script, "4"))
    assert code == 0, told
    assert told.count("worker 0, 1 has run for 1 s without calling eh.join()") == 1
    assert "WARNING" in told
    assert told.count("the script ended without calling eh.join(): nothing was averaged") == 1
    assert "master_addr" not in told, "torch warns of a flag that nobody gave"


def test_script_that_never_joins_is_torch_s_affair_if_all_start_anew(script: str) -> None:
    """There RANK and WORLD_SIZE span the job."""
    code, told = ended(agent("--standalone", "--membership=restart", script, "2"))
    assert code == 0, told
    assert "eh.join()" not in told


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
