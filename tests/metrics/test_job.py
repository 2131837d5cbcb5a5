"""A real job of two nodes, looked at from outside while one of its workers is killed and comes back."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_hieravg.metrics.catalogue import CATALOGUE, Kind, NodeShown, Phase
from tests.elastic.jobs import HIERAVG, WITHIN_S, RunningJob, children_of, running_job
from tests.membership.etcd_servers import free_ports

PORT = re.compile(r"metrics and status of this node: http://127\.0\.0\.1:(\d+)/")
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
RESTARTED_SCRIPT = Path(__file__).parent.parent / "restart" / "train.py"
POLL_S = 0.05
# How much of its time a worker may not have told yet: the step that is being made, and half a second.
UNTOLD_S = 3.0
COUNTERS = {metric.name for metric in CATALOGUE if metric.kind is Kind.COUNTER}
HISTOGRAMS = {metric.name for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM}

NUM_CLIENTS = 200
GROWN_BYTES_MAX = 32 * 1024 * 1024
# Connections that come and go: to the store, and this test's own.
FEW = 5

Series = tuple[str, frozenset[tuple[str, str]]]


class Watched:
    """A node's endpoint. Whatever is scraped is compared with what was before."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.num_scrapes = 0
        self._before: dict[Series, float] = {}

    def get(self, path: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/status")[1])
        return found

    def scrape(self) -> dict[Series, float]:
        """Everything by name and labels; counters that go back, or vanish, are errors."""
        found = {
            (name, frozenset(LABEL.findall(labels))): float(value)
            for name, labels, value in SAMPLE.findall(self.get("/metrics")[1].decode())
        }
        for series, value in self._before.items():
            name = re.sub("_(bucket|count|sum)$", "", series[0])
            if series[0] in COUNTERS or name in HISTOGRAMS:
                assert found.get(series, -1.0) >= value, f"{series} was {value} and is {found.get(series)}"
        self._before = found
        self.num_scrapes += 1
        return found

    def value(self, name: str, /, **labels: str) -> float | None:
        return self.scrape().get((name, frozenset(labels.items())))

    def await_value(self, name: str, wanted: float | None, /, **labels: str) -> None:
        """Until a number is there, or is not; at least as large if there is one."""

        def is_there() -> bool:
            found = self.value(name, **labels)
            return found is None if wanted is None else found is not None and found >= wanted

        wait_until(f"{name} {labels} {wanted}", is_there)

    def await_every_second(self, *, slots: int) -> None:
        """Until all time of the slots since the node began is counted somewhere; never more than there was."""
        began_s = float(self.status()["began_s"])
        names = ("hieravg_productive_seconds_total", "hieravg_badput_seconds_total")

        def is_counted() -> bool:
            seconds = sum(value for (name, _), value in self.scrape().items() if name in names)
            wall_s = slots * (time.time() - began_s)
            assert seconds < wall_s + 0.5, "more time is counted than there was"
            return seconds > wall_s - slots * UNTOLD_S

        wait_until("every second is counted", is_counted)

    def await_status(self, path: str, status: int) -> bytes:
        wait_until(f"{path} is answered with {status}", lambda: self.get(path)[0] == status)
        return self.get(path)[1]


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    """An endpoint that is not there yet is as good as one that says no."""
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        with suppress(ConnectionError):
            if condition():
                return
        assert time.monotonic() < deadline_s, what
        time.sleep(POLL_S)


def watched(job: RunningJob, name: str) -> Watched:
    job.wait_for(f"{name} says where its metrics are", lambda: bool(PORT.search(job.log(name))))
    found = PORT.search(job.log(name))
    assert found
    return Watched(int(found[1]))


@pytest.mark.needs("promtool", apt="prometheus")
def test_a_job_is_seen_from_outside_while_a_worker_dies_and_comes_back(tmp_path: Path) -> None:
    with running_job(tmp_path / "job", flags=["--metrics-port", "auto"], nnodes="1:2") as job:
        job.start("a")
        job.wait_for("a serves", lambda: "start" in [line["event"] for line in job.lines()])
        job.start("b", flags=["--log-format", "json"])
        a, b = watched(job, "a"), watched(job, "b")
        assert b"in no generation" in b.get("/readyz")[1] or b.get("/readyz")[0] == 200
        job.await_together("a", "b")
        see_both_train(a, b)
        bother(job, a)
        watch_recovery(job, a, b)
        job.await_together("a", "b")
        see_what_happened(a, b)
        check_logs(job)
        assert job.faults == {"worker killed": 1}
        assert min(a.num_scrapes, b.num_scrapes) > 5
        job.finish()
        for port in (a.port, b.port):
            with closing(socket.socket()) as sock:
                assert sock.connect_ex(("127.0.0.1", port)) != 0, "somebody still serves"


def test_where_all_workers_start_anew_the_agent_tells_why(tmp_path: Path) -> None:
    port, out = free_ports(1)[0], tmp_path / "log"
    command = ["setpriv", "--pdeathsig", "KILL", str(HIERAVG), "run", "--standalone", "--nproc-per-node=2"]
    command += ["--membership=restart", "--hierarchy=global=2", f"--metrics-port={port}"]
    script = [str(RESTARTED_SCRIPT), str(tmp_path)]
    environment = os.environ | {"TEST_NODE_ID": "n", "OMP_NUM_THREADS": "1"}
    with out.open("wb") as log:
        agent = subprocess.Popen([*command, *script], stderr=log, env=environment, start_new_session=True)
    try:
        node = Watched(port)
        node.await_value("hieravg_steps_total", 10.0, local_rank="1")
        assert (node.get("/readyz")[0], node.get("/healthz")[0]) == (200, 200)
        steps = node.value("hieravg_steps_total", local_rank="1") or 0.0
        os.kill(children_of(agent.pid)[0], signal.SIGKILL)
        node.await_value("hieravg_worker_restarts_total", 1.0, reason="killed")
        node.await_value("hieravg_steps_total", steps + 10.0, local_rank="1")
        node.await_value("hieravg_generation", 2.0)
        assert node.value("hieravg_generations_total", reason="restart") == 1
        assert node.status()["mode"] == "restart"
        (tmp_path / "finish").touch()
        assert agent.wait(timeout=WITHIN_S) == 0, out.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def see_both_train(a: Watched, b: Watched) -> None:
    for node in (a, b):
        for local_rank in "01":
            node.await_value("hieravg_steps_total", 20.0, local_rank=local_rank)
            node.await_value("hieravg_user_value", 0.0, local_rank=local_rank, name="loss")
        node.await_value("hieravg_rounds_total", 1.0, level="global", outcome="committed")
        node.await_status("/readyz", 200)
        assert node.get("/healthz") == (200, b"ok\n")
        text = node.get("/metrics")[1]
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")
        for metric in CATALOGUE:
            assert f"# HELP {metric.name} ".encode() in text
        assert node.value("hieravg_world_ranks") == 4
        assert node.value("hieravg_nodes", state="training") == 2
        assert 0 < (node.value("hieravg_goodput_ratio") or 0) < 1
        assert b"<html" in node.get("/")[1]
        node.await_every_second(slots=2)


def bother(job: RunningJob, a: Watched) -> None:
    """200 clients at once, some of which mean no good: the agent does not grow, and its workers step on."""
    agent = Path(f"/proc/{job.nodes['a'].process.pid}")

    def memory_bytes() -> int:
        return int((agent / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_descriptors() -> int:
        return len(list((agent / "fd").iterdir()))

    memory, descriptors = memory_bytes(), num_descriptors()
    steps = a.value("hieravg_steps_total", local_rank="0") or 0.0
    says = [b"GET /sta", b"\x16\x03\x01\0", b"GET /metrics HTTP/1.1\r\n\r\n", b"GET /status HTTP/1.1\r\n\r\n"]
    with ExitStack() as stack:
        for index in range(NUM_CLIENTS):
            sock = stack.enter_context(
                closing(socket.create_connection(("127.0.0.1", a.port), timeout=WITHIN_S))
            )
            sock.sendall(says[index % len(says)])
        assert a.get("/healthz")[0] == 200
        a.await_value("hieravg_steps_total", steps + 20.0, local_rank="0")
        assert memory_bytes() - memory < GROWN_BYTES_MAX
    job.wait_for("their connections are closed", lambda: num_descriptors() <= descriptors + FEW)


def watch_recovery(job: RunningJob, a: Watched, b: Watched) -> None:
    """One worker of b is killed; b's endpoint tells so, and tells when it is back."""
    before = {node: node.value("hieravg_steps_total", local_rank="0") or 0.0 for node in (a, b)}
    job.kill_worker("b")
    reason = b.await_status("/readyz", 503)
    assert b"generation" in reason
    b.await_value("hieravg_user_value", None, local_rank="0", name="loss")
    assert b.get("/healthz")[0] == 200
    a.await_value("hieravg_recovery_seconds_count", 1.0, phase=Phase.REGROUP)
    b.await_value("hieravg_user_value", 0.0, local_rank="0", name="loss")
    b.await_status("/readyz", 200)
    a.await_status("/readyz", 200)
    for node in (a, b):
        node.await_value("hieravg_steps_total", before[node] + 20.0, local_rank="0")


def see_what_happened(a: Watched, b: Watched) -> None:
    for phase in Phase:
        a.await_value("hieravg_recovery_seconds_count", 1.0, phase=phase)
        assert a.value("hieravg_recovery_seconds_count", phase=phase) == 1.0
        assert a.value("hieravg_recovery_seconds_sum", phase=phase) is not None
    assert a.value("hieravg_generations_total", reason="loss") == 1
    assert b.value("hieravg_worker_restarts_total", reason="killed") == 1
    assert a.value("hieravg_worker_restarts_total", reason="killed") == 0
    assert (b.value("hieravg_badput_seconds_total", cause="recovery") or 0.0) > 0.1
    b.await_every_second(slots=2)
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        status = a.status()
        nodes = {node["node_id"]: node for node in status["nodes"]}
        if nodes["b"]["workers"] and [each["restarts"] for each in nodes["b"]["workers"]] == [1, 1]:
            break
        assert time.monotonic() < deadline_s, status
        time.sleep(POLL_S)
    assert {node["state"] for node in nodes.values()} == {NodeShown.TRAINING}
    assert (nodes["b"]["metrics_port"], nodes["b"]["age_s"] < WITHIN_S) == (b.port, True)
    assert "loss" in [event["kind"] for event in status["events"]]
    assert status["generation"]["number"] == status["events"][-1]["generation"]
    assert status["levels"][-1]["last"]["outcome"] == "committed"
    assert isinstance(status["values"]["loss"], float)


def check_logs(job: RunningJob) -> None:
    """Both formats say the same; nothing is logged per step."""
    told: defaultdict[str, list[Any]] = defaultdict(list)
    for line in job.log("b").splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            assert {"time", "level", "run", "node", "generation", "step", "message"} <= found.keys()
            told[found["node"]].append(found)
    assert told.keys() == {"b"}
    assert any(each["message"].startswith("generation ") and each.get("reason") for each in told["b"])
    assert any("has ended before" in each["message"] and each["step"] > 0 for each in told["b"])
    assert re.search(r" INFO \[job a generation=\d+ step=\d+\] generation \d+, loss: ", job.log("a"))
    assert len(told["b"]) < 100
