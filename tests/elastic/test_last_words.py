"""What a job looks like from outside as it starts, as a node leaves on purpose and as it ends, and its logs."""

import http.client
import itertools
import json
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.elastic.jobs import POLL_S, WITHIN_S, RunningJob, running_job

LEFT = 143
# So long after a node's end its record would be seen, if it came back.
AFTERWARDS_S = 2.0
NUM_ROUNDS = 5
PORT = re.compile(r"metrics and status of this node: http://127\.0\.0\.1:(\d+)/")
WARNING = re.compile(r"^\S+ \S+ WARNING \[.*?\] (.*)$", re.MULTILINE)


def status_of(job: RunningJob, name: str) -> dict[str, Any]:
    job.wait_for("the page is served", lambda: PORT.search(job.log(name)) is not None)
    found = PORT.search(job.log(name))
    assert found is not None
    with closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=WITHIN_S)) as connection:
        connection.request("GET", "/status")
        status: dict[str, Any] = json.loads(connection.getresponse().read())
        return status


def worker_states(status: dict[str, Any]) -> set[str]:
    return {worker["state"] for node in status["nodes"] for worker in node["workers"]}


def state_of(status: dict[str, Any], name: str) -> str | None:
    return next((str(node["state"]) for node in status["nodes"] if node["node_id"] == name), None)


def watch_start(job: RunningJob) -> None:
    """Workers import torch for seconds; nobody is missed meanwhile."""
    seen: set[str] = set()

    def is_training() -> bool:
        seen.update(worker_states(status_of(job, "a")))
        return "training" in seen

    job.wait_for("a trains", is_training)
    assert "starting" in seen
    assert "gone" not in seen


def watch_leave(job: RunningJob) -> None:
    """b leaves: it is shown as leaving at most, and as having left from then on."""
    seen: list[str | None] = []

    def has_left() -> bool:
        status = status_of(job, "a")
        seen.append(state_of(status, "b"))
        assert seen[-1] in {"training", "leaving", "left"}, status["nodes"]
        return seen[-1] == "left"

    assert job.terminate("b") == LEFT
    job.wait_for("b has left", has_left)
    until_s = time.monotonic() + AFTERWARDS_S
    while time.monotonic() < until_s:
        assert has_left()
        time.sleep(POLL_S)


def test_a_node_that_leaves_and_a_job_that_ends_have_a_last_word(tmp_path: Path) -> None:
    flags = ["--metrics-port=auto"]
    with running_job(tmp_path / "job", flags=flags, hierarchy="node=4,zone=8,global=16") as job:
        job.start("a", flags=["--label=zone=z1"])
        watch_start(job)
        job.start("b", flags=["--label=zone=z2"], slots=1)
        job.await_together("a", "b")
        check_bytes(job)
        with job.surviving("a"):
            watch_leave(job)
        job.await_together("a")
        job.finish()
    told = "left on SIGTERM; what this node did is in the others' models; exit code 143"
    assert job.log("b").splitlines()[-1].endswith(f"] {told}")
    received = "SIGTERM received: this node leaves the job, after one more round with the others"
    assert WARNING.findall(job.log("b")) == [received]
    assert re.search(r"INFO .* training is done at step [1-9]\d*; this node was part of it for ", job.log("a"))
    assert not WARNING.findall(job.log("a"))
    # Of one rank there is nothing to average; that is said when it becomes so, not with every generation.
    for name in "ab":
        notes = re.findall(r"generation \d+: (.*)", job.log(name))
        repeated = [note for note, after in itertools.pairwise(notes) if note == after]
        assert len(job.generations(name)) > 1
        assert not repeated, notes


def check_bytes(job: RunningJob) -> None:
    """Of two workers beside one, the second carries no part of the model between the nodes."""
    steps: dict[int, int] = {}

    def is_told() -> bool:
        last = status_of(job, "a")["levels"][-1]["last"]
        if last is not None and last["link"] == "inter_zone" and last["sent_bytes"] is not None:
            steps[last["step"]] = last["sent_bytes"]
        return len(steps) >= NUM_ROUNDS

    job.wait_for("rounds between zones are told", is_told)
    assert min(steps.values()) > 0, steps
