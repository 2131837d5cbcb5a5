"""Jobs of three nodes of two workers under several runtimes: started, hurt, and watched until they go on.

A survivor is a worker's place on a node that nothing was done to; its process may be another one afterwards.
Every process ends with the job, and the job with whoever runs it.
"""

import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from recovery_script import GLOBAL_STEPS, HANG, NODE_STEPS, QUIET
from torchrun_jobs import FRESH, START_BOUND_S, TUNED, await_port, children, kill_node

sys.path.append(str(Path(__file__).parent.parent))

from tests.membership.etcd_servers import EtcdCluster, free_ports

SLOTS = 2
NAMES, JOINER = ("a", "b", "c"), "d"
NODES_MIN, NODES_MAX = 1, 4
RESTARTS_MAX = 20
HANG_TIMEOUT_S = 3.0
# How long a job may take to go on; torchrun's own timings are far below, or there are none.
BOUND_S = 75.0
# Steps are looked at for so long before an event and after it.
BEFORE_S, AFTER_S = 3.0, 1.0
POLL_S = 0.02
SCRIPT = Path(__file__).parent / "recovery_script.py"

JOINS, NODE, WORKER = "node joins", "node killed", "worker killed"
FROZEN, HANGS, COORDINATOR = "node frozen", "Python hang of a worker", "coordinator or store host killed"
# In this order one event leaves what the next one needs. The last one may end a job.
EVENTS = (JOINS, NODE, WORKER, FROZEN, HANGS, COORDINATOR)

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class System:
    """A runtime with its settings. `num_repeats_max`: what mostly waits in vain is run once."""

    name: str
    runtime: str
    store: str
    conf: str = ""
    variables: tuple[str, ...] = ()
    is_tuned: bool = False
    num_repeats_max: int = 100

    @property
    def is_ours(self) -> bool:
        return self.runtime == "hieravg"

    @property
    def is_installed(self) -> bool:
        return self.runtime != "torchft" or importlib.util.find_spec("torchft") is not None


OURS = (System("hieravg run", "hieravg", "embedded"), System("hieravg run, etcd3", "hieravg", "etcd3"))
SYSTEMS = (
    *OURS,
    System("torchrun, tuned", "torchrun", "c10d", f"{TUNED}3", (FRESH,), is_tuned=True, num_repeats_max=2),
    System("torchrun, defaults, fresh stores", "torchrun", "c10d", variables=(FRESH,), num_repeats_max=1),
    System("torchrun, defaults", "torchrun", "c10d", num_repeats_max=1),
    System("torchft, tuned", "torchft", "lighthouse", "", (FRESH,), is_tuned=True, num_repeats_max=2),
    System("torchft, defaults", "torchft", "lighthouse", variables=(FRESH,), num_repeats_max=1),
)
LIGHTHOUSE_TUNED = ("--heartbeat_timeout_ms=1000", "--join_timeout_ms=1000", "--quorum_tick_ms=20")


@dataclass(frozen=True, slots=True)
class Step:
    """`era`: changes with the membership. `round_s`: of the global round after it, if there was one."""

    at_s: float
    pid: int
    step: int
    era: int
    num_ranks: int
    round_s: float | None
    call_us: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`gap_s`: the longest time between two steps of a survivor. `recovery_s`: from the event to the next
    global round in the membership that follows it, which took `round_s`.
    """

    event: str
    system: str
    load: float
    ordinary_s: float = 0.0
    gap_s: float | None = None
    recovery_s: float | None = None
    round_s: float = 0.0
    steps_lost: int = 0
    num_restarted: int = 0
    num_survivors: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Strike:
    """What was done, and who is left to go on. `changes_members`: a new membership has to follow."""

    at_s: float
    survivors: tuple[str, ...]
    changes_members: bool = True


@dataclass
class Job:
    system: System
    folder: Path
    etcd: EtcdCluster
    nodes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    steps: defaultdict[Place, list[Step]] = field(default_factory=lambda: defaultdict(list))
    orders: dict[int, float] = field(default_factory=dict)
    lighthouse: "subprocess.Popen[bytes] | None" = None
    _offsets: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("lines", "orders", "logs"):
            (self.folder / name).mkdir(parents=True)
        self.port = free_ports(1)[0]

    # --- nodes ------------------------------------------------------------------------------------------------

    def start(self, *more: str) -> None:
        if self.system.runtime == "torchft":
            self._start_lighthouse()
        for index, name in enumerate((*NAMES, *more)):
            self.start_node(name)
            if index == 0 and self.system.store in ("embedded", "c10d"):
                # The first agent is to host the store.
                await_port(f"127.0.0.1:{self.port}")
        self.await_together((*NAMES, *more), since_s=0.0)

    def start_node(self, name: str) -> None:
        with (self.folder / "logs" / name).open("ab") as log:
            command = ["setpriv", "--pdeathsig", "KILL", *self._command(name)]
            self.nodes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def freeze(self, name: str) -> None:
        agent = self.nodes[name]
        for pid in (agent.pid, *children(agent.pid)):
            os.kill(pid, signal.SIGSTOP)

    def kill_worker(self, name: str) -> None:
        os.kill(self.worker(name), signal.SIGKILL)

    def worker(self, name: str) -> int:
        """The process of the node's last worker."""
        return self.steps[name, SLOTS - 1][-1].pid

    def order(self, pid: int, what: str) -> None:
        path = self.folder / "orders" / str(pid)
        path.with_suffix(".new").write_text(what)
        path.with_suffix(".new").rename(path)

    def present(self) -> tuple[str, ...]:
        return tuple(name for name, agent in self.nodes.items() if agent.poll() is None)

    def close(self) -> None:
        for agent in self.nodes.values():
            # What is frozen can be killed, and its children too.
            kill_node(agent)
        if self.lighthouse is not None:
            kill_node(self.lighthouse)

    # --- what they tell ---------------------------------------------------------------------------------------

    def read(self) -> None:
        for path in (self.folder / "lines").iterdir():
            name, local_rank, pid = path.name.split(".")
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._offsets[path] = self._offsets.get(path, 0) + (len(whole) + 1 if whole else 0)
            for line in map(json.loads, whole.splitlines()):
                if "order" in line:
                    self.orders[int(pid)] = line["at_s"]
                else:
                    self.steps[name, int(local_rank)].append(Step(pid=int(pid), **line))

    def rounds(self, name: str, *, since_s: float) -> list[list[Step]]:
        """For each worker of a node, its global rounds after this time."""
        found = [self.steps[name, local_rank] for local_rank in range(SLOTS)]
        return [[step for step in steps if step.round_s is not None and step.at_s > since_s] for steps in found]

    def await_together(self, names: Collection[str], *, since_s: float) -> None:
        """Until all of these, and nobody else, had a global round after this time."""
        deadline_s = time.monotonic() + START_BOUND_S
        size = SLOTS * len(names)
        while time.monotonic() < deadline_s and set(names) <= set(self.present()):
            self.read()
            rounds = [each for name in names for each in self.rounds(name, since_s=since_s)]
            if all(any(step.num_ranks == size for step in steps) for steps in rounds):
                return
            time.sleep(POLL_S)
        raise TimeoutError(f"{self.system.name}: {', '.join(names)} did not come together")

    # --- inside -----------------------------------------------------------------------------------------------

    def _command(self, name: str) -> list[str]:
        system = self.system
        variables = ["env", "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", *system.variables]
        shape = [f"--nproc-per-node={SLOTS}", f"--max-restarts={RESTARTS_MAX}", "--local-addr=127.0.0.1"]
        script = [str(SCRIPT), "--runtime", system.runtime, "--folder", str(self.folder), "--name", name]
        script += ["--slots", str(SLOTS)]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        run = [f"--nnodes={NODES_MIN}:{NODES_MAX}", f"--rdzv-id={self.folder.name}"]
        if system.runtime == "torchft":
            script += ["--lighthouse", f"http://127.0.0.1:{self.port}"]
            script += ["--is-tuned"] if system.is_tuned else []
            return [*variables, *torchrun, "--standalone", *shape, *script]
        if system.store == "etcd3":
            run += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={','.join(self.etcd.endpoints)}"]
        else:
            run += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"]
        if system.is_ours:
            program = str(Path(sys.executable).with_name("hieravg"))
            ours = ["--node-id", name, "--hierarchy", f"node={NODE_STEPS},global={GLOBAL_STEPS}"]
            ours += [f"--hang-timeout-s={HANG_TIMEOUT_S:.0f}"]
            return [*variables, program, "run", *run, *shape, *ours, *script]
        conf = [f"--rdzv-conf={system.conf}"] if system.conf else []
        return [*variables, *torchrun, *run, *conf, *shape, *script]

    def _start_lighthouse(self) -> None:
        tuned = LIGHTHOUSE_TUNED if self.system.is_tuned else ()
        program = str(Path(sys.executable).with_name("torchft_lighthouse"))
        command = ["setpriv", "--pdeathsig", "KILL", program, "--min_replicas=1"]
        command += [f"--bind=127.0.0.1:{self.port}", *tuned]
        with (self.folder / "logs" / "lighthouse").open("ab") as log:
            self.lighthouse = subprocess.Popen(command, stdout=log, stderr=log)
        await_port(f"127.0.0.1:{self.port}")


# --- events ---------------------------------------------------------------------------------------------------


def strike(job: Job, event: str) -> Strike:
    """Let the event happen."""
    names, at_s = job.present(), time.monotonic()
    match event:
        case "node joins":
            job.start_node(JOINER)
            return Strike(at_s, names)
        case "node killed":
            kill_node(job.nodes[JOINER])
            return Strike(at_s, without(names, JOINER))
        case "worker killed":
            job.kill_worker("c")
            return Strike(at_s, without(names, "c"))
        case "node frozen":
            job.freeze("c")
            return Strike(at_s, without(names, "c"))
        case "Python hang of a worker":
            return Strike(hang(job, "c"), without(names, "c"))
    # The coordinator, or the host of the store.
    if job.system.store == "etcd3":
        for member in job.etcd.members:
            member.kill()
        return Strike(at_s, names, changes_members=False)
    if job.lighthouse is not None:
        kill_node(job.lighthouse)
        return Strike(at_s, names, changes_members=False)
    kill_node(job.nodes[NAMES[0]])
    return Strike(at_s, without(names, NAMES[0]))


def hang(job: Job, name: str) -> float:
    """When the worker began to hang."""
    pid = job.worker(name)
    job.order(pid, HANG)
    deadline_s = time.monotonic() + BOUND_S
    while pid not in job.orders and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        job.read()
    return job.orders[pid]


def without(names: Sequence[str], name: str) -> tuple[str, ...]:
    return tuple(each for each in names if each != name)


def measure_event(job: Job, event: str) -> Outcome:
    load = os.getloadavg()[0]
    time.sleep(BEFORE_S)
    job.read()
    eras = {place: steps[-1].era for place, steps in job.steps.items() if steps}
    struck = strike(job, event)
    places = [(name, local_rank) for name in struck.survivors for local_rank in range(SLOTS)]
    recovered = await_recovery(job, struck, places, eras=eras)
    steps_s = [
        two.at_s - one.at_s
        for place in places
        for one, two in pairwise(job.steps[place])
        if struck.at_s - BEFORE_S < one.at_s and two.at_s < struck.at_s
    ]
    ordinary_s = statistics.median(steps_s) if steps_s else 0.0
    if recovered is None:
        is_lost = not set(struck.survivors) <= set(job.present())
        failure = "job lost" if is_lost else f"not within {BOUND_S:.0f} s"
        return Outcome(event, job.system.name, load, ordinary_s, failure=failure)
    after = [tell_place(job.steps[place], struck.at_s) for place in places]
    return Outcome(
        event,
        job.system.name,
        load,
        ordinary_s,
        gap_s=max(gap_s for gap_s, _, _ in after),
        recovery_s=recovered.at_s - struck.at_s,
        round_s=recovered.round_s or 0.0,
        steps_lost=max(lost for _, lost, _ in after),
        num_restarted=sum(is_other for _, _, is_other in after),
        num_survivors=len(places),
    )


def await_recovery(job: Job, struck: Strike, places: Sequence[Place], *, eras: dict[Place, int]) -> Step | None:
    """The last survivor's first global round in the membership that follows; None if there is none in time."""
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        job.read()
        firsts = [first_round(job.steps[place], struck, era=eras[place]) for place in places]
        whole = [step for step in firsts if step is not None]
        if len(whole) == len(places):
            last = max(whole, key=lambda step: step.at_s)
            if all(job.steps[place][-1].at_s > last.at_s + AFTER_S for place in places):
                return last
        if not set(struck.survivors) <= set(job.present()):
            return None
        time.sleep(POLL_S)
    return None


def first_round(steps: Sequence[Step], struck: Strike, *, era: int) -> Step | None:
    rounds = [step for step in steps if step.round_s is not None and step.at_s > struck.at_s]
    if struck.changes_members:
        return next((step for step in rounds if step.era != era), None)
    # The first one may have been under way.
    return rounds[1] if len(rounds) > 1 else None


def tell_place(steps: Sequence[Step], at_s: float) -> tuple[float, int, bool]:
    """A survivor's longest gap since the event, the steps it made twice or lost, and whether it is another."""
    last = max(index for index, step in enumerate(steps) if step.at_s <= at_s)
    gap_s = max(two.at_s - one.at_s for one, two in pairwise(steps[last:]))
    others = [step for step in steps[last:] if step.pid != steps[last].pid]
    lost = 0
    if others:
        made = max(step.step for step in steps if step.pid == steps[last].pid)
        lost = max(0, made - (others[0].step - 1))
    return gap_s, lost, bool(others)


def restore(job: Job, event: str) -> None:
    """Have what the next event needs. `TimeoutError` if the job does not come to it."""
    since_s = time.monotonic()
    # Nobody but ours notices a worker that hangs, and starts it anew.
    if event == FROZEN or (event == HANGS and not job.system.is_ours):
        kill_node(job.nodes["c"])
        job.start_node("c")
    job.await_together((*NAMES, JOINER) if event == JOINS else NAMES, since_s=since_s)


def measure_life(system: System, events: Sequence[str], folder: Path, *, etcd: EtcdCluster) -> list[Outcome]:
    """One event after the other in one job; in another one after an event that a job did not survive."""
    outcomes: list[Outcome] = []
    job: Job | None = None
    try:
        for index, event in enumerate(events):
            job = job or Job(system, folder / f"{folder.name}-{index}", etcd)
            outcome, goes_on = run_event(job, event, is_last=event == events[-1])
            outcomes.append(outcome)
            print(outcome, file=sys.stderr)
            if not goes_on:
                job.close()
                job = None
    finally:
        if job is not None:
            job.close()
        for member in etcd.members:
            if member.process is None:
                member.start()
    return outcomes


def run_event(job: Job, event: str, *, is_last: bool) -> tuple[Outcome, bool]:
    """What came of it, and whether the job can go on to the next one."""
    outcome = Outcome(event, job.system.name, os.getloadavg()[0], failure="did not start")
    try:
        if not job.nodes:
            job.start(*([JOINER] if event == NODE else []))
        outcome = measure_event(job, event)
        if not outcome.failure and not is_last:
            restore(job, event)
            return outcome, True
    except TimeoutError as exc:
        print(exc, file=sys.stderr)
    return outcome, False


# --- at rest --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rest:
    """`call_us`: of `averager.step` with nothing due, while steps are made. `core_shares`: of each agent."""

    system: str
    load: float
    call_us: float
    num_calls: int
    core_shares: tuple[float, ...]


def measure_rest(system: System, folder: Path, *, etcd: EtcdCluster, span_s: float) -> Rest:
    load = os.getloadavg()[0]
    job = Job(system, folder, etcd)
    try:
        job.start()
        time.sleep(span_s)
        job.read()
        calls_us = [step.call_us for steps in job.steps.values() for step in steps if step.call_us is not None]
        for steps in job.steps.values():
            job.order(steps[-1].pid, f"{QUIET}{span_s + 10.0}")
        # Until every worker is at its order, or waits for one that is.
        time.sleep(2.0)
        ticks = {name: cpu_ticks(agent.pid) for name, agent in job.nodes.items()}
        time.sleep(span_s)
        per_s = os.sysconf("SC_CLK_TCK")
        shares = [
            (cpu_ticks(agent.pid) - ticks[name]) / per_s / span_s for name, agent in sorted(job.nodes.items())
        ]
    finally:
        job.close()
    return Rest(system.name, load, statistics.median(calls_us), len(calls_us), tuple(shares))


def cpu_ticks(pid: int) -> int:
    with contextlib.suppress(OSError):
        # The name in parentheses may hold anything; behind it, user and kernel time are words 12 and 13.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(words[11]) + int(words[12])
    return 0
