"""Many agents on a real etcd: how fast they join, how fast a loss is adopted, and whether load drops anybody.

Agents share processes, because a machine of a few cores cannot hold a process for each of 64; the one that is
killed has a process of its own. Detection is the moment in which the first survivor's process knows that the
other one is gone; adoption is that of the last survivor.
"""

import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "agents_process.py"
AGENTS_PER_PROCESS = 9
# How long anything may take before the benchmark gives up.
BOUND_S = 120.0
# Between one change and the next, so that what follows from the first is over.
QUIET_S = 2.0
NUM_LOADED_AGENTS = 8
NUM_LOADED_KILLS = 3
SAMPLE_S = 1.0

_runs = count()


@dataclass(frozen=True, slots=True)
class LossTimes:
    """Seconds from a kill to its detection, from there to the last survivor's adoption, and both."""

    detection_s: float
    adoption_s: float
    total_s: float
    load: float


@dataclass(frozen=True, slots=True)
class Joined:
    """One job: seconds from the first agent's start until everybody has adopted all, and a loss after it."""

    num_agents: int
    num_processes: int
    join_s: float
    num_generations: int
    load: float
    loss: LossTimes


@dataclass(frozen=True, slots=True)
class Loaded:
    """`num_dropped`: live nodes that were taken out. `num_runnable`: median of what wanted a core at once."""

    num_agents: int
    num_busy: int
    span_s: float
    num_dropped: int
    num_away: int
    num_runnable: float
    load: float
    kills: tuple[LossTimes, ...]


class AgentsProcess:
    """`heard` is shared by all processes of a measurement."""

    def __init__(self, heard: "queue.SimpleQueue[dict[str, Any]]", **config: Any) -> None:
        self.node_ids: Sequence[str] = config["node_ids"]
        self._heard = heard
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, str(PROGRAM), json.dumps(config)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

    def kill(self) -> float:
        """Kill it, and say when."""
        at_s = time.monotonic()
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        return at_s

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(json.loads(line))


class Crowd:
    """All processes of one measurement and what they said since `forget` was called last."""

    def __init__(self, groups: Sequence[Sequence[str]], **config: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self._heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._config = config
        self.processes: list[AgentsProcess] = []
        for node_ids in groups:
            self.add(node_ids)
        self.hear(lambda: len(self.told("started")) == len(groups))

    def add(self, node_ids: Sequence[str]) -> None:
        self.processes.append(AgentsProcess(self._heard, node_ids=node_ids, **self._config))

    @property
    def num_agents(self) -> int:
        return sum(len(process.node_ids) for process in self.processes)

    def tell(self, text: str) -> float:
        """Tell all of them, and say when the first one was told."""
        at_s = time.monotonic()
        for process in self.processes:
            process.tell(text)
        return at_s

    def kill(self, index: int) -> float:
        return self.processes.pop(index).kill()

    def told(self, told: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["told"] == told]

    def forget(self) -> None:
        self.pause(0.0)
        self.lines = []

    def pause(self, span_s: float) -> None:
        """Listen for so long."""
        until_s = time.monotonic() + span_s
        with contextlib.suppress(queue.Empty):
            while True:
                self.lines.append(self._heard.get(timeout=max(0.0, until_s - time.monotonic())))

    def hear(self, until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + BOUND_S
        while not until():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the agents have only said {self.lines[-3:]}")
            with contextlib.suppress(queue.Empty):
                self.lines.append(self._heard.get(timeout=1.0))

    def hear_all_adopt(self, num_members: int) -> float:
        """When the last agent here adopted a generation of so many."""

        def adopted() -> dict[str, float]:
            lines = [line for line in self.told("adopted") if line["num_members"] == num_members]
            return {line["node"]: line["at_s"] for line in lines}

        self.hear(lambda: len(adopted()) >= self.num_agents)
        return max(adopted().values())

    def close(self) -> None:
        while self.processes:
            self.kill(-1)


@contextlib.contextmanager
def crowd_of(groups: Sequence[Sequence[str]], **config: Any) -> Iterator[Crowd]:
    crowd = Crowd(groups, **config)
    try:
        yield crowd
    finally:
        crowd.close()


def measure_joins(endpoints: Sequence[str], *, num_agents: int, num_repeats: int) -> list[Joined]:
    node_ids = [f"node-{index}" for index in range(num_agents)]
    shared = node_ids[:-1]
    groups = [shared[start : start + AGENTS_PER_PROCESS] for start in range(0, len(shared), AGENTS_PER_PROCESS)]
    found = []
    with crowd_of([*groups, node_ids[-1:]], endpoints=endpoints, nodes_max=num_agents) as crowd:
        for repeat in range(num_repeats):
            if repeat:
                crowd.forget()
                crowd.add(node_ids[-1:])
                crowd.hear(lambda: bool(crowd.told("started")))
            found.append(measure_join(crowd))
            print(found[-1], file=sys.stderr)
    return found


def measure_join(crowd: Crowd) -> Joined:
    """Open all, kill the last, close the others."""
    load, num_agents, num_processes = os.getloadavg()[0], crowd.num_agents, len(crowd.processes)
    crowd.forget()
    opened_s = crowd.tell(f"open join-{next(_runs)}")
    join_s = crowd.hear_all_adopt(num_agents) - opened_s
    num_generations = len({line["number"] for line in crowd.told("adopted")})
    loss = measure_loss(crowd)
    crowd.forget()
    crowd.tell("close")
    crowd.hear(lambda: len(crowd.told("closed")) == len(crowd.processes))
    return Joined(num_agents, num_processes, join_s, num_generations, load, loss)


def measure_loss(crowd: Crowd) -> LossTimes:
    crowd.pause(QUIET_S)
    crowd.forget()
    load, num_agents = os.getloadavg()[0], crowd.num_agents
    killed_s = crowd.kill(-1)
    adopted_s = crowd.hear_all_adopt(num_agents - 1)
    # If nobody saw its process end its lease did, and all of the time is the adoption's.
    detected_s = min((line["at_s"] for line in crowd.told("death")), default=killed_s)
    return LossTimes(detected_s - killed_s, adopted_s - detected_s, adopted_s - killed_s, load)


def measure_load(endpoints: Sequence[str], *, num_busy: int, span_s: float) -> Loaded:
    """Agents, each a process of its own, on a machine that others keep busy; then real kills, one by one."""
    groups = [[f"node-{index}"] for index in range(NUM_LOADED_AGENTS)]
    with crowd_of(groups, endpoints=endpoints, nodes_max=len(groups)) as crowd:
        crowd.tell(f"open load-{next(_runs)}")
        crowd.hear_all_adopt(len(groups))
        crowd.pause(QUIET_S)
        crowd.forget()
        with busy_processes(num_busy):
            runnable = []
            until_s = time.monotonic() + span_s
            while time.monotonic() < until_s:
                crowd.pause(SAMPLE_S)
                runnable.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
            load = os.getloadavg()[0]
            smallest = min((line["num_members"] for line in crowd.told("adopted")), default=len(groups))
            num_dropped = max(len(crowd.told("fenced")), len(groups) - smallest)
            num_away = len(crowd.told("away"))
            kills = tuple(measure_loss(crowd) for _ in range(NUM_LOADED_KILLS if not num_dropped else 0))
    num_runnable = statistics.median(runnable)
    return Loaded(len(groups), num_busy, span_s, num_dropped, num_away, num_runnable, load, kills)


@contextlib.contextmanager
def busy_processes(num_busy: int) -> Iterator[None]:
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", "while True: pass"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [subprocess.Popen(command) for _ in range(num_busy)]
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
