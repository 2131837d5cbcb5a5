"""What in a job needs somebody's attention: which node, which level, which link.

Decided from one status document alone, without the past: everybody who looks sees the same. The page has the
same rules in its own language, and a test holds the two together. Invariant: a finding names what it is about.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from elastic_hieravg.metrics.status_reading import LevelStatus, NodeStatus, Status
from elastic_hieravg.plan.text import bytes_text

# What a node tells about itself is older than this only if something is in the way.
STALE_S = 15.0
# A level's round is late after so many times its period, and never before so many seconds.
LATE_TIMES = 5
LATE_S = 10.0
# Rounds that take more of the time than this deserve another period, or another link.
COST_RATIO_MAX = 0.3

LINKS = {
    "shm": "shared memory",
    "intra_node": "inside the node",
    "inter_node": "between nodes",
    "inter_zone": "between zones",
}


class Severity(StrEnum):
    BAD = "bad"  # somebody or something is missing
    WARN = "warn"  # it works, and not as well as it could


@dataclass(frozen=True, slots=True)
class Finding:
    """`word` says its kind: held, store, nodes, lost, worker, round, late, cost, slow, stale."""

    severity: Severity
    word: str
    text: str


def attention(status: Status) -> list[Finding]:
    """Everything that needs attention: what is missing first, then levels, then what is slow."""
    return [
        *_of_job(status),
        *(finding for node in status.nodes for finding in _missing(status, node)),
        *(finding for level in status.levels for finding in _of_level(status, level)),
        *(finding for node in status.nodes for finding in _slow(status, node)),
    ]


def cost_ratio(status: Status, level: LevelStatus) -> float | None:
    """The part of the time that the level's last round takes, of its period's steps and the round."""
    step_seconds, last = status.usual_step_seconds, level.last
    if last is None or last.seconds is None or step_seconds is None or not level.period_steps:
        return None
    all_seconds = step_seconds * level.period_steps + last.seconds
    return last.seconds / all_seconds if all_seconds > 0 else None


def link_text(link: str) -> str:
    """
    >>> link_text("inter_zone")
    'between zones'
    """
    return LINKS.get(link, link)


def seconds_text(seconds: float | None) -> str:
    """
    >>> seconds_text(0.0201), seconds_text(1.5), seconds_text(125.0)
    ('20.1 ms', '1.5 s', '2 min 5 s')
    """
    if seconds is None:
        return ""
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else span_text(seconds)


def span_text(seconds: float | None) -> str:
    """A length of time in its two largest units.

    >>> span_text(12.9), span_text(3725.0), span_text(90000.0)
    ('12 s', '1 h 2 min', '1 d 1 h')
    """
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _of_job(status: Status) -> Iterator[Finding]:
    if status.hold:
        yield Finding(Severity.BAD, "held", f"The job is held: {status.hold}")
    if status.is_store_up is False:
        text = f"The store ({status.backend}) does not answer: training goes on, membership is frozen"
        yield Finding(Severity.BAD, "store", text)
    num_nodes = len(status.training)
    if not status.hold and status.nodes_min is not None and num_nodes < status.nodes_min:
        text = f"{num_nodes} of at least {status.nodes_min} nodes are in the job"
        yield Finding(Severity.BAD, "nodes", text)


def _missing(status: Status, node: NodeStatus) -> Iterator[Finding]:
    name = f"{node.node_id}{_place(status, node)}"
    if node.state == "lost":
        gone_s = status.ago_s(node.since_s)
        lasting = "" if gone_s is None else f" for {span_text(gone_s)}"
        reason = f": {node.reason}" if node.reason else ""
        yield Finding(Severity.BAD, "lost", f"Node {name} is lost{lasting}{reason}")
        return
    for worker in node.workers:
        if worker.state == "gone":
            local_rank = "?" if worker.local_rank is None else worker.local_rank
            yield Finding(Severity.BAD, "worker", f"Worker {local_rank} of node {name} is gone")


def _of_level(status: Status, level: LevelStatus) -> Iterator[Finding]:
    last = level.last
    if last is None:
        return
    ago_s, step_seconds = status.ago_s(last.at_s), status.usual_step_seconds
    if last.outcome and last.outcome != "committed":
        step = "?" if last.step is None else last.step
        text = f"the round at step {step} {last.outcome}, {span_text(ago_s)} ago, {link_text(last.link)}"
        yield Finding(Severity.WARN, "round", f"Level {level.name}: {text}")
    period_s = step_seconds * level.period_steps if step_seconds is not None and level.period_steps else None
    if not status.hold and ago_s is not None and period_s is not None and _is_busy(status):
        bound_s = max(LATE_S, LATE_TIMES * period_s)
        text = f"no round for {span_text(ago_s)}, about every {seconds_text(period_s)} is usual"
        if ago_s > bound_s:
            yield Finding(Severity.BAD, "late", f"Level {level.name}: {text}")
    ratio = cost_ratio(status, level)
    if ratio is not None and ratio > COST_RATIO_MAX:
        what = f"{seconds_text(last.seconds)} for {bytes_text(last.sent_bytes or 0)}, {link_text(last.link)}"
        share = f"{round(ratio * 100)} %"
        text = f"Level {level.name} takes {share} of the time: {what}, every {level.period_steps} steps"
        yield Finding(Severity.WARN, "cost", text)


def _is_busy(status: Status) -> bool:
    return any(
        worker.state not in ("quiet", "starting", "done") for node in status.training for worker in node.workers
    )


def _slow(status: Status, node: NodeStatus) -> Iterator[Finding]:
    name = f"Node {node.node_id}{_place(status, node)}"
    if node.is_straggler:
        own, usual = seconds_text(node.step_seconds), seconds_text(status.usual_step_seconds)
        text = f"{name} is slow: {own or '?'} a step, {usual or '?'} is usual"
        yield Finding(Severity.WARN, "slow", text)
    if node.state == "training" and node.age_s is not None and node.age_s > STALE_S:
        yield Finding(Severity.WARN, "stale", f"{name}: what it tells is {span_text(node.age_s)} old")


def _place(status: Status, node: NodeStatus) -> str:
    found = [f"{key} {node.labels[key]}" for key in status.places() if node.labels.get(key)]
    return f" ({', '.join(found)})" if found else ""
