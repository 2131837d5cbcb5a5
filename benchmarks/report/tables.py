"""The README's tables of each benchmark by itself, as Markdown, each with the machine it was measured on.

Pure: documents in, text out. Every figure comes from them; what is only known to people stands in the README
around these parts.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from report import figures
from report.documents import Document, IncompleteError, Machine, rows, value
from report.figures import Documents, Figure, Gap, Training, whole
from report.words import (
    listed,
    paragraph,
    plural,
    rough,
    seconds,
    short_python,
    short_version,
    size,
    span,
    table,
)

FIT_SIZES = 3


def told_machine(machine: Machine, *, peers: Sequence[str] = ()) -> str:
    """Cores and versions; of `peers` those that are asked for."""
    found = {"torchft": machine.torchft, "etcd": machine.etcd}
    told = [f"{machine.cores} cores", f"Python {short_python(machine.python)}"]
    told.append(f"torch {short_version(machine.torch)}")
    told += [f"{name} {found[name]}" if found[name] else f"no {name}" for name in peers]
    return ", ".join(told)


# --- plan -----------------------------------------------------------------------------------------------------


def make_plan(documents: Documents) -> str:
    document = whole(documents, "plan")
    found = rows(document, "rows", figures.PlanRow)
    if len(found) < FIT_SIZES:
        raise IncompleteError(f"plan.json has {len(found)} sizes, not {FIT_SIZES}")
    machine = document.machine
    num_repeats = value(document, "num_repeats", int)
    growths = ["", *(f"{two.fit_min_s / one.fit_min_s:.1f} times the time" for one, two in pairwise(found))]
    head = [
        "nodes",
        "ranks",
        "fit",
        "10 times the nodes",
        "change after a loss",
        "JSON there and back",
        "memory",
    ]
    body = [
        (
            f"{row.num_nodes:,}",
            f"{row.num_ranks:,}",
            f"{row.fit_s * 1000:.0f} ms",
            growth,
            f"{row.change_s * 1000:.0f} ms",
            f"{row.json_s * 1000:.0f} ms",
            f"{row.peak_bytes / 1e6:.0f} MB",
        )
        for growth, row in zip(growths, found, strict=True)
    ]
    caption = paragraph(
        f"`benchmarks/plan.py`, `{value(document, 'hierarchy', str)}`, nodes of "
        f"{found[0].num_ranks // found[0].num_nodes} ranks; medians of {num_repeats}, growth of minimums, "
        f"garbage collection off; {machine.cores} cores, Python {short_python(machine.python)}, "
        f"load {span([machine.load_start, machine.load_end])}:"
    )
    return f"{caption}\n\n{table(head, body)}"


# --- averaging ------------------------------------------------------------------------------------------------


def make_averaging(documents: Documents) -> str:
    document = whole(documents, "averaging")
    pairs = [(num_ranks, model) for num_ranks in figures.RANKS for model in figures.MODELS]
    found = [figures.round_row(document, model, num_ranks=num_ranks) for num_ranks, model in pairs]
    head = ["ranks, float32 model", "torch's averager", "raw all-reduce", "ours, one node", "through `compat`"]
    head += ["ours, a node each", "2 nodes of 2", "load"]
    body = [averaging_cells(row, is_first=index == 0) for index, row in enumerate(found)]
    caption = paragraph(
        f"Medians in ms; {told_machine(document.machine)}, one thread per rank: `benchmarks/averaging.py`.",
        "The load counts the ranks themselves.",
    )
    return f"{caption}\n\n{table(head, body)}\n\n{averaging_costs(document, found)}"


def averaging_cells(row: figures.RoundRow, *, is_first: bool) -> list[str]:
    tensors, faster = (" tensors", " times faster") if is_first else ("", "")
    torch_ms = row.of(figures.TORCH)

    def gain(name: str, unit: str = "") -> str:
        return f"{rough(row.of(name))} ({torch_ms / row.of(name):.1f}{unit})"

    return [
        f"{row.num_ranks}, {figures.MODELS[row.model]} in {row.num_tensors}{tensors}",
        rough(torch_ms),
        rough(row.raw_ms),
        gain(figures.HOST, faster),
        rough(row.of(figures.COMPAT)),
        gain(figures.NETWORK),
        gain(figures.NODES) if row.num_ranks == 4 else "",
        f"{row.load:.1f}",
    ]


def averaging_costs(document: Document, found: Sequence[figures.RoundRow]) -> str:
    costs = value(document, "costs", figures.Costs)
    for name in ("one node", "a node each"):
        if name not in costs.memory:
            raise IncompleteError(f"averaging.json has no memory for {name}")
    large = [row.of(figures.HOST) / row.limit_ms for row in found if row.model != "1M"]
    raw = {
        num_ranks: span(row.of(figures.NETWORK) / row.raw_ms for row in found if row.num_ranks == num_ranks)
        for num_ranks in figures.RANKS
    }
    return paragraph(
        f"From 10 M on, a round inside one node takes {span(large)} times what reading and writing the memory",
        f"takes. Between nodes it takes {raw[2]} times a raw all-reduce with 2 ranks, {raw[4]} times with 4.",
        f"A step on which nothing is due costs {costs.step_us:.1f} microseconds, a",
        f"header {max(costs.header_us.values()) / 1000:.2f} ms. A round needs {costs.memory['one node']:.1f}",
        f"copies of the parameters more in one node of 4, {costs.memory['a node each']:.1f} with a node each.",
    )


# --- recovery -------------------------------------------------------------------------------------------------


def make_recovery(documents: Documents) -> str:
    document = whole(documents, "recovery")
    torchft = document.machine.torchft
    machine = told_machine(document.machine, peers=["torchft", "etcd"])
    found = {
        (event, system): figures.gaps(document, event, system)
        for event in figures.EVENTS
        for system in figures.SYSTEMS
    }
    head = ["event", "`hieravg run`", "with etcd", f"torchft {torchft}, tuned", "torchft", "torchrun, tuned"]
    head += ["torchrun"]
    body = [
        [name, *(gap_cell(found[event, system]) for system in figures.SYSTEMS)]
        for event, name in figures.EVENTS.items()
    ]
    every = [gap for some in found.values() for gap in some]
    counts = {system: max(len(found[event, system]) for event in figures.EVENTS) for system in figures.SYSTEMS}
    tuned, defaults = counts[figures.TORCHRUN_TUNED], counts[figures.TORCHRUN_DEFAULTS]
    ours = [gap for gap in every if gap.system in (figures.RUN, figures.RUN_ETCD)]
    theirs = [gap for gap in every if gap.system in (figures.TORCHRUN_TUNED, figures.TORCHRUN_DEFAULTS)]
    caption = paragraph(
        survivors_sentence(ours, theirs),
        f"3 nodes of 2 workers on one machine with {machine}, load",
        f"{span((gap.load for gap in every), digits=0)}, medians of {plural(counts[figures.RUN], 'run')}",
        f"for ours, {tuned} for tuned peers, {defaults} for their defaults: `benchmarks/recovery.py`.",
        rest_sentence(document),
    )
    return f"{table(head, body)}\n\n{caption}"


def gap_cell(found: Sequence[Gap]) -> str:
    figure = figures.gap_figure(found)
    if figure.value is None:
        return figure.failure.removesuffix(" s")
    parts = [seconds(figure.value), figures.restarts(found), failed_runs(figure)]
    return ", ".join(part for part in parts if part)


def failed_runs(figure: Figure) -> str:
    return f"{figure.failure} in {figure.num_failed} of {figure.num_runs}" if figure.num_failed else ""


def survivors_sentence(ours: Sequence[Gap], torchruns: Sequence[Gap]) -> str:
    lost, restarted = max(gap.steps_lost for gap in ours), max(gap.num_restarted for gap in ours)
    kept = "No survivor of ours lost a step or its process"
    if lost or restarted:
        kept = f"Of ours a survivor lost up to {plural(lost, 'step')}, and up to {restarted} lost their process"
    theirs = [gap.steps_lost for gap in torchruns if gap.num_restarted]
    if not theirs:
        return f"{kept}."
    steps = span(theirs, digits=0)
    return f"{kept}; torchrun's lost {steps} steps each, with a checkpoint at every global average."


def rest_sentence(document: Document) -> str:
    found = rows(document, "rest", figures.Rest)
    if not found:
        raise IncompleteError("recovery.json has nothing about agents at rest")
    calls = span((rest.call_us for rest in found), digits=0)
    shares = span(share * 100 for rest in found for share in rest.core_shares)
    return (
        f"An `averager.step()` with nothing due takes {calls} us in such a job, and an agent at rest "
        f"{shares} % of a core."
    )


# --- rendezvous -----------------------------------------------------------------------------------------------


def make_rendezvous(documents: Documents) -> str:
    document = whole(documents, "rendezvous")
    found = {
        (event, setting): figures.formed(document, event, setting)
        for event in figures.TORCHRUN_EVENTS
        for setting in figures.SETTINGS
    }
    medians = {key: figures.formed_figure(some) for key, some in found.items()}
    unit, body = " times as long", []
    for event, name in figures.TORCHRUN_EVENTS.items():
        ours = medians[event, figures.ETCD3]
        cells = [name, formed_cell(ours, ours=None)]
        for setting in figures.SETTINGS[1:]:
            cells.append(formed_cell(medians[event, setting], ours=ours, unit=unit))
            unit = ""
        body.append(cells)
    loads = [row.load for some in found.values() for row in some]
    counts = [max(len(found[event, each]) for event in figures.TORCHRUN_EVENTS) for each in figures.SETTINGS]
    caption = paragraph(
        "From the event to the next step, `benchmarks/rendezvous.py`, seconds, medians of "
        f"{plural(counts[0], 'run')} of etcd3, {counts[1]} of c10d, {counts[2]} of c10d tuned; "
        f"3 agents of 1 worker, gloo, {told_machine(document.machine, peers=['etcd'])}, load {span(loads)}:"
    )
    head = ["event", "`etcd3`, defaults", "`c10d`, defaults", "`c10d`, tuned"]
    return f"{caption}\n\n{table(head, body)}\n\n{agents_paragraph(document)}"


def formed_cell(figure: Figure, *, ours: Figure | None, unit: str = "") -> str:
    if figure.value is None:
        return figure.failure.replace("job lost", "the job is lost").removesuffix(" s")
    told = f"{figure.value:.1f}"
    if ours is not None and ours.value:
        told += f" ({rough(figure.value / ours.value)}{unit})"
    return ", ".join(part for part in (told, failed_runs(figure)) if part)


def agents_paragraph(document: Document) -> str:
    joins = rows(document, "joins", figures.Join)
    loaded = value(document, "load", figures.Loaded | None)  # type: ignore[arg-type]
    if not joins or loaded is None:
        raise IncompleteError("rendezvous.json has nothing about many agents, or about agents under load")
    assert isinstance(loaded, figures.Loaded)
    join_s = figures.median_figure([join.join_s for join in joins], [], [0.0]).value or 0.0
    totals_s = [join.loss.total_s for join in joins]
    total_s = figures.median_figure(totals_s, [], [0.0]).value or 0.0
    dropped = "no live node was" if not loaded.num_dropped else f"{loaded.num_dropped} live nodes were"
    killed = ""
    if loaded.kills:
        killed = f", and a killed one was out within {max(kill.total_s for kill in loaded.kills):.2f} s"
    return paragraph(
        f"{joins[0].num_agents} agents on one etcd member join in {join_s:.1f} s, and a killed one is out of",
        f"everybody's generation {total_s:.2f} s after its death (medians of {len(joins)}; single runs up to",
        f"{max(totals_s):.2f}). With {loaded.num_busy} busy processes beside {loaded.num_agents} agents on the",
        f"{document.machine.cores} cores, load {loaded.load:.1f}, {dropped} dropped in {loaded.span_s:.0f} s"
        f"{killed}.",
    )


# --- metrics --------------------------------------------------------------------------------------------------


def make_metrics(documents: Documents) -> str:
    document = whole(documents, "metrics")
    more_us, step_us = value(document, "more_us", float), value(document, "step_us", float)
    machine = document.machine
    return paragraph(
        f"All of it costs a worker {more_us:.1f} us of processor time a step, {100 * more_us / step_us:.2f} %",
        f"of steps of {step_us / 1000:.0f} ms (`benchmarks/metrics.py`, scraped every second, median of",
        f"{plural(value(document, 'num_repeats', int), 'run')}, {told_machine(machine)}, load",
        f"{span([machine.load_start, machine.load_end])}).",
    )


# --- training -------------------------------------------------------------------------------------------------


def make_training(documents: Documents) -> str:
    document = whole(documents, "training")
    runs = figures.trainings(document)
    ours = runs[-1]
    loss = figures.shared_loss(runs)

    def line(name: str, told: Callable[[Training], str]) -> list[str]:
        return [name, *(told(run) for run in runs)]

    def beside(found: float | None, of_ours: float | None, shown: Callable[[float], str]) -> str:
        if found is None:
            return ""
        is_compared = of_ours and found != of_ours
        return shown(found) + (f" ({rough(found / of_ours)} times)" if is_compared and of_ours else "")

    body = [
        line(
            f"to a loss of {loss:.2f}",
            lambda run: beside(run.reached_s(loss), ours.reached_s(loss), whole_seconds),
        ),
        line("all steps", lambda run: run.failure or beside(run.done_s, ours.done_s, whole_seconds)),
        line("loss after all steps", lambda run: f"{run.last_loss:.2f}"),
        line("between hosts, as the kernel counted", lambda run: beside(run.sent_bytes, ours.sent_bytes, size)),
        line("a step before the kill, on average", lambda run: f"{run.ordinary_s:.2g} s"),
        line("a round of all ranks", lambda run: "" if run.round_s is None else f"{run.round_s:.2g} s"),
        line("longest standstill after it", lambda run: f"{run.standstill_s:.1f} s"),
        line("survivors: steps lost, processes restarted", lambda run: f"{run.steps_lost}, {restarted(run)}"),
    ]
    caption = paragraph(
        f"The hosts are network namespaces of one machine with {told_machine(document.machine)}, load",
        f"{listed([f'{run.load:.1f}' for run in runs])} when the jobs started, one run each:",
        "`benchmarks/training.py`, for root.",
    )
    return f"{table(['', *figures.WAYS], body)}\n\n{caption}"


def whole_seconds(took_s: float) -> str:
    return f"{took_s:.0f} s"


def restarted(run: Training) -> str:
    if run.num_restarted == run.num_survivors:
        return f"all {run.num_restarted}"
    return str(run.num_restarted)


PARTS: dict[str, Callable[[Documents], str]] = {
    "training": make_training,
    "recovery": make_recovery,
    "rendezvous": make_rendezvous,
    "metrics": make_metrics,
    "averaging": make_averaging,
    "plan": make_plan,
}
