"""The status of a whole job as one document, made of what an agent has seen and what the others tell it.

A node tells a summary of itself, a few KB; whoever is asked puts all of them together. Fields are added to the
document and never renamed. Invariant: it is JSON without NaN, and bounded in every list.
"""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_hieravg.membership.records import Job
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.board import Board, Seen
from elastic_hieravg.metrics.pace import Pace, of_late
from elastic_hieravg.metrics.samples import LastRound, Samples
from elastic_hieravg.plan import Plan

VERSION = 1
GROUPS_MAX = 256
WORKERS_MAX = 256
VALUES_MAX = 50
# A node is a straggler if its steps take so many times the median.
STRAGGLER_TIMES = 1.3
JOINING = "joining"
# Of a worker that is not there: it has not spoken since it was started, its loop has ended, or it is missed.
STARTING, DONE, GONE = "starting", "done", "gone"

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker's place. `samples` are None before its first report; `process_id` is 0 if nobody is there.

    `absence`: what it is called while nobody is.
    """

    local_rank: int
    process_id: int = 0
    samples: Samples | None = None
    restarts: int = 0
    step_seconds: float | None = None
    absence: str = GONE


@dataclass(frozen=True, slots=True)
class JobSeen:
    """What one agent knows of its job beside what the board has. Times are seconds since the epoch."""

    run_id: str
    node_id: str
    backend: str
    job: Job
    began_s: float
    action: str = ""
    reason: str = ""
    is_store_up: bool = True
    plan: Plan | None = None
    summaries: Mapping[str, Document] = field(default_factory=dict)


def summary(
    now_s: float, *, workers: list[WorkerSeen], pace: Pace, goodput_ratio: float, metrics_port: int
) -> Document:
    """What a node tells the others about itself."""
    heard = [each.samples for each in workers if each.samples is not None]
    return {
        "at_s": round(now_s, 3),
        "metrics_port": metrics_port,
        "goodput_ratio": _short(goodput_ratio),
        "steps_per_s": _short(pace.steps_per_s),
        "step_seconds": list(pace.points),
        "step": max((samples.step for samples in heard), default=0),
        "workers": [_worker(each) for each in workers[:WORKERS_MAX]],
        "rounds": {level: _last(last) for level, last in sorted(_last_rounds(heard).items())},
        "values": _values(heard),
    }


def fitted(document: Document, *, bytes_max: int) -> str:
    """A summary as text, without its longest parts if it would be too long."""
    text = _json(document)
    for name in ("step_seconds", "workers", "values"):
        if len(text) > bytes_max:
            document = document | {
                name: document[name][-1:] if name == "step_seconds" else type(document[name])()
            }
            text = _json(document)
    return text


def read_summary(text: str) -> Document | None:
    """What another node told, if it has the form of it."""
    try:
        found = json.loads(text)
        is_one = isinstance(found, dict) and all(
            isinstance(found[name], kind)
            for name, kind in (("workers", list), ("rounds", dict), ("values", dict), ("step_seconds", list))
        )
        return found if is_one and isinstance(found["at_s"] + found["step"], int | float) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def status(now_s: float, *, seen: JobSeen, board: Board) -> Document:
    """The whole document."""
    generation, summaries = board.generation, seen.summaries
    # What a node told before it was lost is not of now.
    current = {node_id: told for node_id, told in summaries.items() if board.is_training(node_id)} or summaries
    step = max((each["step"] for each in current.values()), default=0)
    stragglers = _stragglers({node_id: each["step_seconds"] for node_id, each in current.items()})
    ranks = {} if seen.plan is None else {node.node_id: found for node, found in seen.plan.topology.placed()}
    nodes = [
        _node(
            now_s,
            node,
            ranks=list(ranks.get(node_id, ())) if board.is_training(node_id) else [],
            told=summaries.get(node_id) or {},
            is_straggler=node_id in stragglers,
        )
        for node_id, node in board.shown(now_s).items()
    ]
    return {
        "version": VERSION,
        "run_id": seen.run_id,
        "node_id": seen.node_id,
        "now_s": now_s,
        "began_s": seen.began_s,
        "backend": seen.backend,
        "generation": None
        if generation is None
        else {
            "number": generation.number,
            "kind": str(generation.kind),
            "reason": generation.reason,
            "hold": generation.hold,
            "at_s": board.generation_s,
        },
        "decision": {"action": seen.action, "reason": seen.reason},
        "is_store_up": seen.is_store_up,
        "goodput_ratio": _job_goodput(nodes),
        "step": step,
        "world_ranks": 0 if generation is None else sum(member.slots for member in generation.members),
        "nodes_min": seen.job.nodes_min,
        "nodes_max": seen.job.nodes_max,
        "hierarchy": str(seen.job.hierarchy),
        "mode": str(seen.job.mode),
        "nodes": nodes,
        "levels": [] if seen.plan is None else _levels(seen.plan, step, summaries),
        "notes": []
        if seen.plan is None
        else [{"kind": str(note.kind), "level": note.level, "reason": note.reason} for note in seen.plan.notes],
        "events": [
            {
                "at_s": event.at_s,
                "generation": event.generation,
                "kind": event.kind,
                "reason": event.reason,
                "left": list(event.left),
                "came": list(event.came),
            }
            for event in board.events
        ],
        "values": _job_values(current),
    }


def status_json(document: Document) -> bytes:
    return _json(document).encode()


def _node(now_s: float, seen: Seen, *, ranks: list[int], told: Document, is_straggler: bool) -> Document:
    return {
        "node_id": seen.node.node_id,
        "state": str(seen.state),
        "labels": dict(seen.node.labels),
        "slots": seen.node.slots,
        "ranks": ranks,
        "address": seen.address,
        "metrics_port": told.get("metrics_port", 0),
        "since_s": seen.since_s,
        "reason": seen.reason,
        "goodput_ratio": told.get("goodput_ratio"),
        "steps_per_s": told.get("steps_per_s"),
        "step_seconds": told.get("step_seconds", []),
        "is_straggler": is_straggler,
        "age_s": max(0.0, round(now_s - told["at_s"], 3)) if told else None,
        "workers": told.get("workers", []),
    }


def _worker(seen: WorkerSeen) -> Document:
    samples = seen.samples
    state = seen.absence if not seen.process_id else samples.state if samples else JOINING
    return {
        "local_rank": seen.local_rank,
        "rank": samples.rank if samples else None,
        "process_id": seen.process_id,
        "step": samples.step if samples else 0,
        "state": state,
        "step_seconds": _short(seen.step_seconds),
        "restarts": seen.restarts,
    }


def _last_rounds(heard: list[Samples]) -> dict[str, LastRound]:
    """The newest round of each level, with what all workers of the node sent in theirs.

    The parts of one model are spread over them, unevenly if another node of the group has fewer.
    """
    found: dict[str, LastRound] = {}
    for level in {level for samples in heard for level in samples.rounds}:
        told = [samples.rounds[level] for samples in heard if level in samples.rounds]
        newest = max(told, key=lambda last: last.at_s)
        found[level] = replace(newest, sent_bytes=sum(last.sent_bytes for last in told))
    return found


def _last(last: LastRound) -> Document:
    return {
        "step": last.step,
        "seconds": _short(last.seconds),
        # Not known before a worker has told that carries a part: nothing travels a network without bytes.
        "sent_bytes": last.sent_bytes if last.sent_bytes or last.link == names.Link.SHM else None,
        "link": last.link,
        "outcome": last.outcome,
        "at_s": round(last.at_s, 3),
    }


def _levels(plan: Plan, step: int, summaries: Mapping[str, Document]) -> list[Document]:
    found = []
    for level in plan.levels:
        told = [each["rounds"][level.name] for each in summaries.values() if level.name in each["rounds"]]
        found.append(
            {
                "name": level.name,
                "period_steps": level.period_steps,
                "num_groups": len(level.groups),
                "groups": [list(group) for group in level.groups[:GROUPS_MAX]],
                "next_step": plan.next_due_step(level, after_step=step),
                "last": max(told, key=lambda last: float(last["at_s"]), default=None),
            }
        )
    return found


def _stragglers(points: Mapping[str, list[float]]) -> set[str]:
    """The nodes whose steps take much longer than those of most."""
    means = {node_id: mean for node_id, each in points.items() if (mean := of_late(each)) is not None}
    if len(means) < 2:
        return set()
    median = statistics.median(means.values())
    return {node_id for node_id, mean in means.items() if mean > STRAGGLER_TIMES * median}


def _values(heard: list[Samples]) -> dict[str, float | None]:
    """What the scripts of a node report, the mean over its workers; None for what is no number."""
    found: dict[str, list[float]] = {}
    for samples in heard:
        for (name, labels), value in samples.gauges.items():
            if name == names.USER_VALUE:
                found.setdefault(labels[0], []).append(value)
    return {name: _short(statistics.fmean(found[name])) for name in sorted(found)[:VALUES_MAX]}


def _job_values(summaries: Mapping[str, Document]) -> dict[str, float | None]:
    found: dict[str, list[float | None]] = {}
    for told in summaries.values():
        for name, value in told["values"].items():
            found.setdefault(name, []).append(value)
    return {
        # One that is no number is not hidden by the others.
        name: None if None in found[name] else _short(statistics.fmean(each or 0.0 for each in found[name]))
        for name in sorted(found)[:VALUES_MAX]
    }


def _job_goodput(nodes: list[Document]) -> float | None:
    told = [each for each in nodes if each["goodput_ratio"] is not None]
    slots = sum(each["slots"] for each in told)
    return _short(sum(each["goodput_ratio"] * each["slots"] for each in told) / slots) if slots else None


def _short(value: float | None) -> float | None:
    """Few digits; None for what JSON has no number for."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _json(document: Document) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)
