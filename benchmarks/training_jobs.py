"""Jobs of `training.py`: an agent on each host, one host lost half-way, watched until the others are done.

A survivor is a worker's place on a host that was not lost; its process may be another one afterwards. Every
process ends with the job, and the job with whoever runs it.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from hosts import DEVICE, Hosts
from torchrun_jobs import FRESH, START_BOUND_S, TUNED, kill_node
from training_worker import GLOBAL_STEPS, NODE_STEPS, SLOTS

NODES, NODES_MIN = 4, 3
PORT = 29400
RESTARTS_MAX = 20
POLL_S, TRAFFIC_S = 0.05, 0.5
SCRIPT = Path(__file__).parent / "training_worker.py"
TORCHRUN_CONF = f"{TUNED}3"

Place = tuple[int, int]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class System:
    """A way to train, `way` in the worker's words, and the launcher it is run by."""

    name: str
    way: str

    @property
    def is_ours(self) -> bool:
        return self.way == "ours"


DDP = System("DDP, torchrun", "ddp")
AVERAGER = System("torch's averager, torchrun", "torch")
OURS = System("elastic_hieravg", "ours")
SYSTEMS = (DDP, AVERAGER, OURS)


@dataclass(frozen=True, slots=True)
class Step:
    """`is_start`: not a step, but the one that a process begins behind. `arrived_s`: at its averaging."""

    at_s: float
    pid: int
    step: int
    is_start: bool
    arrived_s: float | None


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen of a job. `traffic`: when so many bytes had gone between hosts since it was started."""

    steps: dict[Place, list[Step]]
    traffic: tuple[Point, ...]
    killed_s: float | None
    load: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """A job's figures; times count from its first step on.

    `standstill_s`: the longest time from step to step of a survivor after the kill, beside an ordinary one.
    `steps_lost`: that a survivor had made and made again. `round_s`: of a round of all ranks before the kill,
    from the last one's arrival to the last one's end; None for who has no rounds. `losses` and `traffic`:
    points over time.
    """

    system: str
    num_steps: int
    done_s: float
    killed_s: float
    ordinary_s: float
    standstill_s: float
    round_s: float | None
    steps_lost: int
    num_restarted: int
    num_survivors: int
    sent_bytes: float
    load: float
    losses: tuple[Point, ...]
    traffic: tuple[Point, ...]
    failure: str = ""

    def reached_s(self, loss: float) -> float | None:
        """When the loss was so low for the first time."""
        return next((at_s for at_s, found in self.losses if found <= loss), None)


@dataclass
class Job:
    system: System
    hosts: Hosts
    folder: Path
    num_steps: int
    agents: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    steps: defaultdict[Place, list[Step]] = field(default_factory=lambda: defaultdict(list))
    _offsets: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("lines", "models", "logs"):
            (self.folder / name).mkdir(parents=True)

    def start(self) -> None:
        for index in range(NODES):
            with (self.folder / "logs" / f"h{index}").open("ab") as log:
                # A session of its own: Ctrl-C is for the benchmark, which ends its agents itself.
                self.agents[index] = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *self.hosts.on(index), *self._command(index)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            if index == 0:
                # The first agent is to host the store.
                await_listener(self.agents[0], port=PORT)

    def read(self) -> None:
        for path in (self.folder / "lines").iterdir():
            node_index, local_rank, pid = map(int, path.name.split("."))
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._offsets[path] = self._offsets.get(path, 0) + (len(whole) + 1 if whole else 0)
            for line in map(json.loads, whole.splitlines()):
                self.steps[node_index, local_rank].append(Step(pid=pid, **line))

    def last_step(self) -> int:
        return max((steps[-1].step for steps in self.steps.values() if steps), default=0)

    def close(self) -> None:
        for agent in self.agents.values():
            kill_node(agent)

    def log_tail(self) -> str:
        """The end of what the first agent has logged, for people."""
        return (self.folder / "logs" / "h0").read_text(errors="replace")[-3000:]

    def _command(self, index: int) -> list[str]:
        address, first = self.hosts.address(index), self.hosts.address(0)
        variables = ["env", f"GLOO_SOCKET_IFNAME={DEVICE}", "OMP_NUM_THREADS=1", FRESH]
        shape = [f"--nnodes={NODES_MIN}:{NODES}", f"--nproc-per-node={SLOTS}", f"--max-restarts={RESTARTS_MAX}"]
        shape += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{PORT}", f"--rdzv-id={self.system.way}"]
        shape += [f"--local-addr={address}"]
        script = [str(SCRIPT), "--way", self.system.way, "--folder", str(self.folder)]
        script += ["--node-index", str(index), "--num-nodes", str(NODES), "--steps", str(self.num_steps)]
        if self.system.is_ours:
            program = str(Path(sys.executable).with_name("hieravg"))
            ours = ["--node-id", f"h{index}", "--hierarchy", f"node={NODE_STEPS},global={GLOBAL_STEPS}"]
            return [*variables, program, "run", *shape, *ours, *script]
        is_host = "true" if index == 0 else "false"
        conf = [f"--rdzv-conf={TORCHRUN_CONF},is_host={is_host}"]
        return [*variables, sys.executable, "-m", "torch.distributed.run", *shape, *conf, *script]


def await_listener(agent: "subprocess.Popen[bytes]", *, port: int) -> None:
    """Until somebody on the agent's host listens at the port."""
    deadline_s = time.monotonic() + START_BOUND_S
    while time.monotonic() < deadline_s and agent.poll() is None:
        # The kernel shows the process's own network. Fields: number, address, peer, state (10: it listens).
        for name in ("tcp", "tcp6"):
            rows = [line.split() for line in Path(f"/proc/{agent.pid}/net/{name}").read_text().splitlines()[1:]]
            if any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows):
                return
        time.sleep(POLL_S)
    raise TimeoutError(f"the first agent does not listen at port {port}")


def watch(
    system: System, hosts: Hosts, folder: Path, *, num_steps: int, kill_step: int, bound_s: float
) -> Watched:
    """Run a job; once a worker has made `kill_step` steps, the last host is lost for good."""
    job = Job(system, hosts, folder, num_steps)
    load, before_bytes = os.getloadavg()[0], hosts.sent_bytes()
    traffic: list[Point] = [(time.monotonic(), 0)]
    killed_s: float | None = None
    failure = ""
    deadline_s = time.monotonic() + bound_s
    try:
        job.start()
        while any(agent.poll() is None for agent in job.agents.values()):
            job.read()
            now_s = time.monotonic()
            if killed_s is None and job.last_step() >= kill_step:
                killed_s = now_s
                kill_node(job.agents[NODES - 1])
            if now_s >= traffic[-1][0] + TRAFFIC_S:
                traffic.append((now_s, hosts.sent_bytes() - before_bytes))
            if now_s > deadline_s:
                failure = f"not done within {bound_s:.0f} s"
                break
            time.sleep(POLL_S)
        job.read()
        traffic.append((time.monotonic(), hosts.sent_bytes() - before_bytes))
        if not failure and job.last_step() < num_steps:
            failure = f"ended after {job.last_step()} of {num_steps} steps"
        if failure:
            print(f"{system.name}: {failure}\n{job.log_tail()}", file=sys.stderr)
        return Watched(dict(job.steps), tuple(traffic), killed_s, load, failure)
    finally:
        job.close()


def judge(system: System, watched: Watched, losses: Sequence[Point], *, num_steps: int) -> Run:
    """The figures of what was seen. `losses`: over the machine's time."""
    began_s = min(steps[0].at_s for steps in watched.steps.values())
    done_s = max(steps[-1].at_s for steps in watched.steps.values())
    killed_s = done_s if watched.killed_s is None else watched.killed_s
    survivors = [made(steps) for (node, _), steps in watched.steps.items() if node != NODES - 1]
    pairs = [pair for steps in survivors for pair in pairwise(steps)]
    ordinary = [two.at_s - one.at_s for one, two in pairs if two.at_s <= killed_s]
    after = [(one, two) for one, two in pairs if two.at_s > killed_s]
    return Run(
        system=system.name,
        num_steps=num_steps,
        done_s=done_s - began_s,
        killed_s=killed_s - began_s,
        ordinary_s=statistics.mean(ordinary) if ordinary else 0.0,
        standstill_s=max((two.at_s - one.at_s for one, two in after), default=0.0),
        round_s=round_of_all_s(watched.steps, until_s=killed_s),
        steps_lost=max((one.step - two.step + 1 for one, two in after), default=0),
        num_restarted=sum(len({step.pid for step in steps}) > 1 for steps in survivors),
        num_survivors=len(survivors),
        sent_bytes=watched.traffic[-1][1],
        load=watched.load,
        losses=tuple((at_s - began_s, loss) for at_s, loss in with_resumption(losses, watched)),
        traffic=tuple((at_s - began_s, sent) for at_s, sent in watched.traffic if at_s >= began_s),
        failure=watched.failure,
    )


def round_of_all_s(steps: Mapping[Place, Sequence[Step]], *, until_s: float) -> float | None:
    """The median over the rounds that all ranks made together."""
    found: defaultdict[int, list[Step]] = defaultdict(list)
    for place in steps:
        for step in made(steps[place]):
            if step.step % GLOBAL_STEPS == 0 and step.arrived_s is not None and step.at_s <= until_s:
                found[step.step].append(step)
    spans_s = [
        max(step.at_s for step in together) - max(step.arrived_s or 0.0 for step in together)
        for together in found.values()
        if len(together) == len(steps)
    ]
    return statistics.median(spans_s) if spans_s else None


def with_resumption(losses: Sequence[Point], watched: Watched) -> list[Point]:
    """Who starts anew has the model that was saved last until then: a line of the loss is level up to there."""
    starts_s = [step.at_s for steps in watched.steps.values() for step in steps if step.is_start]
    resumed_s = [at_s for at_s in starts_s if watched.killed_s is not None and at_s > watched.killed_s]
    if not resumed_s:
        return list(losses)
    before = max(point for point in losses if point[0] < min(resumed_s))
    return sorted([*losses, (min(resumed_s), before[1])])


def made(steps: Sequence[Step]) -> list[Step]:
    """The steps of one place, whichever process made them, in the order of their time."""
    return sorted((step for step in steps if not step.is_start), key=lambda step: step.at_s)
