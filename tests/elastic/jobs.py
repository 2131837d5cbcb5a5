"""A running job as the tests hold it: its nodes are started, killed, frozen and asked to leave by name.

What the workers do is read from the lines their script writes; what the agents do, from their logs. Invariant:
whatever a test does, nothing of its job is left when the job is closed.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.membership.etcd_servers import EtcdCluster, free_ports

SCRIPT = Path(__file__).with_name("train.py")
HIERAVG = Path(sys.executable).with_name("hieravg")
WITHIN_S = 120.0
POLL_S = 0.05
LOG_SHOWN = 4000
STACKS_S = 1.0
SLOTS = 2
GLOBAL_STEPS = 16
HIERARCHY = f"node=4,global={GLOBAL_STEPS}"
# A newcomer does not wait long for others here.
SETTLE = "--rdzv-conf=last_call_timeout=0.2"

_GENERATION = re.compile(r"generation (\d+), (\w+): (.*)")

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Made:
    """A generation, as an agent told of it in its log."""

    number: int
    kind: str
    reason: str


@dataclass
class NodeProcess:
    """One node: its agent's process, and its workers as they are found below it."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    slots: int
    is_frozen: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[int]:
        return children_of(self.process.pid) if self.is_alive else []


@dataclass
class Survivors:
    """Who has to be there, unhurt, at the end of a test."""

    since_s: float
    pids: dict[str, list[int]] = field(default_factory=dict)


class RunningJob:
    """`cluster` is None for the embedded store. `faults` counts what was done to the job, by kind."""

    def __init__(
        self,
        folder: Path,
        *,
        cluster: EtcdCluster | None = None,
        flags: Sequence[str] = (),
        script: Sequence[str] = (),
        nnodes: str = "1:4",
        hierarchy: str = HIERARCHY,
        slots: int = SLOTS,
    ) -> None:
        self.folder = folder
        self.cluster = cluster
        self.run_id = folder.name
        self.faults: Counter[str] = Counter()
        self.nodes: dict[str, NodeProcess] = {}
        self.fenced: set[int] = set()
        self.is_spoilt = False
        self._flags = [f"--nnodes={nnodes}", "--hierarchy", hierarchy, "--max-restarts=20", SETTLE, *flags]
        self._script = script
        self._slots = slots
        self._sockets: set[str] = set()
        self._ports = [] if cluster else free_ports(1)
        self._read: dict[Path, tuple[int, list[Line]]] = {}
        for name in ("lines", "orders", "logs"):
            (folder / name).mkdir(parents=True)

    # --- nodes ------------------------------------------------------------------------------------------------

    def start(
        self,
        *names: str,
        slots: int | None = None,
        flags: Sequence[str] = (),
        script: Sequence[str] = (),
        under: Sequence[str] = (),
    ) -> None:
        """`slots` is the job's if not given. `under`: a program that starts the agent in its place."""
        slots = slots or self._slots
        for name in names:
            assert name not in self.nodes or not self.nodes[name].is_alive, f"{name} runs"
            log = self.folder / "logs" / name
            command = [*under, "setpriv", "--pdeathsig", "KILL", str(HIERAVG), "run", "--node-id", name]
            command += [f"--nproc-per-node={slots}", *self._store_flags(), *self._flags, *flags, str(SCRIPT)]
            command += ["--folder", str(self.folder), "--name", name, *self._script, *script]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            with log.open("ab") as out:
                process = subprocess.Popen(
                    command, stdout=out, stderr=out, start_new_session=True, env=environment
                )
            self.nodes[name] = NodeProcess(name, process, log, slots)

    def kill(self, *names: str) -> None:
        """Machines that lose their power: agents and workers die at the same time."""
        pids = [pid for name in names for pid in (self.nodes[name].process.pid, *self.nodes[name].workers())]
        self._note_sockets()
        for pid in pids:
            send(pid, signal.SIGKILL)
        for name in names:
            self.nodes[name].process.wait()
            self.faults["node killed"] += 1

    def kill_agent(self, name: str) -> list[int]:
        """Only the agent; its workers, which are returned, have to end by themselves."""
        self._note_sockets()
        workers = self.nodes[name].workers()
        self.nodes[name].process.kill()
        self.nodes[name].process.wait()
        self.faults["agent killed"] += 1
        return workers

    def kill_worker(self, name: str, index: int = 0) -> None:
        send(self.nodes[name].workers()[index], signal.SIGKILL)
        self.faults["worker killed"] += 1

    def freeze(self, name: str) -> None:
        node = self.nodes[name]
        for pid in (node.process.pid, *node.workers()):
            send(pid, signal.SIGSTOP)
        node.is_frozen = True
        self.fenced |= set(node.workers())
        self.faults["node frozen"] += 1

    def thaw(self, name: str) -> None:
        node = self.nodes[name]
        for pid in (*node.workers(), node.process.pid):
            send(pid, signal.SIGCONT)
        node.is_frozen = False

    def terminate(self, name: str) -> int:
        """Ask a node to leave, and wait for its exit code."""
        self._note_sockets()
        self.nodes[name].process.send_signal(signal.SIGTERM)
        self.faults["node asked to leave"] += 1
        return self.await_exit(name)

    def await_exit(self, name: str) -> int:
        self.wait_for(f"{name} exits", lambda: not self.nodes[name].is_alive)
        return self.nodes[name].process.wait()

    def order(self, name: str, what: str, index: int = 0) -> int:
        """Have one worker's script do something at its next step; the worker's process."""
        pid = self.nodes[name].workers()[index]
        path = self.folder / "orders" / str(pid)
        path.with_suffix(".new").write_text(what)
        path.with_suffix(".new").rename(path)
        self.wait_for(f"{pid} follows {what}", lambda: not path.exists())
        self.faults[f"worker ordered to {what.partition(' ')[0]}"] += 1
        return pid

    # --- what they tell ---------------------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        """Everything all workers have written so far, worker by worker."""
        self._read_on()
        return [line for _, found in self._read.values() for line in found]

    def of(self, pid: int, event: str | None = None) -> list[Line]:
        self._read_on()
        found = [each for path, (_, lines) in self._read.items() if path.suffix == f".{pid}" for each in lines]
        return [each for each in found if event in (None, each["event"])]

    def log(self, name: str) -> str:
        return self.nodes[name].log.read_text(errors="replace")

    def generations(self, name: str, *, after: int = 0) -> list[Made]:
        """The generations a node's agent told of, above a number."""
        found = [Made(int(match[1]), match[2], match[3]) for match in _GENERATION.finditer(self.log(name))]
        return [made for made in found if made.number > after]

    def newest(self, name: str) -> int:
        return self.generations(name)[-1].number

    # --- waiting ----------------------------------------------------------------------------------------------

    def wait_for(self, what: str, condition: Callable[[], bool], *, within_s: float = WITHIN_S) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            is_hopeless = not any(node.is_alive for node in self.nodes.values()) and not condition()
            if time.monotonic() > deadline_s or is_hopeless:
                self.is_spoilt = True
                raise AssertionError(f"not within {within_s:.0f} s: {what}\n{self._describe()}")
            time.sleep(POLL_S)

    def await_together(self, *names: str, since_s: float | None = None) -> int:
        """Until exactly these nodes have had a global round from now on, all with the same result.

        The number of the generation they had it in.
        """
        since_s = time.monotonic() if since_s is None else since_s
        size = sum(self.nodes[name].slots for name in names)
        met: list[int] = []

        def is_met() -> bool:
            found: defaultdict[tuple[int, int], list[Line]] = defaultdict(list)
            for line in self.lines():
                if line["event"] == "step" and line["at_s"] > since_s and "digest" in line:
                    found[line["generation"], line["step"]].append(line)
            for (generation, _), lines in found.items():
                if {each["node"] for each in lines} == set(names) and len(lines) == size == lines[0]["world"]:
                    assert len({each["digest"] for each in lines}) == 1, f"replicas differ: {lines}"
                    met.append(generation)
            return bool(met)

        self.wait_for(f"{', '.join(names)} have a global round", is_met)
        self._note_sockets()
        return max(met)

    # --- what has to hold -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def surviving(self, *names: str) -> Iterator[Survivors]:
        """These nodes go through the block unhurt: the same processes, every step made once, and more after."""
        survivors = Survivors(time.monotonic(), {name: self.nodes[name].workers() for name in names})
        for name, pids in survivors.pids.items():
            assert len(pids) == self.nodes[name].slots, f"{name} does not run"
        steps_before = {pid: self._last_step(pid) for pids in survivors.pids.values() for pid in pids}
        yield survivors
        for name, pids in survivors.pids.items():
            assert self.nodes[name].workers() == pids, f"{name} has other workers than before"
            for pid in pids:
                assert self._last_step(pid) > steps_before[pid], f"{pid} of {name} makes no steps"
                self._check_steps(pid, since_s=survivors.since_s)

    def finish(self) -> None:
        """End the training; all replicas end alike, every agent exits with 0, and nothing is left."""
        names = [name for name, node in self.nodes.items() if node.is_alive]
        (self.folder / "stop").touch()
        codes = {name: self.await_exit(name) for name in names}
        assert codes == dict.fromkeys(names, 0), f"{codes}\n{self._describe()}"
        ends = [line for line in self.lines() if line["event"] == "end"]
        assert sorted({line["node"] for line in ends}) == sorted(names)
        assert len({line["digest"] for line in ends}) == 1, f"replicas end differently: {ends}"
        self.check()
        self.close()

    def check(self) -> None:
        """What holds at any time: every worker's steps in a row, and the same result for all of a round."""
        found: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for line in self.lines():
            if line["event"] == "step" and "digest" in line:
                found[line["generation"], line["step"]].add(line["digest"])
        differing = {where: digests for where, digests in found.items() if len(digests) > 1}
        assert not differing, f"replicas differ after the same round: {differing}"
        for pid in {line["pid"] for line in self.lines()} - self.fenced:
            self._check_steps(pid)

    def close(self) -> None:
        """End what still runs, and see that nothing is left."""
        self._note_sockets()
        had_to_end = [node for node in self.nodes.values() if node.is_alive]
        for node in had_to_end:
            workers = node.workers()
            node.process.kill()
            node.process.wait()
            for pid in workers:
                send(pid, signal.SIGKILL)
        self.wait_for("all processes are gone", lambda: not self.processes())
        left = {name for name in self._sockets if f"@{name}" in Path("/proc/net/unix").read_text()}
        assert not left, f"sockets are left: {left}"
        for port in self._ports:
            with contextlib.closing(socket.socket()) as sock:
                assert sock.connect_ex(("127.0.0.1", port)) != 0, f"somebody listens at port {port}"
        if self.cluster is not None and not had_to_end:
            self._check_store(self.cluster)

    def processes(self) -> list[int]:
        """All processes that have this job's folder in their command line."""
        found = []
        for pid in all_pids():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if str(self.folder).encode() in words:
                    found.append(pid)
        return found

    # --- inside -----------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        for path in sorted((self.folder / "lines").iterdir()):
            offset, found = self._read.get(path, (0, []))
            if path.stat().st_size == offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                new = file.read()
            # The last line may be half written.
            whole = new[: new.rfind(b"\n") + 1]
            found += [json.loads(text) for text in whole.splitlines()]
            self._read[path] = offset + len(whole), found

    def _store_flags(self) -> list[str]:
        run = f"--rdzv-id={self.run_id}"
        if self.cluster is None:
            return [run, f"--rdzv-endpoint=127.0.0.1:{self._ports[0]}"]
        return [run, "--rdzv-backend=etcd3", f"--rdzv-endpoint={','.join(self.cluster.endpoints)}"]

    def _last_step(self, pid: int) -> int:
        steps = [line["step"] for line in self.of(pid, "step")]
        return steps[-1] if steps else 0

    def _check_steps(self, pid: int, *, since_s: float = 0.0) -> None:
        steps = [line["step"] for line in self.of(pid, "step") if line["at_s"] > since_s]
        if steps:
            assert steps == list(range(steps[0], steps[0] + len(steps))), (
                f"{pid} lost or repeated a step: {steps}"
            )

    def _note_sockets(self) -> None:
        """Remember the names of the agents' sockets, which only their workers' environment tells."""
        for node in self.nodes.values():
            for pid in node.workers():
                with contextlib.suppress(OSError):
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    key = b"HIERAVG_AGENT_SOCKET="
                    self._sockets |= {each[len(key) :].decode() for each in variables if each.startswith(key)}

    def _check_store(self, cluster: EtcdCluster) -> None:
        """Every key that is left ends with a lease, and no node's record is among them."""
        told = json.loads(cluster.control("get", "--prefix", f"/hieravg/{self.run_id}/", "--write-out=json"))
        assert all(int(each.get("lease", 0)) for each in told.get("kvs", [])), "a key stays for ever"
        names = cluster.control("get", "--prefix", f"/hieravg/{self.run_id}/", "--keys-only").split()
        assert not [name for name in names if "/nodes/" in name], f"keys are left: {names}"

    def _describe(self) -> str:
        """What the job looks like, for a test that failed: the newest lines, and the logs with stacks.

        It is of no use after that: telling its stacks ends a worker.
        """
        for node in self.nodes.values():
            for pid in node.workers():
                send(pid, signal.SIGUSR2)
        time.sleep(STACKS_S)
        newest = {line["pid"]: line for line in self.lines()}
        told = [str(line) for line in newest.values()]
        logs = [
            f"===== {node.name}, exit {node.process.poll()}\n{self.log(node.name)[-LOG_SHOWN:]}"
            for node in self.nodes.values()
        ]
        return "\n".join([*told, *logs])


@contextlib.contextmanager
def running_job(folder: Path, **settings: Any) -> Iterator[RunningJob]:
    job = RunningJob(folder, **settings)
    try:
        yield job
    finally:
        job.close()


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def is_running(pid: int) -> bool:
    """Whether it lives; one that nobody has waited for does not."""
    try:
        return _stat_of(pid)[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """The processes that it started and that live, in the order of their numbers."""
    found = []
    for child in all_pids():
        with contextlib.suppress(OSError):
            state, parent = _stat_of(child)
            if parent == pid and state != "Z":
                found.append(child)
    return sorted(found)


def _stat_of(pid: int) -> tuple[str, int]:
    # The name may hold anything, brackets too; what follows its last bracket is regular.
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state, int(parent)


def alive(pids: Collection[int]) -> list[int]:
    return [pid for pid in pids if is_running(pid)]
