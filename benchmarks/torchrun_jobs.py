"""Jobs under stock torchrun: started, hurt, and watched until their world has formed again.

A world has formed again when processes that were not there before have stepped together for a while; the time
is that of their first step. Every process ends with the job, and the job with whoever runs it.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NODES_MIN, NODES_MAX = 2, 3
RESTARTS_MAX = 20
# How long a world may take to form, at first and again.
START_BOUND_S = 150.0
BOUND_S = 90.0
# A world that goes on for less did not form.
STANDS_S = 2.0
POLL_S = 0.02

WORKER, NODE, ADDED, FIRST = "worker killed", "node killed", "node added", "rank 0's node killed"
EVENTS = (WORKER, NODE, ADDED, FIRST)
SCRIPT = Path(__file__).parent / "training_script.py"


@dataclass(frozen=True, slots=True)
class Setting:
    """torchrun's flags, and variables set for it. `num_repeats_max`: what mostly waits is run less often."""

    name: str
    backend: str
    conf: str = ""
    variables: tuple[str, ...] = ()
    num_repeats_max: int = 100


# Without it torch's agent keeps one store for all attempts, and gloo meets the addresses of the one before.
FRESH = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt="
OURS = Setting("etcd3, defaults", "etcd3")
SETTINGS = (
    OURS,
    Setting("c10d, tuned to 3 beats", "c10d", conf=f"{TUNED}3", variables=(FRESH,), num_repeats_max=2),
    Setting("c10d, defaults, fresh stores", "c10d", variables=(FRESH,), num_repeats_max=1),
    Setting("c10d, tuned to 2 beats", "c10d", conf=f"{TUNED}2", variables=(FRESH,), num_repeats_max=2),
    Setting("c10d, defaults", "c10d", num_repeats_max=1),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds from the event to the first step of the world formed again, and to its last process's start."""

    event: str
    setting: str
    load: float
    step_s: float | None = None
    process_s: float | None = None
    failure: str = ""
    why: str = ""


class Job:
    def __init__(self, setting: Setting, folder: Path, *, endpoint: str, run_id: str) -> None:
        self.agents: list[subprocess.Popen[bytes]] = []
        self.lines: list[dict[str, Any]] = []
        self._setting = setting
        self._endpoint = endpoint
        self._run_id = run_id
        self._folder = folder
        self._told = folder / "told.jsonl"
        self._num_read_bytes = 0
        folder.mkdir(parents=True)
        self._told.touch()

    def add_agent(self) -> None:
        setting = self._setting
        command = ["setpriv", "--pdeathsig", "KILL", "env", "GLOO_SOCKET_IFNAME=lo", *setting.variables]
        command += [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES_MIN}:{NODES_MAX}"]
        command += ["--nproc-per-node=1", f"--max-restarts={RESTARTS_MAX}", "--local-addr=127.0.0.1"]
        command += [f"--rdzv-backend={setting.backend}", f"--rdzv-endpoint={self._endpoint}"]
        command += [f"--rdzv-id={self._run_id}", *([f"--rdzv-conf={setting.conf}"] if setting.conf else [])]
        command += [f"--log-dir={self._folder}", str(SCRIPT), str(self._told)]
        with (self._folder / f"agent{len(self.agents)}.log").open("wb") as log:
            self.agents.append(subprocess.Popen(command, stdout=log, stderr=log))

    def start(self, num_nodes: int) -> bool:
        """Whether a world of so many formed."""
        for _ in range(num_nodes):
            self.add_agent()
            if self._setting.backend == "c10d" and len(self.agents) == 1:
                # The first agent is to host the store.
                await_port(self._endpoint)
        return self.await_world(num_nodes, known=frozenset(), bound_s=START_BOUND_S) is not None

    def read(self) -> None:
        with self._told.open("rb") as file:
            file.seek(self._num_read_bytes)
            whole = file.read().rpartition(b"\n")[0]
        self._num_read_bytes += len(whole) + 1 if whole else 0
        self.lines += map(json.loads, whole.splitlines())

    def await_world(self, num_nodes: int, *, known: frozenset[int], bound_s: float) -> float | None:
        """When a world of so many nodes made its first step, of processes not known before."""
        deadline_s = time.monotonic() + bound_s
        while time.monotonic() < deadline_s and self.num_live() >= num_nodes:
            self.read()
            steps = [line for line in self.lines if line["told"] == "step" and line["pid"] not in known]
            if steps and steps[-1]["num_ranks"] == num_nodes:
                first_s: float = next(step["at_s"] for step in steps if step["pid"] == steps[-1]["pid"])
                if steps[-1]["at_s"] >= first_s + STANDS_S:
                    return first_s
            time.sleep(POLL_S)
        return None

    def num_live(self) -> int:
        return sum(agent.poll() is None for agent in self.agents)

    def pids(self) -> frozenset[int]:
        return frozenset(line["pid"] for line in self.lines)

    def worker(self, rank: int) -> dict[str, Any]:
        """What the last process with this rank said when it was ready."""
        return next(line for line in reversed(self.lines) if line.get("rank") == rank)

    def processes_started_s(self, num_ranks: int) -> float:
        """When the last process of the newest world started."""
        pids = {self.worker(rank)["pid"] for rank in range(num_ranks)}
        return max(
            float(line["at_s"]) for line in self.lines if line["told"] == "started" and line["pid"] in pids
        )

    def agent_of(self, rank: int) -> "subprocess.Popen[bytes]":
        pid = self.worker(rank)["agent_pid"]
        return next(agent for agent in self.agents if agent.pid == pid)

    def last_error(self) -> str:
        """What the agents that ended by themselves said last."""
        for index, agent in enumerate(self.agents):
            if (agent.poll() or 0) > 0:
                text = (self._folder / f"agent{index}.log").read_text(errors="replace")
                found = re.findall(r"\w+Error: .*", text)
                if found:
                    return str(found[-1])
        return ""

    def close(self) -> None:
        for agent in self.agents:
            kill_node(agent)


def kill_node(agent: "subprocess.Popen[bytes]") -> None:
    """End an agent and its workers at once, as a machine does that is lost."""
    if agent.poll() is None:
        # Stopped first: it starts no worker behind our back.
        agent.send_signal(signal.SIGSTOP)
        for pid in (agent.pid, *children(agent.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


def children(parent_pid: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything; what follows is the state and the parent.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent_pid:
                yield int(stat.parent.name)


def await_port(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    deadline_s = time.monotonic() + START_BOUND_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"nobody listens at {endpoint}")


def strike(job: Job, event: str, *, backend: str) -> tuple[float, int]:
    """Let the event happen; when it did, and how many nodes are then there."""
    num_nodes = job.num_live()
    at_s = time.monotonic()
    match event:
        case "worker killed":
            os.kill(job.worker(num_nodes - 1)["pid"], signal.SIGKILL)
        case "node added":
            job.add_agent()
            num_nodes += 1
        case _:
            host, first = job.agents[0], job.agent_of(0)
            if event == FIRST:
                chosen = host if backend == "c10d" else first
            else:
                chosen = next(each for each in job.agents if each not in (host, first) and each.poll() is None)
            at_s = time.monotonic()
            kill_node(chosen)
            num_nodes -= 1
    return at_s, num_nodes


def measure_event(job: Job, event: str, *, setting: Setting) -> Outcome:
    load = os.getloadavg()[0]
    job.read()
    known = job.pids()
    at_s, num_nodes = strike(job, event, backend=setting.backend)
    step_s = job.await_world(num_nodes, known=known, bound_s=BOUND_S)
    if step_s is None:
        is_lost = job.num_live() < num_nodes
        failure = "job lost" if is_lost else f"not within {BOUND_S:.0f} s"
        return Outcome(event, setting.name, load, failure=failure, why=job.last_error())
    process_s = job.processes_started_s(num_nodes)
    return Outcome(event, setting.name, load, step_s - at_s, process_s - at_s)


def measure_life(
    setting: Setting, events: Sequence[str], folder: Path, *, make_endpoint: Callable[[str], str]
) -> list[Outcome]:
    """One event after the other in one job; in another one after an event that a job did not survive."""
    outcomes: list[Outcome] = []
    job: Job | None = None
    try:
        for event in events:
            if job is None:
                run_id = f"{folder.name}-{len(outcomes)}"
                job = Job(setting, folder / run_id, endpoint=make_endpoint(setting.backend), run_id=run_id)
                if not job.start(NODES_MAX - 1 if event == ADDED else NODES_MAX):
                    raise RuntimeError(f"{setting.name}: the job did not start: {job.last_error()}")
            outcomes.append(measure_event(job, event, setting=setting))
            print(outcomes[-1], file=sys.stderr)
            if outcomes[-1].failure:
                job.close()
                job = None
    finally:
        if job is not None:
            job.close()
    return outcomes
