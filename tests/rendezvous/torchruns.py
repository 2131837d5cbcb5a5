"""Stock torchrun processes as the tests hold them: started, watched by what their workers write, killed.

A node is a torchrun with its workers. They are found by a mark in their environment, because workers are in
sessions of their own and outlive a torchrun that was killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

SCRIPT = Path(__file__).with_name("train.py")
ROOT = Path(__file__).parent.parent.parent
# For whatever has to happen; a busy machine takes its time.
PATIENCE_S = 120.0
POLL_S = 0.05
# So many steps of everybody say that the world steps on.
STEPS_SEEN = 3
MARK = "TEST_NODE_MARK"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

_numbers = count()


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a worker."""

    at_s: float
    node_id: str
    node_rank: int
    rank: int
    pid: int
    restarts: int
    world_size: int


def wait_for(until: Callable[[], bool], *, what: str, within_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not until():
        assert time.monotonic() < deadline_s, what
        time.sleep(POLL_S)


class TorchrunNode:
    def __init__(
        self,
        command: Sequence[str],
        *,
        node_id: str,
        folder: Path,
        labels: str,
        launcher: Sequence[str] = TORCHRUN,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.node_id = node_id
        self.mark = f"{MARK}={os.getpid()}-{next(_numbers)}"
        self._log = folder / f"{node_id}-{self.mark.rpartition('-')[2]}.log"
        name, _, value = self.mark.partition("=")
        own = {name: value, "TEST_NODE_ID": node_id, "HIERAVG_LABELS": labels, "OMP_NUM_THREADS": "1"}
        # torch tells of its rendezvous only if asked to; ours has something to say.
        own |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "LOGLEVEL": "INFO"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *launcher, *command],
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, **own, **(variables or {})},
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """torchrun and everything it has started that still runs."""
        return [pid for pid in _all_pids() if self.mark.encode() in _environment(pid).split(b"\0")]

    def kill(self) -> None:
        """Everything of the node at once, as a machine that loses its power."""
        with contextlib.suppress(ProcessLookupError):
            # Stopped first, so that it starts nothing while it is looked at.
            os.kill(self.process.pid, signal.SIGSTOP)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_for(lambda: not self.pids(), what=f"{self.node_id} still runs")

    def exit_code(self, *, within_s: float = PATIENCE_S) -> int:
        """Let it end by itself, with all its workers."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.node_id} does not end: {self.said[-4000:]}") from None
        wait_for(lambda: not self.pids(), what=f"{self.node_id} left workers behind")
        return code


class TorchrunJob:
    """Nodes of one run. `live` holds those that were started and not ended here."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        endpoints: Sequence[str],
        nodes: str,
        num_workers: int = 1,
        max_restarts: int = 100,
        task: str = "step",
        conf: Mapping[str, object] | None = None,
    ) -> None:
        self.run_id = run_id
        self.live: dict[str, TorchrunNode] = {}
        self.num_faults = 0
        self._num_workers = num_workers
        self._folder = folder
        self._conf = {"join_timeout": PATIENCE_S, **(conf or {})}
        self._flags = [f"--nnodes={nodes}", f"--nproc-per-node={num_workers}", f"--max-restarts={max_restarts}"]
        self._flags += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={','.join(endpoints)}", f"--rdzv-id={run_id}"]
        self._script = [str(SCRIPT), str(folder), task]
        self._nodes: list[TorchrunNode] = []
        self._steps: list[Step] = []
        self._read_bytes = 0

    def start(self, node_id: str, *, labels: str = "zone=z") -> TorchrunNode:
        conf = ",".join(f"{key}={value}" for key, value in {**self._conf, "node_id": node_id}.items())
        command = [*self._flags, f"--rdzv-conf={conf}", *self._script]
        node = TorchrunNode(command, node_id=node_id, folder=self._folder, labels=labels)
        self._nodes.append(node)
        self.live[node_id] = node
        return node

    def kill(self, node_id: str) -> float:
        """Kill a node, and say when."""
        self.live.pop(node_id).kill()
        self.num_faults += 1
        return time.monotonic()

    def signal(self, pid: int, number: signal.Signals) -> float:
        """Send a signal to one process, and say when."""
        os.kill(pid, number)
        self.num_faults += 1
        return time.monotonic()

    def finish(self) -> None:
        (self._folder / "finish").touch()

    def steps(self) -> list[Step]:
        """Every step that was written so far."""
        with contextlib.suppress(FileNotFoundError), (self._folder / "steps.jsonl").open("rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes += len(whole) + len(newline)
            self._steps += [Step(**json.loads(line)) for line in whole.splitlines()]
        return self._steps

    def await_world(self, *node_ids: str, after_s: float = 0.0) -> list[Step]:
        """Until exactly these nodes step on as one world; the first of their steps after that time, by rank."""
        world: list[Step] = []

        def is_stepping() -> bool:
            nonlocal world
            world = self._world(set(node_ids), after_s)
            return bool(world)

        try:
            wait_for(is_stepping, what=f"{node_ids} are not one world")
        except AssertionError as exc:
            logs = "\n".join(f"--- {node.node_id}\n{node.said[-3000:]}" for node in self.live.values())
            raise AssertionError(f"{exc}: {self._steps[-10:]}\n{logs}") from None
        return world

    def close(self) -> None:
        for node in self._nodes:
            node.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _world(self, node_ids: set[str], after_s: float) -> list[Step]:
        """The newest attempt of each rank, if together they are a world of these nodes that steps on."""
        new: dict[int, list[Step]] = {}
        for step in self.steps():
            if step.at_s > after_s:
                new.setdefault(step.pid, []).append(step)
        newest: dict[int, list[Step]] = {}
        for steps in new.values():
            before = newest.get(steps[0].rank)
            if before is None or before[-1].at_s < steps[-1].at_s:
                newest[steps[0].rank] = steps
        size = len(node_ids) * self._num_workers
        found = [newest[rank] for rank in sorted(newest) if rank < size]
        is_whole = len(found) == size and {steps[0].node_id for steps in found} == node_ids
        is_one = all(step.world_size == size for steps in found for step in steps[-STEPS_SEEN:])
        return [steps[0] for steps in found] if is_whole and is_one and _are_alive(found) else []


def _are_alive(found: list[list[Step]]) -> bool:
    return all(len(steps) >= STEPS_SEEN and _environment(steps[0].pid) for steps in found)


def _all_pids() -> Iterator[int]:
    yield from (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208 - names are wanted


def _environment(pid: int) -> bytes:
    """What a process was started with; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def as_conf(settings: Any, password_file: Path) -> dict[str, object]:
    """etcd's settings as they are written in --rdzv-conf."""
    names = ("cacert", "cert", "key", "user")
    return {**{name: getattr(settings, name) for name in names}, "password_file": password_file}
