"""A job of four nodes under one random fault after the other, for as long as is asked.

    python -m tests.soak.elastic --minutes 30 --seed 7 --store etcd

Every fault comes from the seed, which is printed. At the end the job is healed: then all replicas are alike,
nobody was restarted but by a fault of its own, no survivor lost or repeated a step, the loss fell, and nothing
is left behind. Exit code 1, and a line on stderr for each, if a rule was broken.
"""

# ruff: noqa: T201 - a program with a report

import argparse
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.elastic.jobs import RunningJob, send
from tests.membership.etcd_servers import EtcdCluster, etcd_cluster
from tests.soak.watch import Watch, Worker

NAMES = ("a", "b", "c", "d")
SLOTS = 2
LEASE_S = 3.0
HANG_TIMEOUT_S = 6.0
# How long a node may take to be in again after a fault, however busy the machine is.
HEAL_S = 150.0
POLL_S = 0.1
NUM_WINDOWS = 12
# The loss may wobble by so much from one window to the next, and falls all the same.
WOBBLE = 1.05
LEFT_CODE = 143
SHARED_MEMORY = Path("/dev/shm")
GAPS_SHOWN = 10
TAKEN_OUT = "took it out of the job"

WORKER, HUNG, STOPPED, NAN = "worker killed", "worker hung", "worker frozen", "NaN in one replica"
KILLED, TWO, LEFT = "node killed and restarted", "two nodes killed at once", "SIGTERM and replaced"
AGENT = "agent killed, its workers left to end"
SHORT, LONG = "node frozen, shorter than the lease", "node frozen, longer than the lease"
ETCD_KILLED, ETCD_FROZEN = "etcd killed and restarted", "etcd frozen"
KINDS = (WORKER, HUNG, STOPPED, NAN, KILLED, AGENT, TWO, LEFT, SHORT, LONG)
ETCD_KINDS = (ETCD_KILLED, ETCD_FROZEN)


class SoakError(Exception):
    """The job did not heal."""


@dataclass
class Nemesis:
    """Hurts the job: one fault at a time is chosen, several may be under way."""

    job: RunningJob
    watch: Watch
    random: random.Random
    kinds: tuple[str, ...]
    counts: Counter[str] = field(default_factory=Counter)
    told: list[tuple[float, str]] = field(default_factory=list)
    # For each node the time from which on it has to have a round to be in; infinite while it is hurt.
    since_s: dict[str, float] = field(default_factory=dict)
    is_etcd_away: bool = False
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def start(self, *names: str) -> None:
        for name in names:
            self.watch.expect_start(name)
            self.job.start(name)
            self.since_s[name] = time.monotonic()

    def healthy(self) -> list[str]:
        return [name for name, since_s in self.since_s.items() if self.watch.is_in(name, since_s=since_s)]

    def tick(self) -> None:
        """Do what is to be done by now, and look at what the job did."""
        now_s = time.monotonic()
        due = [act for at_s, act in self._later if at_s <= now_s]
        self._later = [(at_s, act) for at_s, act in self._later if at_s > now_s]
        for act in due:
            act()
        self.watch.read()
        for name, since_s in self.since_s.items():
            if now_s - since_s > HEAL_S and not self.watch.is_in(name, since_s=since_s):
                raise SoakError(f"{name} is not in {HEAL_S:.0f} s after it was hurt")

    def strike(self) -> None:
        """Let one fault happen, of a kind for which enough nodes are well; somebody always survives."""
        healthy = self.healthy()
        kinds = [kind for kind in self.kinds if self._targets(kind, healthy)]
        if self.is_etcd_away:
            kinds = [kind for kind in kinds if kind not in ETCD_KINDS]
        if not kinds:
            self.counts["none: too few nodes are well"] += 1
            return
        kind = self.random.choice(kinds)
        names = self.random.choice(self._targets(kind, healthy))
        self.counts[kind] += 1
        self.told.append((time.monotonic(), f"{kind}: {' '.join(names) or 'etcd'}"))
        print(f"{time.monotonic():.1f} s: {self.told[-1][1]}", file=sys.stderr)
        self._do(kind, names)

    def _targets(self, kind: str, healthy: list[str]) -> list[tuple[str, ...]]:
        if kind in ETCD_KINDS:
            return [()]
        num_lost = 2 if kind == TWO else 1
        # Among themselves they go on without the store's host if they are half, and more if they see no end.
        num_left_min = 2 if self.job.cluster is None and kind in (TWO, LONG) else 1
        if len(healthy) < num_lost + num_left_min:
            return []
        return list(itertools.combinations(healthy, num_lost))

    def _do(self, kind: str, names: tuple[str, ...]) -> None:
        for name in names:
            self.since_s[name] = time.monotonic()
        match kind:
            case "worker killed":
                self.watch.expect_start(names[0])
                self.job.kill_worker(names[0], self.random.randrange(SLOTS))
            case "worker frozen":
                # Its agent takes it for hung.
                worker = self.random.choice(self.watch.current(names[0]))
                self.watch.expect_start(names[0])
                send(worker.pid, signal.SIGSTOP)
            case "worker hung" | "NaN in one replica":
                self._order(names[0], "hang" if kind == HUNG else "nan")
            case "SIGTERM and replaced":
                self._leave(names[0])
            case "etcd killed and restarted" | "etcd frozen":
                self._take_etcd_away(kind)
            case "node frozen, shorter than the lease" | "node frozen, longer than the lease":
                self._freeze(names[0], is_long=kind == LONG)
            case _:
                self.job.kill_agent(names[0]) if kind == AGENT else self.job.kill(*names)
                for name in names:
                    self._after(self.random.uniform(0.0, 3.0), lambda name=name: self.start(name))  # type: ignore[misc]

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def _order(self, name: str, what: str) -> None:
        """The script does it at its next step, if it makes one; the watch knows the order by its line."""
        worker: Worker = self.random.choice(self.watch.current(name))
        if what == "hang":
            self.watch.expect_start(name)
        path = self.job.folder / "orders" / str(worker.pid)
        path.with_suffix(".new").write_text(what)
        path.with_suffix(".new").rename(path)

    def _freeze(self, name: str, *, is_long: bool) -> None:
        seconds = (
            self.random.uniform(LEASE_S + 2.0, LEASE_S + 8.0) if is_long else self.random.uniform(0.3, 1.3)
        )
        if is_long:
            self.watch.excuse_jump(name)
        self.since_s[name] = time.monotonic() + seconds
        self.job.freeze(name)
        self._after(seconds, lambda: self.job.thaw(name))

    def _leave(self, name: str) -> None:
        process = self.job.nodes[name].process
        process.send_signal(signal.SIGTERM)

        def follow() -> None:
            code = process.poll()
            if code is None:
                self._after(POLL_S, follow)
                return
            if code != LEFT_CODE:
                self.watch.broken.append(f"{time.monotonic():.1f} s: {name} left with exit {code}")
            self.start(name)

        follow()

    def _take_etcd_away(self, kind: str) -> None:
        cluster = self.job.cluster
        assert cluster is not None
        self.is_etcd_away = True
        for member in cluster.members:
            member.kill() if kind == ETCD_KILLED else member.send(signal.SIGSTOP)

        def give_back() -> None:
            for member in cluster.members:
                member.start() if kind == ETCD_KILLED else member.send(signal.SIGCONT)
            self.is_etcd_away = False

        seconds = self.random.uniform(2.0, 12.0)
        if kind == ETCD_FROZEN and seconds > LEASE_S - 1.0:
            # It comes back with everybody's lease expired: all are taken out, and none of them is new.
            for name in NAMES:
                self.watch.excuse_jump(name)
        self._after(seconds, give_back)

    @property
    def is_quiet(self) -> bool:
        return not self._later and len(self.healthy()) == len(NAMES)


def soak(nemesis: Nemesis, *, seconds: float, interval_s: float) -> tuple[float, int]:
    """All faults, then healed and ended. How long the job was under faults, and the steps it made then."""
    job = nemesis.job
    nemesis.start("a")
    await_until(nemesis, "the first node starts", lambda: bool(nemesis.watch.current("a")))
    nemesis.start(*NAMES[1:])
    await_until(nemesis, "all nodes are together", lambda: nemesis.is_quiet)
    begin_s, begin_step = time.monotonic(), nemesis.watch.newest_step()
    next_s = begin_s + interval_s
    while time.monotonic() < begin_s + seconds:
        time.sleep(POLL_S)
        nemesis.tick()
        if time.monotonic() >= next_s:
            next_s += interval_s
            nemesis.strike()
    took_s, num_steps = time.monotonic() - begin_s, nemesis.watch.newest_step() - begin_step
    await_until(nemesis, "the job is healed", lambda: nemesis.is_quiet)
    (job.folder / "stop").touch()
    await_until(nemesis, "all agents end", lambda: not any(node.is_alive for node in job.nodes.values()))
    codes = {name: node.process.wait() for name, node in job.nodes.items()}
    if set(codes.values()) != {0}:
        nemesis.watch.broken.append(f"agents ended with {codes}")
    nemesis.watch.read()
    return took_s, num_steps


def await_until(nemesis: Nemesis, what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 2 * HEAL_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SoakError(f"not within {2 * HEAL_S:.0f} s: {what}")
        time.sleep(POLL_S)
        nemesis.tick()


def end(job: RunningJob, *, broken: list[str]) -> None:
    """Nothing is left of the job; that it had to be ended, or that something stays, is told."""
    for pid in job.processes():
        send(pid, signal.SIGCONT)
    for node in job.nodes.values():
        if node.is_alive:
            node.process.kill()
            node.process.wait()
    deadline_s = time.monotonic() + HEAL_S
    while job.processes() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    left = job.processes()
    for pid in left:
        send(pid, signal.SIGKILL)
    broken += [f"process {pid} did not end with its agent" for pid in left]
    job.close()


def check_end(nemesis: Nemesis) -> list[str]:
    """The rules that can only be held against the whole run."""
    watch, found = nemesis.watch, list(nemesis.watch.broken)
    ends = [worker.end_digest for name in NAMES for worker in watch.current(name)]
    if len(ends) != SLOTS * len(NAMES) or len(set(ends)) != 1 or None in ends:
        found.append(f"replicas end differently: {ends}")
    windows = watch.windows()
    risen = [(one, two) for one, two in itertools.pairwise(windows) if two > one * WOBBLE]
    if risen or len(windows) < 2 or windows[-1] >= windows[0]:
        found.append(f"the loss does not keep falling: {[round(each, 4) for each in windows]}")
    return found


def report(nemesis: Nemesis, *, took_s: float, num_steps: int) -> None:
    watch = nemesis.watch
    ordinary_s = watch.ordinary_step_s()
    slots_s = SLOTS * len(NAMES) * took_s
    load = os.getloadavg()[0]
    print(f"\n## {took_s / 60:.1f} minutes, {len(NAMES)} nodes of {SLOTS}, load {load:.1f} at the end\n")
    print("| fault | times |\n|---|---|")
    for kind, count in sorted(nemesis.counts.items()):
        print(f"| {kind} | {count} |")
    print(
        f"\nThe job made {num_steps} steps of {ordinary_s * 1000:.1f} ms (median) and {watch.num_rounds} "
        f"global rounds. Goodput: {num_steps * ordinary_s / took_s:.1%} of the time went into the job's steps; "
        f"over all {SLOTS * len(NAMES)} places, those of nodes that were down too, "
        f"{watch.num_steps() * ordinary_s / slots_s:.1%}. "
        f"At the end: {dict(watch.totals)}."
    )
    windows = [f"{each:.4f}" for each in watch.windows()]
    print(f"\nLoss, mean of each window: {' '.join(windows)}")
    print("\nLongest gaps between two steps of a survivor, beyond what was done to itself:\n")
    for gap in sorted(watch.gaps, key=lambda gap: -gap.seconds)[:GAPS_SHOWN]:
        before = [(at_s, what) for at_s, what in nemesis.told if at_s < gap.at_s]
        at_s, what = before[-1] if before else (0.0, "nothing")
        print(f"- {gap.seconds:.2f} s, {gap.node} at step {gap.step}, {gap.at_s - at_s:.1f} s after: {what}")
    print(f"\n{len(watch.gaps)} gaps were longer than 0.5 s.")
    num_out = sum(nemesis.job.log(name).count(TAKEN_OUT) for name in NAMES)
    num_meant = nemesis.counts[LONG]
    print(
        f"Nodes were taken out while they lived {num_out} times; {num_meant} were frozen longer than the lease."
    )


@contextlib.contextmanager
def store_of(kind: str, folder: Path) -> Iterator[EtcdCluster | None]:
    if kind == "etcd":
        with etcd_cluster(folder / "servers") as cluster:
            yield cluster
    else:
        yield None


def shared_names() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--interval-s", type=float, default=10.0, help="between two faults")
    parser.add_argument("--seed", type=int, default=None, help="a random one if not given")
    parser.add_argument("--store", choices=("etcd", "embedded"), default="etcd")
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument(
        "--kinds", nargs="+", default=None, help="parts of the names of faults; all if not given"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="kept, with all logs; a temporary one if not given"
    )
    return parser.parse_args()


def main() -> int:
    flags = read_flags()
    seed = random.SystemRandom().randrange(1 << 31) if flags.seed is None else flags.seed
    print(f"seed {seed}, {flags.store}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    kinds = (*KINDS, *(ETCD_KINDS if flags.store == "etcd" else ()))
    if flags.kinds is not None:
        kinds = tuple(kind for kind in kinds if any(part in kind for part in flags.kinds))
    seconds = flags.minutes * 60
    shared_before = shared_names()
    with contextlib.ExitStack() as stack:
        folder = flags.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(store_of(flags.store, folder))
        job = RunningJob(
            folder / f"soak-{seed}",
            cluster=cluster,
            flags=[f"--lease-ttl-s={LEASE_S:.0f}", f"--hang-timeout-s={HANG_TIMEOUT_S:.0f}"],
            script=["--step-s", str(flags.step_s)],
        )
        window_steps = max(1, int(seconds / (flags.step_s * 1.2) / NUM_WINDOWS))
        watch = Watch(job.folder, slots=SLOTS, window_steps=window_steps)
        nemesis = Nemesis(job, watch, random.Random(seed), kinds)
        try:
            took_s, num_steps = soak(nemesis, seconds=seconds, interval_s=flags.interval_s)
        except SoakError as exc:
            print(f"{exc}\n{job._describe()}", file=sys.stderr)
            nemesis.watch.broken.append(str(exc))
            took_s, num_steps = seconds, watch.newest_step()
        finally:
            end(job, broken=watch.broken)
        report(nemesis, took_s=took_s, num_steps=num_steps)
        found = check_end(nemesis)
    left = [name for name in shared_names() - shared_before if f"soak-{seed}" in name]
    found += [f"/dev/shm/{name} is left" for name in left]
    for line in found:
        print(f"broken: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
