"""Loops that are not ours: a node of Hugging Face's Trainer or of Lightning is killed, and comes back.

The job needs both nodes, so the survivor pauses while the other one is away, and nothing depends on how long
that takes. The node that comes back is started with a few steps more than the survivor has made: its end ends
the job.
"""

import http.client
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.jobs import POLL_S, alive, children_of
from tests.examples.running import WITHIN_S, Ended, node_command, read_ended, start
from tests.membership.etcd_servers import free_ports

PORT = re.compile(r"metrics and status of this node: http://127\.0\.0\.1:(\d+)/")
FOR_EVER = 1_000_000
# More than are made after the return: who began anew would have to make more of them.
STEPS_BEFORE = 200
STEPS_AFTER = 64


class Nodes:
    """The nodes of a job. `faults` counts what was done to it."""

    def __init__(self, folder: Path, name: str, *, slots: int) -> None:
        self.faults: Counter[str] = Counter()
        self._folder, self._name, self._slots = folder, name, slots
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[Path] = []
        (self._port,) = free_ports(1)

    def start(self, node: str, *, steps: int) -> None:
        log = self._folder / f"log-{len(self._logs)}-{node}"
        command = node_command(
            self._name,
            node=node,
            nodes="2:2",
            slots=self._slots,
            port=self._port,
            steps=steps,
            metrics_port="auto",
        )
        self._logs.append(log)
        self._processes[node] = start(command, log)

    def kill(self, node: str) -> None:
        """Its agent only: the workers end by themselves."""
        process = self._processes.pop(node)
        workers = children_of(process.pid)
        assert len(workers) == self._slots
        process.kill()
        process.wait()
        self.faults["agent killed"] += 1
        self.wait_for(f"the workers of {node} end", lambda: not alive(workers))

    def status(self) -> dict[str, Any]:
        """Of the job, as its first node tells it; nothing before it does."""
        port = PORT.search(self._logs[0].read_text(errors="replace"))
        if port is None:
            return {"nodes": [], "generation": None}
        with closing(http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=WITHIN_S)) as connection:
            connection.request("GET", "/status")
            found: dict[str, Any] = json.loads(connection.getresponse().read())
            return found

    def steps(self) -> dict[str, int]:
        """How far each node's slowest worker is, by what is known."""
        return {
            node["node_id"]: min(worker["step"] for worker in node["workers"])
            for node in self.status()["nodes"]
            if len(node["workers"]) == self._slots
        }

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not condition():
            has_failed = any(process.poll() for process in self._processes.values())
            assert not has_failed, f"a node failed while it was waited for: {what}\n{self.printed()}"
            assert time.monotonic() < deadline_s, f"not within {WITHIN_S} s: {what}\n{self.printed()}"
            time.sleep(POLL_S)

    def finish(self) -> list[Ended]:
        self.wait_for("all end", lambda: all(process.poll() == 0 for process in self._processes.values()))
        return read_ended(self.printed())

    def printed(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self._logs)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@contextmanager
def running(folder: Path, name: str, *, slots: int) -> Iterator[Nodes]:
    nodes = Nodes(folder, name, slots=slots)
    try:
        yield nodes
    finally:
        nodes.close()


# Two workers where the framework connects those of a node by itself.
@pytest.mark.parametrize(("name", "slots"), [("huggingface_trainer", 2), ("lightning_module", 1)])
def test_a_killed_node_comes_back_at_the_others_step(name: str, slots: int, tmp_path: Path) -> None:
    with running(tmp_path, name, slots=slots) as nodes:
        # a serves the store: the loss of its host is another test's.
        nodes.start("a", steps=FOR_EVER)
        nodes.wait_for("a begins", lambda: bool(nodes.status()["nodes"]))
        nodes.start("b", steps=FOR_EVER)
        nodes.wait_for("both train", lambda: min(nodes.steps().get(node, 0) for node in "ab") >= STEPS_BEFORE)
        nodes.kill("b")
        nodes.wait_for("a pauses", lambda: bool(nodes.status()["generation"]["hold"]))
        paused_at = nodes.steps()["a"]
        nodes.start("b", steps=paused_at + STEPS_AFTER)
        ended = nodes.finish()
        assert nodes.faults == {"agent killed": 1}
    survived, returned = ended[:slots], ended[slots:]
    assert [each.rank for each in ended] == list(range(2 * slots))
    assert all(each.num_steps > paused_at for each in survived), ended
    assert all(0 < each.num_steps <= STEPS_AFTER for each in returned), ended
    # It came back to a model that had been trained.
    assert max(each.first_loss for each in returned) < 0.7 * min(each.first_loss for each in survived), ended
    assert len({each.digest for each in ended}) == 1, ended
