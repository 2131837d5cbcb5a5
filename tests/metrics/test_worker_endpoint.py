"""Workers without an agent of ours serve their own metrics; one that restarts them takes their reports."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_hieravg.config import MetricsPlace
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.catalogue import Cause
from elastic_hieravg.metrics.tally import Tally
from elastic_hieravg.worker.serving import WorkerEndpoint
from tests.membership.etcd_servers import free_ports

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).parent.parent / "restart" / "train.py"
WITHIN_S = 120.0
POLL_S = 0.1


def scraped(port: int) -> dict[tuple[str, str], float]:
    """Samples by their name and their local rank, if they have one, added up; nothing if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name, sample.labels.get("local_rank", "")] += sample.value
        return found
    return {}


def await_steps(port: int, local_rank: str) -> dict[tuple[str, str], float]:
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        found = scraped(port)
        if found.get((names.STEPS, local_rank), 0) > 5:
            return found
        assert time.monotonic() < deadline_s, f"no steps of worker {local_rank} at port {port}: {found}"
        time.sleep(POLL_S)


@contextlib.contextmanager
def job(command: list[str], folder: Path, **variables: str) -> Iterator[None]:
    """A job of two workers that ends when it is told to."""
    environment = os.environ | {"TEST_NODE_ID": "n", "OMP_NUM_THREADS": "1"} | variables
    program = ["setpriv", "--pdeathsig", "KILL", str(BIN / command[0]), *command[1:]]
    process = subprocess.Popen([*program, str(SCRIPT), str(folder)], env=environment, start_new_session=True)
    try:
        yield
        (folder / "finish").touch()
        assert process.wait(timeout=WITHIN_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def two_ports() -> int:
    """Two free ports, one behind the other."""
    for port in (port for _ in range(20) for port in free_ports(1)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port
    raise AssertionError("no two free ports")


def test_under_stock_torchrun_each_worker_serves_its_own(tmp_path: Path) -> None:
    port = two_ports()
    command = ["torchrun", "--standalone", "--nproc-per-node=2"]
    with job(command, tmp_path, HIERAVG_METRICS_PORT=str(port), HIERAVG_HIERARCHY="global=2"):
        for local_rank in (0, 1):
            found = await_steps(port + local_rank, str(local_rank))
            assert found[names.WORLD_RANKS, ""] == 2
            assert 0 < found[names.GOODPUT, ""] < 1
            assert found[names.ROUNDS, ""] > 0


def test_an_agent_that_restarts_workers_takes_their_reports(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    command = ["hieravg", "run", "--standalone", "--nproc-per-node=2", "--membership=restart"]
    with job([*command, f"--metrics-port={port}", "--hierarchy=global=2"], tmp_path):
        for local_rank in ("0", "1"):
            found = await_steps(port, local_rank)
        assert found[names.WORLD_RANKS, ""] == 2
        assert found[names.GENERATION, ""] == 1


def test_a_port_that_is_taken_costs_a_warning_only(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    tally.resume(Cause.START)
    tally.step(1)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = WorkerEndpoint(
            MetricsPlace("127.0.0.1", taken.getsockname()[1]),
            local_rank=0,
            samples=lambda: tally.samples(rank=0, generation=3, step=1, state="training", values={}),
            world_size=lambda: 1,
        )
        with contextlib.closing(endpoint):
            assert "cannot be used" in caplog.text
            assert endpoint.port is not None
            assert scraped(endpoint.port)[names.STEPS, "0"] == 1
            assert scraped(endpoint.port)[names.GENERATION, ""] == 3
