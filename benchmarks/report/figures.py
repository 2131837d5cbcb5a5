"""The figures that tables are made of: records of the documents, found by name, with their medians. Pure.

The names are those that the scripts write; a test compares them. A figure that is missing is `IncompleteError`.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from report.documents import Document, IncompleteError, rows

T = TypeVar("T")

Documents = Mapping[str, Document]


def whole(documents: Documents, benchmark: str) -> Document:
    """The document of a benchmark, if it stands for anything."""
    if benchmark not in documents:
        raise IncompleteError(f"there is no {benchmark}.json")
    document = documents[benchmark]
    if document.frame.is_quick:
        raise IncompleteError(f"{benchmark}.json is of a run with --quick")
    return document


def chosen(found: Iterable[T], is_it: Callable[[T], bool], *, what: str, benchmark: str) -> list[T]:
    """Those that are asked for: at least one."""
    some = [each for each in found if is_it(each)]
    if not some:
        raise IncompleteError(f"{benchmark}.json has nothing about {what}")
    return some


@dataclass(frozen=True, slots=True)
class Figure:
    """A median, less being better. `value` None: there is none, and `failure` says why.

    `num_failed`: of `num_runs`, those that came to nothing.
    """

    value: float | None
    failure: str
    num_failed: int
    num_runs: int
    load: float


def median_figure(values: Sequence[float | None], failures: Sequence[str], loads: Sequence[float]) -> Figure:
    reached = [value for value in values if value is not None]
    return Figure(
        value=statistics.median(reached) if reached else None,
        failure=next((each for each in failures if each), ""),
        num_failed=sum(bool(each) for each in failures),
        num_runs=len(values),
        load=statistics.median(loads),
    )


# --- plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanRow:
    num_nodes: int
    num_ranks: int
    fit_s: float
    fit_min_s: float
    change_s: float
    json_s: float
    peak_bytes: int


# --- averaging ------------------------------------------------------------------------------------------------

TORCH, FLAT, TENSORS, TORCHFT = "torch averager", "flat all-reduce", "per tensor", "torchft LocalSGD"
HOST, NETWORK, NODES, COMPAT = "ours, same host", "ours, process group", "ours, 2 x 2", "ours, compat"
MODELS = {"1M": "1 M", "10M": "10 M", "resnet50": "ResNet-50, 26 M", "50M": "50 M", "gpt2": "GPT-2, 124 M"}
RANKS = (2, 4)


@dataclass(frozen=True, slots=True)
class RoundRow:
    """Medians in milliseconds. `limit_ms`: what the memory allows."""

    model: str
    num_ranks: int
    num_tensors: int
    load: float
    limit_ms: float
    ms: dict[str, float]

    @property
    def raw_ms(self) -> float:
        """The better one of the two raw all-reduces."""
        return min(self.of(FLAT), self.of(TENSORS))

    def of(self, name: str) -> float:
        if name not in self.ms:
            raise IncompleteError(f"averaging.json has no {name} for {self.model} with {self.num_ranks} ranks")
        return self.ms[name]


@dataclass(frozen=True, slots=True)
class Costs:
    header_us: dict[str, float]
    step_us: float
    memory: dict[str, float]


def round_row(document: Document, model: str, *, num_ranks: int) -> RoundRow:
    found = rows(document, "rows", RoundRow)
    what = f"{model} with {num_ranks} ranks"
    return chosen(
        found,
        lambda row: (row.model, row.num_ranks) == (model, num_ranks),
        what=what,
        benchmark="averaging",
    )[0]


# --- recovery -------------------------------------------------------------------------------------------------

RUN, RUN_ETCD = "hieravg run", "hieravg run, etcd3"
TORCHFT_TUNED, TORCHFT_DEFAULTS = "torchft, tuned", "torchft, defaults"
TORCHRUN_TUNED, TORCHRUN_DEFAULTS = "torchrun, tuned", "torchrun, defaults, fresh stores"
SYSTEMS = (RUN, RUN_ETCD, TORCHFT_TUNED, TORCHFT_DEFAULTS, TORCHRUN_TUNED, TORCHRUN_DEFAULTS)
# As the scripts call the events, and as people do.
EVENTS = {
    "worker killed": "worker killed",
    "node killed": "node killed",
    "node frozen": "node frozen",
    "Python hang of a worker": "a worker hangs in Python",
    "node joins": "node joins",
    "coordinator or store host killed": "coordinator killed",
}


@dataclass(frozen=True, slots=True)
class Gap:
    event: str
    system: str
    load: float
    gap_s: float | None
    steps_lost: int
    num_restarted: int
    num_survivors: int
    failure: str


@dataclass(frozen=True, slots=True)
class Rest:
    call_us: float
    core_shares: tuple[float, ...]


def gaps(document: Document, event: str, system: str) -> list[Gap]:
    return chosen(
        rows(document, "events", Gap),
        lambda gap: (gap.event, gap.system) == (event, system),
        what=f"{system}, {event}",
        benchmark="recovery",
    )


def gap_figure(found: Sequence[Gap]) -> Figure:
    return median_figure(
        [gap.gap_s for gap in found], [gap.failure for gap in found], [gap.load for gap in found]
    )


def restarts(found: Sequence[Gap]) -> str:
    """How many of the survivors were other processes afterwards, in words; nothing if none were."""
    reached = [gap for gap in found if gap.gap_s is not None]
    if not any(gap.num_restarted for gap in reached):
        return ""
    if all(gap.num_restarted == gap.num_survivors for gap in reached):
        return "all restart"
    most = max(reached, key=lambda gap: gap.num_restarted)
    return f"{most.num_restarted} of {most.num_survivors} restart"


# --- rendezvous -----------------------------------------------------------------------------------------------

ETCD3, C10D_DEFAULTS, C10D_TUNED = "etcd3, defaults", "c10d, defaults, fresh stores", "c10d, tuned to 3 beats"
SETTINGS = (ETCD3, C10D_DEFAULTS, C10D_TUNED)
TORCHRUN_EVENTS = {
    "worker killed": "worker killed",
    "node killed": "node killed",
    "rank 0's node killed": "rank 0's node killed, which hosts c10d's store",
    "node added": "node added",
}


@dataclass(frozen=True, slots=True)
class Formed:
    event: str
    setting: str
    load: float
    step_s: float | None
    failure: str


@dataclass(frozen=True, slots=True)
class Loss:
    total_s: float


@dataclass(frozen=True, slots=True)
class Join:
    num_agents: int
    join_s: float
    loss: Loss


@dataclass(frozen=True, slots=True)
class Loaded:
    num_agents: int
    num_busy: int
    span_s: float
    num_dropped: int
    load: float
    kills: tuple[Loss, ...]


def formed(document: Document, event: str, setting: str) -> list[Formed]:
    return chosen(
        rows(document, "torchrun", Formed),
        lambda row: (row.event, row.setting) == (event, setting),
        what=f"{setting}, {event}",
        benchmark="rendezvous",
    )


def formed_figure(found: Sequence[Formed]) -> Figure:
    return median_figure(
        [row.step_s for row in found], [row.failure for row in found], [row.load for row in found]
    )


# --- training -------------------------------------------------------------------------------------------------

DDP, AVERAGER, OURS = "DDP, torchrun", "torch's averager, torchrun", "elastic_hieravg"
WAYS = (DDP, AVERAGER, OURS)


@dataclass(frozen=True, slots=True)
class Training:
    """`round_s`: of a round of all ranks; None where there are none."""

    system: str
    done_s: float
    ordinary_s: float
    standstill_s: float
    round_s: float | None
    steps_lost: int
    num_restarted: int
    num_survivors: int
    sent_bytes: float
    load: float
    losses: tuple[tuple[float, float], ...]
    failure: str

    @property
    def last_loss(self) -> float:
        return self.losses[-1][1]

    def reached_s(self, loss: float) -> float | None:
        """When the loss was so low for the first time."""
        return next((at_s for at_s, found in self.losses if found <= loss), None)


def trainings(document: Document) -> tuple[Training, ...]:
    """Of all three ways, in this order."""
    found = rows(document, "runs", Training)
    return tuple(
        chosen(found, lambda run, way=way: run.system == way, what=way, benchmark="training")[0]  # type: ignore[misc]
        for way in WAYS
    )


def shared_loss(runs: Sequence[Training]) -> float:
    """The lowest loss that all of them reached."""
    return max(min(loss for _, loss in run.losses) for run in runs)
