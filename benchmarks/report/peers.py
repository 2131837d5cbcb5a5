"""The one table of ratios: everything that was measured beside a peer, whoever comes out better. Pure.

Of every figure in it less is better. Invariant: a peer that did not go on has no ratio, and neither has ours.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from elastic_hieravg.errors import DocumentError
from report import figures
from report.documents import Document, IncompleteError
from report.figures import Documents, Figure, whole
from report.tables import failed_runs, told_machine
from report.words import paragraph, rough, seconds, size, span, table

BENCHMARKS = ("averaging", "recovery", "rendezvous", "training")
MODEL = "10M"
HEAD = ("measured", "ours", "beside", "theirs", "theirs / ours", "load")
TORCH, RAW = "torch's averager", "raw all-reduce, not atomic"
TORCHFT = "torchft's LocalSGD, its manager at no cost"
LAYOUTS = {
    figures.HOST: "one node of 4 ranks",
    figures.NETWORK: "4 nodes of a rank",
    figures.NODES: "2 nodes of 2 ranks",
}
RENDEZVOUS_PEERS = {figures.C10D_TUNED: "c10d, tuned", figures.C10D_DEFAULTS: "c10d"}
RECOVERY_PEERS = {
    figures.TORCHFT_TUNED: "torchft, tuned",
    figures.TORCHFT_DEFAULTS: "torchft",
    figures.TORCHRUN_TUNED: "torchrun, tuned",
    figures.TORCHRUN_DEFAULTS: "torchrun",
}


@dataclass(frozen=True, slots=True)
class Side:
    """One side's figure, and how it is written. `value` None: it did not go on."""

    value: float | None
    told: str
    load: float


@dataclass(frozen=True, slots=True)
class Comparison:
    what: str
    ours: Side
    peer: str
    theirs: Side

    @property
    def verdict(self) -> str:
        if self.ours.value is None:
            return "ours did not go on"
        if self.theirs.value is None:
            return "theirs did not go on"
        ratio = self.theirs.value / self.ours.value if self.ours.value else float("inf")
        if ratio < 0.995:
            return f"{ratio:.2f}, ours is worse"
        return rough(ratio)


def make_peers(documents: Documents) -> str:
    """The whole table with its caption. `IncompleteError` if any of it is missing."""
    used = [whole(documents, name) for name in BENCHMARKS]
    found = [make() for document in used for make in COMPARISONS[document.frame.benchmark](document)]
    machines = {one_machine(document) for document in used}
    if len(machines) > 1:
        raise IncompleteError(
            f"the figures are of different machines or versions: {'; '.join(sorted(machines))}"
        )
    return render(found, used)


def make_what_there_is(documents: Documents) -> tuple[str, list[str]]:
    """The table as far as there are figures, quick ones too, for the terminal; and what is missing, and why."""
    used = [documents[name] for name in BENCHMARKS if name in documents]
    missing = [f"there is no {name}.json" for name in BENCHMARKS if name not in documents]
    found: list[Comparison] = []
    for document in used:
        for make in COMPARISONS[document.frame.benchmark](document):
            try:
                found.append(make())
            except (IncompleteError, DocumentError) as exc:
                missing.append(str(exc))
    return (render(found, used) if found else ""), list(dict.fromkeys(missing))


def render(found: Sequence[Comparison], used: Sequence[Document]) -> str:
    """What is compared with several peers is written once."""
    body, before = [], ""
    for each in found:
        loads = span([each.ours.load, each.theirs.load])
        named = (each.what, each.ours.told) if each.what != before else ("", "")
        body.append((*named, each.peer, each.theirs.told, each.verdict, loads))
        before = each.what
    return f"{table(HEAD, body)}\n\n{caption(used)}"


def caption(used: Sequence[Document]) -> str:
    machines = sorted({one_machine(document) for document in used})
    loads = [load for each in used for load in (each.machine.load_start, each.machine.load_end)]
    return paragraph(
        "Less is better in every row, and above 1 in the last column but one ours is better. Standstill: the",
        "longest time between two steps of a worker whose node nothing was done to. Settings, numbers of runs",
        f"and all other figures stand with each benchmark's own table. One machine, {'; '.join(machines)};",
        f"load {span(loads)} before and after the benchmarks, that of a row with our own processes in it.",
    )


def one_machine(document: Document) -> str:
    machine = document.machine
    return f"{machine.processor}, {told_machine(machine, peers=['torchft', 'etcd'])}"


# --- what is compared: each by itself, because the figures of any may be missing ------------------------------


def compare_averaging(document: Document) -> Iterator[Callable[[], Comparison]]:
    peers = {
        figures.HOST: (TORCH, RAW),
        figures.NETWORK: (TORCH, RAW, TORCHFT),
        figures.NODES: (TORCH, RAW),
    }
    for name, several in peers.items():
        for peer in several:
            yield partial(compare_round, document, name, peer)


def compare_round(document: Document, name: str, peer: str) -> Comparison:
    row = figures.round_row(document, MODEL, num_ranks=4)
    values_ms = {
        TORCH: lambda: row.of(figures.TORCH),
        RAW: lambda: row.raw_ms,
        TORCHFT: lambda: row.of(figures.TORCHFT),
    }
    what = f"a round of {figures.MODELS[MODEL]} parameters, {LAYOUTS[name]}"
    ours_ms, theirs_ms = row.of(name), values_ms[peer]()
    ours, theirs = (Side(ms, f"{rough(ms)} ms", row.load) for ms in (ours_ms, theirs_ms))
    return Comparison(what, ours, peer, theirs)


def compare_recovery(document: Document) -> Iterator[Callable[[], Comparison]]:
    for event in figures.EVENTS:
        for system in RECOVERY_PEERS:
            yield partial(compare_gap, document, event, system)


def compare_gap(document: Document, event: str, system: str) -> Comparison:
    sides = []
    for name in (figures.RUN, system):
        found = figures.gaps(document, event, name)
        sides.append(side_of(figures.gap_figure(found), seconds, figures.restarts(found)))
    return Comparison(f"standstill, {figures.EVENTS[event]}", sides[0], RECOVERY_PEERS[system], sides[1])


def compare_rendezvous(document: Document) -> Iterator[Callable[[], Comparison]]:
    for event in figures.TORCHRUN_EVENTS:
        for setting in RENDEZVOUS_PEERS:
            yield partial(compare_formed, document, event, setting)


def compare_formed(document: Document, event: str, setting: str) -> Comparison:
    medians = [
        figures.formed_figure(figures.formed(document, event, each)) for each in (figures.ETCD3, setting)
    ]
    ours, theirs = (side_of(each, lambda value: f"{value:.1f}") for each in medians)
    what = f"stock torchrun on etcd3, {event}: to the next step"
    return Comparison(what, ours, RENDEZVOUS_PEERS[setting], theirs)


def side_of(figure: Figure, shown: Callable[[float], str], more: str = "") -> Side:
    if figure.value is None:
        return Side(None, figure.failure, figure.load)
    told = ", ".join(part for part in (f"{shown(figure.value)} s", more, failed_runs(figure)) if part)
    return Side(figure.value, told, figure.load)


def compare_training(document: Document) -> Iterator[Callable[[], Comparison]]:
    for measure in MEASURES:
        for way in figures.WAYS[:-1]:
            # DDP averages in every step: it has no rounds to compare.
            if not (measure.is_of_rounds and way == figures.DDP):
                yield partial(compare_way, document, measure, way)


def compare_way(document: Document, measure: "Measure", way: str) -> Comparison:
    runs = figures.trainings(document)
    loss = figures.shared_loss(runs)
    ours, theirs = (
        training_side(run, measure.value(run, loss), measure.shown)
        for run in (runs[-1], runs[figures.WAYS.index(way)])
    )
    return Comparison(measure.what.format(loss=loss), ours, way, theirs)


def training_side(run: figures.Training, value: float | None, shown: Callable[[float], str]) -> Side:
    told = [*([shown(value)] if value is not None else []), *([run.failure] if run.failure else [])]
    return Side(value, ", ".join(told) or "none", run.load)


@dataclass(frozen=True, slots=True)
class Measure:
    """`value`: of a run and the loss that all runs reached."""

    what: str
    value: Callable[[figures.Training, float], float | None]
    shown: Callable[[float], str]
    is_of_rounds: bool = False


MEASURES = (
    Measure(
        "4 hosts, slow links, one lost: to a loss of {loss:.2f}",
        lambda run, loss: run.reached_s(loss),
        lambda value: f"{value:.0f} s",
    ),
    Measure("the same: loss after all steps", lambda run, _: run.last_loss, lambda value: f"{value:.2f}"),
    Measure("the same: bytes between hosts", lambda run, _: run.sent_bytes, size),
    Measure(
        "the same: standstill after the kill", lambda run, _: run.standstill_s, lambda value: f"{value:.1f} s"
    ),
    Measure(
        "the same: a round of all ranks",
        lambda run, _: run.round_s,
        lambda value: f"{value:.2g} s",
        is_of_rounds=True,
    ),
)
COMPARISONS: dict[str, Callable[[Document], Iterator[Callable[[], Comparison]]]] = {
    "averaging": compare_averaging,
    "recovery": compare_recovery,
    "rendezvous": compare_rendezvous,
    "training": compare_training,
}
