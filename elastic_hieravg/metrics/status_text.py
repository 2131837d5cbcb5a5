"""A job's status for a terminal: from the values of a status document to what rich prints.

Pure: nothing here prints, asks or looks at the clock. Invariant: every text of the document becomes a `Text`,
so none is read as rich's markup.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from elastic_hieravg.metrics.attention import (
    COST_RATIO_MAX,
    Finding,
    Severity,
    attention,
    cost_ratio,
    link_text,
    seconds_text,
    span_text,
)
from elastic_hieravg.metrics.status_reading import (
    EventShown,
    LevelStatus,
    NodeStatus,
    RoundShown,
    Status,
    WorkerShown,
)
from elastic_hieravg.plan import natural_key
from elastic_hieravg.plan.text import bytes_text, ranks_text

FINDINGS_SHOWN_MAX = 12
GROUPS_SHOWN_MAX = 6
NAMES_SHOWN_MAX = 4
EVENTS_SHOWN_MAX = 12
# Above so many workers only those are shown that do something else than training.
WORKERS_SHOWN_MAX = 24
TRACE_CELLS = 20

_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "training": "green",
    "averaging": "blue",
    "joining": "blue",
    "starting": "blue",
    "leaving": "magenta",
    "left": "dim",
    "done": "dim",
    "lost": "bold white on red",
    "gone": "bold white on red",
    "failed": "bold white on red",
    "skipped": "bold black on yellow",
}
_SEVERITIES = {Severity.BAD: "bold white on red", Severity.WARN: "bold black on yellow"}


def status_text(status: Status) -> RenderableType:
    """All of it, what needs attention first."""
    parts: list[RenderableType] = [
        _head(status),
        *_titled("what needs attention", _findings(attention(status))),
        *_titled("nodes and workers", _nodes(status)),
        *_titled("levels, innermost first", _levels(status)),
        *_titled("what happened, newest first", _events(status)),
    ]
    if status.values:
        parts += _titled("what the script reports", _values(status))
    return Group(*parts)


def _titled(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]


def _head(status: Status) -> RenderableType:
    bounds = f"at least {_whole(status.nodes_min)}, at most {_whole(status.nodes_max)}"
    figures = [
        f"step {_whole(status.step)}",
        f"{_short(status.steps_per_s)} steps/s",
        f"goodput {_percent(status.goodput_ratio)}",
        f"{len(status.training)} nodes ({bounds})",
        f"{_whole(status.world_ranks)} ranks",
        f"store {status.backend} {_STORE[status.is_store_up]}".replace("  ", " "),
        f"running for {span_text(status.ago_s(status.began_s)) or '-'}",
    ]
    lines = [Text(status.run_id or "hieravg", style="bold"), Text("   ".join(figures))]
    if status.hold:
        lines.append(Text.assemble((" held ", _SEVERITIES[Severity.BAD]), " ", status.hold))
    if status.generation is not None:
        ago_s = status.ago_s(status.at_s)
        # A reason that begins with the kind says it once.
        kind = "" if status.reason.startswith(status.kind) else f", {status.kind}"
        made = "" if ago_s is None else f", {span_text(ago_s)} ago"
        lines.append(Text(f"generation {status.generation}{kind}{made}: {status.reason}"))
    if status.action not in ("", "keep"):
        lines.append(Text(f"next, {status.action}: {status.because}"))
    asked = [f"hierarchy {status.hierarchy}" if status.hierarchy else "", status.mode]
    seen = f"seen from {status.node_id}" if status.node_id else ""
    lines.append(Text(", ".join(part for part in (*asked, seen) if part), style="dim"))
    return Group(*lines)


_STORE = {True: "up", False: "away", None: ""}


def _findings(findings: Sequence[Finding]) -> RenderableType:
    if not findings:
        return Text("nothing", style="green")
    table = _grid(2)
    for finding in findings[:FINDINGS_SHOWN_MAX]:
        table.add_row(Text(finding.word, style=_SEVERITIES[finding.severity]), Text(finding.text))
    hidden = len(findings) - FINDINGS_SHOWN_MAX
    if hidden > 0:
        table.add_row(Text("more"), Text(f"and {hidden} more, in the tables below"))
    return table


# --- nodes ----------------------------------------------------------------------------------------------------


def _nodes(status: Status) -> RenderableType:
    if not status.nodes:
        return Text("none is known yet", style="dim")
    table = _grid(0)
    for name, is_number in (
        ("node", False),
        ("state", False),
        ("step", True),
        ("step time", True),
        ("last 2 minutes", False),
        ("steps/s", True),
        ("goodput", True),
        ("ranks", False),
        ("workers", False),
    ):
        table.add_column(
            Text(name, style="dim"), justify="right" if is_number else "left", no_wrap=name != "workers"
        )
    table.show_header = True
    for row in _branch(status, status.nodes, keys=status.places(), depth=0):
        table.add_row(*row)
    return table


def _branch(
    status: Status, nodes: Sequence[NodeStatus], *, keys: Sequence[str], depth: int
) -> Iterator[tuple[Text, ...]]:
    if not keys:
        for node in nodes:
            yield from _node_rows(status, node, depth=depth)
        return
    key, *inner = keys
    for value in sorted({node.labels.get(key, "") for node in nodes}, key=natural_key):
        members = [node for node in nodes if node.labels.get(key, "") == value]
        words = [*(node.state for node in members), *("slow" for node in members if node.is_straggler)]
        name = f"{key} {value}" if value else f"no {key}"
        # In the column of the states: what a place has of each.
        yield _indented(name, depth=depth, style="bold"), Text(_counted(words), style="dim")
        yield from _branch(status, members, keys=inner, depth=depth + 1)


def _node_rows(status: Status, node: NodeStatus, *, depth: int) -> Iterator[tuple[Text, ...]]:
    steps = [worker.step for worker in node.workers if worker.step is not None]
    top = 2 * max((_median(each.trace) for each in status.nodes), default=0.0)
    state = Text(node.state, style=_STYLES.get(node.state, ""))
    if node.is_straggler:
        state = Text.assemble(state, " ", ("slow", _SEVERITIES[Severity.WARN]))
    yield (
        _indented(node.node_id, depth=depth),
        state,
        Text(_whole(max(steps)) if steps else ""),
        Text(seconds_text(node.step_seconds)),
        Text(_trace_text(node.trace, top=top), style="yellow" if node.is_straggler else "dim"),
        Text("" if node.steps_per_s is None else _short(node.steps_per_s)),
        Text("" if node.goodput_ratio is None else _percent(node.goodput_ratio)),
        Text(ranks_text(node.ranks)[1:-1]),
        Text(_counted(worker.state for worker in node.workers) or _lasting(status, node)),
    )
    num_workers = sum(len(each.workers) for each in status.nodes)
    for worker in node.workers:
        if num_workers <= WORKERS_SHOWN_MAX or worker.state == "gone":
            yield _worker_row(worker, depth=depth + 1)


def _lasting(status: Status, node: NodeStatus) -> str:
    """Of a node that does not train: since when, and why."""
    if node.state == "training":
        return ""
    since_s = status.ago_s(node.since_s)
    lasting = "" if since_s is None else f"for {span_text(since_s)}"
    return ": ".join(part for part in (lasting, node.reason) if part)


def _worker_row(worker: WorkerShown, *, depth: int) -> tuple[Text, ...]:
    told = [
        f"process {worker.process_id}" if worker.process_id else "",
        f"restarted {worker.restarts} times" if worker.restarts > 0 else "",
    ]
    return (
        _indented(
            f"worker {'?' if worker.local_rank is None else worker.local_rank}", depth=depth, style="dim"
        ),
        Text(worker.state, style=_STYLES.get(worker.state, "")),
        Text("" if worker.step is None else _whole(worker.step), style="dim"),
        Text(seconds_text(worker.step_seconds), style="dim"),
        Text(),
        Text(),
        Text(),
        Text("" if worker.rank is None else str(worker.rank), style="dim"),
        Text(", ".join(part for part in told if part), style="dim"),
    )


def _trace_text(trace: Sequence[float], *, top: float) -> str:
    """One scale for all nodes: a slow one stands out. Each cell is the mean of its points.

    >>> _trace_text([0.01, 0.01, 0.04], top=0.04)
    '▃▃█'
    """
    if not trace or top <= 0:
        return ""
    size = -(-len(trace) // TRACE_CELLS)
    parts = [trace[index : index + size] for index in range(0, len(trace), size)]
    means = [sum(part) / len(part) for part in parts]
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(len(_BLOCKS) * mean / top))] for mean in means)


# --- levels ---------------------------------------------------------------------------------------------------


def _levels(status: Status) -> RenderableType:
    notes = [Text(f"note: {note}") for note in status.notes]
    if not status.levels:
        return Group(Text("none: there is nobody to average with, or no plan yet", style="dim"), *notes)
    table = _grid(0)
    heads = (
        "level",
        "every",
        "last round",
        "took",
        "of the time",
        "a node sent",
        "link",
        "next round",
        "groups",
    )
    for name in heads:
        is_number = name in ("took", "of the time", "a node sent")
        table.add_column(
            Text(name, style="dim"), justify="right" if is_number else "left", no_wrap=name != "groups"
        )
    table.show_header = True
    owners = {rank: node.node_id for node in status.nodes if node.state != "lost" for rank in node.ranks}
    for level in status.levels:
        table.add_row(*_level_row(status, level), Text(_groups_text(level, owners)))
    return Group(table, *notes)


def _level_row(status: Status, level: LevelStatus) -> tuple[Text, ...]:
    last, ratio = level.last, cost_ratio(status, level)
    left = None if level.next_step is None or status.step is None else level.next_step - status.step
    return (
        Text(level.name, style="bold"),
        Text("" if level.period_steps is None else _steps(level.period_steps)),
        Text("none yet", style="dim") if last is None else _round_text(last, ago_s=status.ago_s(last.at_s)),
        Text("" if last is None else seconds_text(last.seconds)),
        Text(
            "" if ratio is None else _percent(ratio),
            style=_SEVERITIES[Severity.WARN] if ratio is not None and ratio > COST_RATIO_MAX else "",
        ),
        Text("" if last is None or last.sent_bytes is None else bytes_text(last.sent_bytes)),
        Text("" if last is None else link_text(last.link)),
        Text(
            ("" if level.next_step is None else f"step {_whole(level.next_step)}")
            + (f", in {_whole(left)}" if left is not None and left >= 0 else "")
        ),
    )


def _round_text(last: RoundShown, *, ago_s: float | None) -> Text:
    step = "" if last.step is None else f"step {_whole(last.step)}"
    ago = "" if ago_s is None else f", {span_text(ago_s)} ago"
    return Text.assemble(f"{step}{ago} ", (last.outcome, _STYLES.get(last.outcome, "dim")))


def _groups_text(level: LevelStatus, owners: dict[int, str]) -> str:
    shown = [_group_text(ranks, owners) for ranks in level.groups[:GROUPS_SHOWN_MAX]]
    hidden = level.num_groups - len(shown)
    return " ".join(shown) + (f" and {hidden} more" if hidden > 0 else "")


def _group_text(ranks: Sequence[int], owners: dict[int, str]) -> str:
    """
    >>> _group_text([0, 1, 2], {0: "a", 1: "a", 2: "b"})
    'a,b{0-2}'
    """
    names = list(dict.fromkeys(owners[rank] for rank in ranks if rank in owners))
    if len(names) > NAMES_SHOWN_MAX:
        return f"{names[0]}..{names[-1]}:{len(names)} nodes{ranks_text(ranks)}"
    return f"{','.join(names)}{ranks_text(ranks)}"


# --- the rest -------------------------------------------------------------------------------------------------


def _events(status: Status) -> RenderableType:
    if not status.events:
        return Text("nothing yet", style="dim")
    table = _grid(4)
    newest = sorted(status.events, key=lambda event: (event.at_s or 0.0, event.generation or 0), reverse=True)
    for event in newest[:EVENTS_SHOWN_MAX]:
        table.add_row(*_event_row(event, ago_s=status.ago_s(event.at_s)))
    return table


def _event_row(event: EventShown, *, ago_s: float | None) -> tuple[Text, ...]:
    went = [
        f"left: {', '.join(event.left)}" if event.left else "",
        f"came: {', '.join(event.came)}" if event.came else "",
    ]
    told = "; ".join(part for part in (event.reason, *went) if part)
    return (
        Text("" if ago_s is None else f"{span_text(ago_s)} ago", style="dim"),
        Text("" if event.generation is None else f"generation {event.generation}"),
        Text(event.kind, style="bold red" if event.kind == "lost" else ""),
        Text(told),
    )


def _values(status: Status) -> RenderableType:
    table = _grid(2)
    for name, value in status.values:
        table.add_row(Text(name), Text("-" if value is None else f"{value:.6g}"))
    return table


def _grid(num_columns: int) -> Table:
    """A table without lines; only the last of its columns is broken into lines."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for index in range(num_columns):
        table.add_column(no_wrap=index < num_columns - 1)
    return table


def _indented(name: str, *, depth: int, style: str = "") -> Text:
    return Text("  " * depth + name, style=style)


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def _short(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio * 100:.3g} %"


def _steps(num_steps: int) -> str:
    return f"{num_steps} step" if num_steps == 1 else f"{num_steps} steps"
