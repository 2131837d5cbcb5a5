"""The status document, read for people: what `/status` says as values, for the terminal.

The page does the same in its own language. Nothing here complains of a field: one that is missing, null or of
another type is None or empty, so that half a document is still shown. Invariant: no text read here holds a
control character, so none of them does anything to a terminal.
"""

import json
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_hieravg.errors import DocumentError, Problem
from elastic_hieravg.plan import natural_key
from elastic_hieravg.plan.topology import WELL_KNOWN_LABELS

VERSION = 1
TEXT_LENGTH_MAX = 2000
TRACE_POINTS_MAX = 60
# Beyond this a number means nothing to anybody, and the page does not have it exactly either.
NUMBER_MAX = 2.0**63

# Of these nothing that they told before is of now.
_AWAY = ("lost", "left")
# As people are told why a generation was made: a script's loss is another thing, often in the same picture.
_KINDS = {"loss": "lost"}
_OF_NOW = ("workers", "step_seconds", "steps_per_s", "goodput_ratio", "is_straggler", "age_s")
# C0 and C1, and what turns the direction of a line around.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")


@dataclass(frozen=True, slots=True)
class WorkerShown:
    local_rank: int | None
    rank: int | None
    process_id: int | None
    step: int | None
    state: str
    step_seconds: float | None
    restarts: int


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """`trace`: seconds of a step over the last two minutes, oldest first."""

    node_id: str
    state: str
    labels: Mapping[str, str]
    ranks: tuple[int, ...]
    reason: str
    since_s: float | None
    age_s: float | None
    goodput_ratio: float | None
    steps_per_s: float | None
    trace: tuple[float, ...]
    is_straggler: bool
    workers: tuple[WorkerShown, ...]

    @property
    def step_seconds(self) -> float | None:
        return self.trace[-1] if self.trace else None


@dataclass(frozen=True, slots=True)
class RoundShown:
    step: int | None
    seconds: float | None
    sent_bytes: float | None
    link: str
    outcome: str
    at_s: float | None


@dataclass(frozen=True, slots=True)
class LevelStatus:
    name: str
    period_steps: int | None
    num_groups: int
    groups: tuple[tuple[int, ...], ...]
    next_step: int | None
    last: RoundShown | None


@dataclass(frozen=True, slots=True)
class EventShown:
    at_s: float | None
    generation: int | None
    kind: str
    reason: str
    left: tuple[str, ...]
    came: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """`is_store_up` is None if it is not known. `notes` are sentences; `values` are sorted by their names."""

    run_id: str
    node_id: str
    now_s: float | None
    began_s: float | None
    backend: str
    generation: int | None
    kind: str
    reason: str
    hold: str
    at_s: float | None
    action: str
    because: str
    is_store_up: bool | None
    goodput_ratio: float | None
    step: int | None
    world_ranks: int | None
    nodes_min: int | None
    nodes_max: int | None
    hierarchy: str
    mode: str
    nodes: tuple[NodeStatus, ...]
    levels: tuple[LevelStatus, ...]
    notes: tuple[str, ...]
    events: tuple[EventShown, ...]
    values: tuple[tuple[str, float | None], ...]

    @property
    def training(self) -> tuple[NodeStatus, ...]:
        return tuple(node for node in self.nodes if node.state == "training")

    @property
    def usual_step_seconds(self) -> float | None:
        """Of a node in the middle."""
        found = [node.step_seconds for node in self.training if node.step_seconds is not None]
        return statistics.median_low(found) if found else None

    @property
    def steps_per_s(self) -> float | None:
        found = [node.steps_per_s for node in self.training if node.steps_per_s is not None]
        return statistics.median_low(found) if found else None

    def ago_s(self, at_s: float | None) -> float | None:
        """How long ago that was, by the agent's own clock."""
        return None if self.now_s is None or at_s is None else max(0.0, self.now_s - at_s)

    def places(self) -> tuple[str, ...]:
        """The labels that make the tree, widest first: the hierarchy's, and around them those everybody has."""
        present = {key for node in self.nodes for key, value in node.labels.items() if value}
        names = [part.partition("=")[0] for part in self.hierarchy.split(",")]
        asked = [name for name in reversed(names) if name in present]
        around = [key for key in WELL_KNOWN_LABELS if key in present and key not in asked]
        inner = [key for key in around if key == WELL_KNOWN_LABELS[-1]]
        return (*(key for key in around if key not in inner), *asked, *inner)


def read_document(text: str) -> dict[str, object]:
    """The document as it is, if it is one of a version that is known here."""
    hint = "give the address of a `hieravg run` agent of this version"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise DocumentError(Problem(f"the status document is not JSON: {exc}", hint)) from exc
    if not isinstance(found, dict) or found.get("version") != VERSION:
        version = found.get("version") if isinstance(found, dict) else None
        told = f"version {version!r}" if version is not None else "no version"
        raise DocumentError(
            Problem(f"the status document has {told}, and this command reads version {VERSION}", hint)
        )
    return found


def read_status(document: Mapping[str, object]) -> Status:
    """Whatever is there; nodes are in natural order."""
    generation, decision = _record(document.get("generation")), _record(document.get("decision"))
    is_store_up = document.get("is_store_up")
    nodes = [_read_node(_record(each)) for each in _list(document.get("nodes"))]
    notes = [_record(each) for each in _list(document.get("notes"))]
    values = {_text(name): _float(value) for name, value in _record(document.get("values")).items()}
    return Status(
        run_id=_text(document.get("run_id")),
        node_id=_text(document.get("node_id")),
        now_s=_float(document.get("now_s")),
        began_s=_float(document.get("began_s")),
        backend=_text(document.get("backend")),
        generation=_int(generation.get("number")),
        kind=_kind(generation.get("kind")),
        reason=_text(generation.get("reason")),
        hold=_text(generation.get("hold")),
        at_s=_float(generation.get("at_s")),
        action=_text(decision.get("action")),
        because=_text(decision.get("reason")),
        is_store_up=is_store_up if isinstance(is_store_up, bool) else None,
        goodput_ratio=_float(document.get("goodput_ratio")),
        step=_int(document.get("step")),
        world_ranks=_int(document.get("world_ranks")),
        nodes_min=_int(document.get("nodes_min")),
        nodes_max=_int(document.get("nodes_max")),
        hierarchy=_text(document.get("hierarchy")),
        mode=_text(document.get("mode")),
        nodes=tuple(sorted(nodes, key=lambda node: natural_key(node.node_id))),
        levels=tuple(_read_level(_record(each)) for each in _list(document.get("levels"))),
        notes=tuple(_text(note.get("reason")) or _text(note.get("level")) for note in notes),
        events=tuple(_read_event(_record(each)) for each in _list(document.get("events"))),
        values=tuple(sorted(values.items(), key=lambda item: natural_key(item[0]))),
    )


def _read_node(told: Mapping[str, object]) -> NodeStatus:
    is_away = told.get("state") in _AWAY
    node = {key: value for key, value in told.items() if not is_away or key not in _OF_NOW}
    labels = {_text(key): _text(value) for key, value in _record(node.get("labels")).items()}
    trace = [_float(each) for each in _list(node.get("step_seconds"))]
    return NodeStatus(
        node_id=_text(node.get("node_id")) or "?",
        state=_text(node.get("state")) or "unknown",
        labels=labels,
        ranks=_ints(node.get("ranks")),
        reason=_text(node.get("reason")),
        since_s=_float(node.get("since_s")),
        age_s=_float(node.get("age_s")),
        goodput_ratio=_float(node.get("goodput_ratio")),
        steps_per_s=_float(node.get("steps_per_s")),
        trace=tuple(each for each in trace if each is not None)[-TRACE_POINTS_MAX:],
        is_straggler=node.get("is_straggler") is True,
        workers=tuple(_read_worker(_record(each)) for each in _list(node.get("workers"))),
    )


def _read_worker(worker: Mapping[str, object]) -> WorkerShown:
    return WorkerShown(
        local_rank=_int(worker.get("local_rank")),
        rank=_int(worker.get("rank")),
        process_id=_int(worker.get("process_id")),
        step=_int(worker.get("step")),
        state=_text(worker.get("state")) or "unknown",
        step_seconds=_float(worker.get("step_seconds")),
        restarts=_int(worker.get("restarts")) or 0,
    )


def _read_level(level: Mapping[str, object]) -> LevelStatus:
    groups = tuple(_ints(group) for group in _list(level.get("groups")))
    num_groups = _int(level.get("num_groups"))
    last = level.get("last")
    return LevelStatus(
        name=_text(level.get("name")) or "?",
        period_steps=_int(level.get("period_steps")),
        num_groups=len(groups) if num_groups is None else num_groups,
        groups=groups,
        next_step=_int(level.get("next_step")),
        last=_read_round(last) if isinstance(last, dict) else None,
    )


def _read_round(last: Mapping[str, object]) -> RoundShown:
    return RoundShown(
        step=_int(last.get("step")),
        seconds=_float(last.get("seconds")),
        sent_bytes=_float(last.get("sent_bytes")),
        link=_text(last.get("link")),
        outcome=_text(last.get("outcome")),
        at_s=_float(last.get("at_s")),
    )


def _read_event(event: Mapping[str, object]) -> EventShown:
    return EventShown(
        at_s=_float(event.get("at_s")),
        generation=_int(event.get("generation")),
        kind=_kind(event.get("kind")),
        reason=_text(event.get("reason")),
        left=tuple(_text(each) for each in _list(event.get("left"))),
        came=tuple(_text(each) for each in _list(event.get("came"))),
    )


def _kind(value: object) -> str:
    told = _text(value)
    return _KINDS.get(told, told)


def _float(value: object) -> float | None:
    # true and false are numbers to Python, and to nobody else.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -NUMBER_MAX < value < NUMBER_MAX and not math.isnan(value) else None


def _int(value: object) -> int | None:
    found = _float(value)
    return None if found is None else round(found)


def _ints(value: object) -> tuple[int, ...]:
    found = [_int(each) for each in _list(value)]
    return tuple(each for each in found if each is not None)


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return _CONTROL.sub(" ", str(value)[:TEXT_LENGTH_MAX])


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _record(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
