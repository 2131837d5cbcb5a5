"""How the demo is shown while it runs: a picture that moves on a terminal, plain lines everywhere else.

All of it is talk and goes to stderr. Invariant: no escape code is written unless stderr is a terminal that
understands them, and such a terminal is left as it was found.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from elastic_hieravg.config import is_continuous_integration
from elastic_hieravg.membership.proposing import NUMBERS_SKIPPED
from elastic_hieravg.metrics.status_reading import EventShown, LevelStatus, NodeStatus, Status
from elastic_hieravg.plan.text import ranks_text

# How a line that stays looks: seconds since the start, then what happened.
TIME_WIDTH = 6
BAR_WIDTH = 40
TRACE_CELLS = 40
LOSS_CELLS = 60
WIDTH_MAX = 110
SKIPPED = "the numbers in between are skipped when another node takes the store over"
_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "training": "green",
    "joining": "blue",
    "leaving": "magenta",
    "left": "dim",
    "lost": "bold white on red",
}


@dataclass(frozen=True, slots=True)
class PlanShown:
    """The levels of a generation's plan, as an agent told of it."""

    generation: int
    levels: tuple[LevelStatus, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """What there is to see at a moment. `losses`: oldest first. Plans are None until they are known."""

    elapsed_s: float
    doing: str
    num_scenes_done: int
    num_scenes: int
    status: Status | None = None
    before: PlanShown | None = None
    now: PlanShown | None = None
    losses: tuple[float, ...] = ()


class Screen(Protocol):
    def say(self, elapsed_s: float, text: str) -> None:
        """A line that stays."""

    def show(self, shown: Shown) -> None:
        """What is there now, instead of what was there before."""

    def close(self) -> None: ...


def open_screen() -> Screen:
    """The one that fits stderr."""
    is_terminal = sys.stderr.isatty()
    console = Console(stderr=True, force_terminal=is_terminal, markup=False, emoji=False, highlight=False)
    if is_terminal and not console.is_dumb_terminal and not is_continuous_integration():
        return LiveScreen(console)
    return PlainScreen()


class PlainScreen:
    """Lines, one for each thing that happens."""

    def say(self, elapsed_s: float, text: str) -> None:
        sys.stderr.write(f"{_line(elapsed_s, text)}\n")
        sys.stderr.flush()

    def show(self, shown: Shown) -> None:
        return

    def close(self) -> None:
        return


class LiveScreen:
    """The same lines, and below them what moves."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, transient=True
        )
        self._live.start()

    def say(self, elapsed_s: float, text: str) -> None:
        self._console.print(Text(_line(elapsed_s, text)))

    def show(self, shown: Shown) -> None:
        self._live.update(render(shown), refresh=True)

    def close(self) -> None:
        self._live.stop()


def render(shown: Shown) -> RenderableType:
    """Everything that moves."""
    head = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=shown.num_scenes, completed=shown.num_scenes_done, width=BAR_WIDTH)
    head.add_row(bar, Text(f"{shown.elapsed_s:.0f} s"), Text(shown.doing, style="bold"))
    parts: list[RenderableType] = [Text(), head]
    if shown.status is not None:
        parts.append(_tree(shown.status))
    if shown.now is not None:
        parts.append(_plans(shown.before, shown.now))
    if shown.losses:
        told = f"loss {shown.losses[-1]:.2f}  "
        parts.append(Text.assemble(told, (trace_text(thinned(shown.losses, LOSS_CELLS)), "cyan")))
    return Group(*parts)


def trace_text(values: Sequence[float], *, low: float | None = None) -> str:
    """The highest is as high as the blocks go; the lowest, or `low`, as low.

    >>> trace_text([4.0, 3.0, 1.0])
    '█▅▁'
    """
    low, high = min(values) if low is None else low, max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[int((value - low) * scale)] for value in values)


def thinned(values: Sequence[float], num_max: int) -> list[float]:
    """Evenly spread over all of them, the newest included.

    >>> thinned([1.0, 2.0, 3.0, 4.0, 5.0], 2)
    [2.0, 5.0]
    """
    num = min(len(values), num_max)
    return [values[len(values) * index // num - 1] for index in range(1, num + 1)]


def plan_text(plan: PlanShown) -> str:
    """A plan on one line.

    >>> plan_text(PlanShown(3, (LevelStatus("node", 4, 2, ((0, 1), (2, 3)), None, None),)))
    'node every 4 steps {0-1} {2-3}'
    """
    return ", ".join(f"{level.name} every {level.period_steps} steps {_groups(level)}" for level in plan.levels)


def generation_text(event: EventShown, *, before: int) -> str:
    """Why a generation was made, on one line. `before`: the number of the one before it.

    >>> generation_text(EventShown(0.0, 3, "lost", "lost a: its lease ended", ("a",), ()), before=2)
    'generation 3: lost a: its lease ended'
    """
    kind = "" if event.reason.startswith(event.kind) else f", {event.kind}"
    told = f"generation {event.generation}{kind}: {event.reason}"
    # Fewer than these are missing only if they came between two looks.
    is_taken_over = event.generation is not None and event.generation > before + NUMBERS_SKIPPED
    return f"{told}; {SKIPPED}" if is_taken_over else told


def _line(elapsed_s: float, text: str) -> str:
    return f"{elapsed_s:{TIME_WIDTH}.1f} s  {text}"


def _tree(status: Status) -> RenderableType:
    speed = "" if status.steps_per_s is None else f", {status.steps_per_s:.0f} steps a second"
    goodput = "" if status.goodput_ratio is None else f", goodput {status.goodput_ratio:.0%} with the start"
    told = f"generation {status.generation}, {status.world_ranks} ranks, step {status.step}{speed}{goodput}"
    tree = Tree(Text(told), guide_style="dim")
    for node in status.nodes:
        tree.add(_node(status, node))
    return tree


def _node(status: Status, node: NodeStatus) -> Text:
    told = Text.assemble(f"{node.node_id}  ", (f" {node.state} ", _STYLES.get(node.state, "")), "  ")
    if node.state != "training":
        ago_s = status.ago_s(node.since_s)
        since = "" if ago_s is None else f"for {ago_s:.0f} s"
        return told + Text("  ".join(part for part in (since, node.reason) if part))
    step = "" if node.step_seconds is None else f"a step takes {node.step_seconds * 1000:.0f} ms  "
    told += Text(f"ranks {ranks_text(node.ranks)}  {step}")
    return told + Text(trace_text(node.trace[-TRACE_CELLS:], low=0.0) if node.trace else "", style="dim")


def _plans(before: PlanShown | None, now: PlanShown) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("plan")
    if before is not None:
        table.add_column(f"before, generation {before.generation}")
    table.add_column(f"now, generation {now.generation}")
    names = dict.fromkeys(level.name for plan in (now, before) if plan for level in plan.levels)
    for name in names:
        cells = [_level(plan, name) for plan in (before, now) if plan]
        table.add_row(Text(name), *map(Text, cells))
    return table


def _level(plan: PlanShown, name: str) -> str:
    level = next((level for level in plan.levels if level.name == name), None)
    return "" if level is None else f"every {level.period_steps} steps {_groups(level)}"


def _groups(level: LevelStatus) -> str:
    return " ".join(ranks_text(group) for group in level.groups)
