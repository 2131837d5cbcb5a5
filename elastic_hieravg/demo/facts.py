"""What the demo found out: facts from its workers' own lines, and which promises they break. Pure.

A survivor is a worker whose own node nothing was done to. Invariant: nothing is excused here that a fault does
not explain: a frozen node may miss steps once, a killed one starts anew once, and no other.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic_hieravg.demo.record import Step, Worker

# The loss is told as the mean over so many steps of the job, all workers together.
LOSS_STEPS = 16
EXIT_DONE, EXIT_LEFT = 0, 143


class Kind(StrEnum):
    KILLED = "killed"
    FROZEN = "frozen"
    JOINED = "joined"
    LEFT = "asked to leave"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to a node. `without_s`: when the others had averaged without it.

    `back_s`: when it was started again or thawed. `healed_s`: when all who should be there had averaged.
    """

    kind: Kind
    node: str
    at_s: float
    healed_s: float
    without_s: float | None = None
    back_s: float | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """The longest time between two steps of a survivor, and what went on then, if anything."""

    seconds: float = 0.0
    during: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """`num_lost_steps`, `num_restarts`: of survivors. `num_steps_gone`: made by a killed or frozen node after
    its last round. `num_steps_left`: the same of one that was asked to leave.
    """

    faults: tuple[Fault, ...]
    num_steps: int
    num_lost_steps: int
    num_restarts: int
    num_steps_gone: int
    num_steps_left: int
    num_rounds: int
    differing: str
    gap: Gap
    goodput_ratio: float
    loss_start: float
    loss_end: float
    exits: Mapping[str, int]
    took_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended. `since_s`: from when on all first nodes trained together. `starts`: how often each
    node was started by the demo. `slots`: workers of a node. Times are of one clock.
    """

    workers: tuple[Worker, ...]
    faults: tuple[Fault, ...]
    starts: Mapping[str, int]
    exits: Mapping[str, int]
    slots: int
    began_s: float
    since_s: float
    ended_s: float


def find_facts(run: Run) -> Facts:
    losses = loss_points(run.workers)
    gone = dict.fromkeys(Kind, 0)
    for fault in run.faults:
        counts = [len(_unshared(worker, fault)) for worker in _hurt(run, fault)]
        gone[fault.kind] += max(counts, default=0)
    return Facts(
        faults=run.faults,
        num_steps=max((worker.steps[-1].step for worker in run.workers if worker.steps), default=0),
        num_lost_steps=sum(_lost_steps(worker, run.faults) for worker in run.workers),
        num_restarts=_num_restarts(run),
        num_steps_gone=gone[Kind.KILLED] + gone[Kind.FROZEN],
        num_steps_left=gone[Kind.LEFT],
        num_rounds=len({each.where for worker in run.workers for each in worker.rounds}),
        differing=_differing(run),
        gap=longest_gap(run.workers, run.faults),
        goodput_ratio=_goodput_ratio(run),
        loss_start=losses[0][2] if losses else 0.0,
        loss_end=losses[-1][2] if losses else 0.0,
        exits=run.exits,
        took_s=run.ended_s - run.began_s,
    )


def broken_promises(facts: Facts) -> tuple[str, ...]:
    """What did not hold, as sentences; none if all did."""
    left = {fault.node for fault in facts.faults if fault.kind is Kind.LEFT}
    wrong = {
        node: code for node, code in facts.exits.items() if code != (EXIT_LEFT if node in left else EXIT_DONE)
    }
    found = {
        f"survivors lost or repeated {facts.num_lost_steps} steps": facts.num_lost_steps > 0,
        f"{facts.num_restarts} workers of survivors started anew": facts.num_restarts > 0,
        f"replicas differ {facts.differing}": bool(facts.differing),
        f"{facts.num_steps_left} steps of the node that was asked to leave are in no average": (
            facts.num_steps_left > 0
        ),
        f"the loss did not fall: {facts.loss_start:.2f} to {facts.loss_end:.2f}": (
            facts.loss_end >= facts.loss_start
        ),
        f"agents ended with other exit codes than they should: {wrong}": bool(wrong),
    }
    return tuple(sentence for sentence, is_broken in found.items() if is_broken)


def summary(facts: Facts) -> tuple[str, ...]:
    """One fact a line, for people and for scripts."""
    gap = f"{facts.gap.seconds:.2f} s" + (f", {facts.gap.during}" if facts.gap.during else "")
    kinds = {fault.kind for fault in facts.faults}
    left = [f"steps lost by the node asked to leave: {facts.num_steps_left}"]
    gone = [f"steps lost with the killed and the frozen node: {facts.num_steps_gone}"]
    return (
        *map(fault_text, facts.faults),
        f"steps lost by survivors: {facts.num_lost_steps}",
        f"restarts of survivors: {facts.num_restarts}",
        f"replicas identical: {'no' if facts.differing else 'yes'}",
        f"global rounds compared: {facts.num_rounds}",
        *(left if Kind.LEFT in kinds else []),
        *(gone if kinds & {Kind.KILLED, Kind.FROZEN} else []),
        f"longest gap of a survivor: {gap}",
        f"goodput: {facts.goodput_ratio:.0%}",
        f"steps: {facts.num_steps}",
        f"loss at the start: {facts.loss_start:.2f}",
        f"loss at the end: {facts.loss_end:.2f}",
        f"seconds: {facts.took_s:.1f}",
    )


def fault_text(fault: Fault) -> str:
    told = [f"node {fault.kind}: {fault.node}"]
    if fault.without_s is not None:
        told.append(f"the others averaged without it after {fault.without_s - fault.at_s:.1f} s")
    match fault.kind:
        case Kind.KILLED | Kind.FROZEN:
            assert fault.back_s is not None
            again = "started again" if fault.kind is Kind.KILLED else "thawed"
            told.append(f"in again {fault.healed_s - fault.back_s:.1f} s after it was {again}")
        case Kind.JOINED:
            told.append(f"in {fault.healed_s - fault.at_s:.1f} s after its start")
    return ", ".join(told)


def loss_points(workers: Iterable[Worker]) -> list[tuple[float, int, float]]:
    """The mean loss of every few steps, over all workers: when the last of them was made, which, the mean."""
    found: defaultdict[int, list[Step]] = defaultdict(list)
    for worker in workers:
        for step in worker.steps:
            found[(step.step - 1) // LOSS_STEPS].append(step)
    points = []
    for _, steps in sorted(found.items()):
        last = max(steps, key=lambda step: step.at_s)
        points.append((last.at_s, last.step, sum(step.loss for step in steps) / len(steps)))
    return points


def survivor_pairs(worker: Worker, faults: Sequence[Fault]) -> Iterator[tuple[Step, Step]]:
    """Steps that follow each other, without those of a time in which the worker's own node was frozen."""
    own = [fault for fault in faults if fault.node == worker.node and fault.kind is Kind.FROZEN]
    for before, after in itertools.pairwise(worker.steps):
        if not any(after.at_s > fault.at_s and before.at_s < fault.healed_s for fault in own):
            yield before, after


def longest_gap(workers: Iterable[Worker], faults: Sequence[Fault], *, since_s: float = 0.0) -> Gap:
    """Of steps that ended after a time."""
    pairs = (pair for worker in workers for pair in survivor_pairs(worker, faults) if pair[1].at_s > since_s)
    longest = max(pairs, key=lambda pair: pair[1].at_s - pair[0].at_s, default=None)
    if longest is None:
        return Gap()
    before, after = longest
    during = [fault for fault in faults if fault.at_s <= after.at_s and before.at_s <= fault.healed_s]
    told = f"when {during[-1].node} {_PAST[during[-1].kind]}" if during else ""
    return Gap(after.at_s - before.at_s, told)


_PAST = {
    Kind.KILLED: "was killed",
    Kind.FROZEN: "was frozen",
    Kind.JOINED: "joined",
    Kind.LEFT: "was asked to leave",
}


def _lost_steps(worker: Worker, faults: Sequence[Fault]) -> int:
    """Steps that are missing in a worker's row, or are there twice."""
    excused = [fault for fault in faults if fault.node == worker.node and fault.kind is Kind.FROZEN]
    lost = 0
    for before, after in itertools.pairwise(worker.steps):
        wrong = abs(after.step - before.step - 1)
        fault = next((fault for fault in excused if after.at_s > fault.at_s), None)
        if wrong and fault is not None:
            # It was out, and goes on at the others' step; once.
            excused.remove(fault)
            wrong = 0
        lost += wrong
    return lost


def _num_restarts(run: Run) -> int:
    """Worker processes beyond those that the demo itself has started."""
    started: defaultdict[str, int] = defaultdict(int)
    for worker in run.workers:
        started[worker.node] += 1
    return sum(max(0, count - run.slots * run.starts.get(node, 0)) for node, count in started.items())


def _differing(run: Run) -> str:
    """Where replicas were not alike though they should have been; empty if nowhere."""
    digests: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for worker in run.workers:
        for each in worker.rounds:
            digests[each.where].add(each.digest)
    for (generation, step), found in sorted(digests.items()):
        if len(found) > 1:
            return f"after the round of step {step} in generation {generation}"
    present = [node for node, code in run.exits.items() if code == EXIT_DONE]
    ends = [worker.end_digest for worker in run.workers if worker.end_digest]
    if len(ends) != run.slots * len(present):
        return f"at the end: {len(ends)} workers of {run.slots * len(present)} told theirs"
    return "at the end" if len(set(ends)) > 1 else ""


def _hurt(run: Run, fault: Fault) -> list[Worker]:
    """The processes that something was done to: of the node, there at that time, and not killed before."""
    earlier = [
        each
        for each in run.faults
        if each.node == fault.node and each.kind is Kind.KILLED and each.at_s < fault.at_s
    ]
    started_s = max((each.at_s for each in earlier), default=0.0)
    return [
        worker
        for worker in run.workers
        if worker.node == fault.node and worker.steps and started_s < worker.steps[0].at_s <= fault.healed_s
    ]


def _unshared(worker: Worker, fault: Fault) -> list[Step]:
    """The steps that a worker made after its last round before it was hurt, and that nobody has a part of."""
    if fault.kind is Kind.JOINED:
        return []
    hurt_s = fault.healed_s if fault.kind is Kind.LEFT else fault.at_s
    if worker.steps[0].at_s > hurt_s:
        return []
    before = [each for each in worker.rounds if each.at_s <= hurt_s]
    after = [each for each in worker.rounds if each.at_s > hurt_s]
    last_step = before[-1].step if before else 0
    from_s = before[-1].at_s if before else 0.0
    until_s = after[0].at_s if after else math.inf
    return [step for step in worker.steps if step.step > last_step and from_s < step.at_s < until_s]


def _goodput_ratio(run: Run) -> float:
    """What part of the workers' time went into steps that count, since all were there.

    A node that is down counts as time without a step; one that joins counts from its first step on, and one
    that was asked to leave until it has left.
    """
    good_s = whole_s = 0.0
    for node in sorted({worker.node for worker in run.workers}):
        workers = [worker for worker in run.workers if worker.node == node]
        steps = [step for worker in workers for step in worker.steps if step.at_s > run.since_s]
        if not steps:
            continue
        of_node = [fault for fault in run.faults if fault.node == node]
        gone = [step for fault in of_node for worker in _hurt(run, fault) for step in _unshared(worker, fault)]
        gone_s = sum(step.busy_s for step in gone)
        until_s = next((fault.healed_s for fault in of_node if fault.kind is Kind.LEFT), run.ended_s)
        until_s = min(until_s, max(step.at_s for worker in run.workers for step in worker.steps))
        from_s = max(run.since_s, min(step.at_s - step.busy_s for step in steps))
        good_s += sum(step.busy_s for step in steps) - gone_s
        whole_s += run.slots * (until_s - from_s)
    return good_s / whole_s if whole_s > 0 else 0.0
