"""The demo as a picture: loss, step time and who made steps, over time, with the faults marked. SVG, pure.

Written by hand, because nothing else is needed for three panels. Invariant: every text in it is escaped, and
the same run gives the same picture.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from elastic_hieravg.demo.facts import Facts, Kind, Run, loss_points, survivor_pairs

WIDTH, LEFT, RIGHT = 960, 64, 24
HEAD = 92
LOSS_HEIGHT, STEP_HEIGHT, LANE_HEIGHT, SPACE = 220, 150, 20, 46
FOOT = 34
# Step times are shown for so long a time each: the middle one, and the longest.
BIN_S = 0.5
# A node that makes no step for so long has a hole in its lane.
LANE_GAP_S = 0.5
TICKS_MAX = 10

INK, FAINT, GRID = "#222222", "#666666", "#e4e4e4"
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#2a8a5a"
BANDS = {Kind.KILLED: "#f9d9d5", Kind.FROZEN: "#d6e6f8", Kind.JOINED: "#d9f0dc", Kind.LEFT: "#f8eec9"}

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Panel:
    """A rectangle with two axes. `is_log`: the vertical one counts in powers of ten."""

    top: float
    height: float
    until_s: float
    low: float
    high: float
    is_log: bool = False

    def x(self, at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / self.until_s

    def y(self, value: float) -> float:
        low, high, value = (self._scaled(each) for each in (self.low, self.high, value))
        return self.top + self.height * (1 - (value - low) / (high - low))

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.is_log else value


def draw(run: Run, facts: Facts) -> str:
    """The picture of a run that has ended."""
    until_s = max(run.ended_s - run.began_s, 1.0)
    names = sorted({worker.node for worker in run.workers})
    height = HEAD + LOSS_HEIGHT + STEP_HEIGHT + 2 * SPACE + LANE_HEIGHT * len(names) + FOOT
    told = (
        f"steps lost by survivors: {facts.num_lost_steps}; restarts of survivors: {facts.num_restarts}; "
        f"replicas identical: {'no' if facts.differing else 'yes'}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    parts = [
        head,
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        draw_text(LEFT, 24, "hieravg demo: a small model learns while nodes come and go", size=16),
        draw_text(LEFT, 42, told, fill=FAINT),
        *_bands(run, until_s=until_s, bottom=height - FOOT),
        *_loss(run, top=HEAD, until_s=until_s),
        *_step_time(run, top=HEAD + LOSS_HEIGHT + SPACE, until_s=until_s),
        *_lanes(run, names, top=HEAD + LOSS_HEIGHT + STEP_HEIGHT + 2 * SPACE, until_s=until_s),
        *draw_seconds(until_s, top=height - FOOT),
        "</svg>\n",
    ]
    return "\n".join(parts)


def ticks(high: float, *, num_max: int = TICKS_MAX) -> list[float]:
    """Round numbers from 0 on, not too many.

    >>> ticks(70.0)
    [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]
    """
    smallest = 10.0 ** math.floor(math.log10(max(high, 1e-9) / num_max))
    step = next(each * smallest for each in (1, 2, 5, 10) if high / (each * smallest) <= num_max)
    return [index * step for index in range(int(high / step) + 1)]


def _bands(run: Run, *, until_s: float, bottom: float) -> Iterable[str]:
    """A stripe for each fault, from when it was made until it was healed."""
    panel = Panel(HEAD, 1, until_s, 0, 1)
    for index, fault in enumerate(run.faults):
        left, right = panel.x(fault.at_s - run.began_s), panel.x(fault.healed_s - run.began_s)
        yield (
            f'<rect x="{left:.1f}" y="{HEAD - 6}" width="{max(right - left, 2):.1f}" '
            f'height="{bottom - HEAD + 6:.1f}" fill="{BANDS[fault.kind]}"/>'
        )
        # Two rows, so that neighbours do not write over each other.
        yield draw_text(left, HEAD - 12 - 15 * (index % 2), f"{fault.node} {fault.kind}", size=11)


def _loss(run: Run, *, top: float, until_s: float) -> Iterable[str]:
    points = [(at_s - run.began_s, loss) for at_s, _, loss in loss_points(run.workers)]
    panel = Panel(top, LOSS_HEIGHT, until_s, 0.0, max((loss for _, loss in points), default=1.0) * 1.05)
    yield from draw_frame(
        panel, "loss, mean of all workers", [(each, f"{each:g}") for each in ticks(panel.high, num_max=6)]
    )
    yield draw_line(panel, points, colour=BLUE)


def _step_time(run: Run, *, top: float, until_s: float) -> Iterable[str]:
    found: defaultdict[int, list[Point]] = defaultdict(list)
    for worker in run.workers:
        for before, after in survivor_pairs(worker, run.faults):
            at_s = after.at_s - run.began_s
            found[int(at_s / BIN_S)].append((at_s, after.at_s - before.at_s))
    bins = [sorted(points) for _, points in sorted(found.items())]
    middle = [(points[-1][0], statistics.median(seconds for _, seconds in points)) for points in bins]
    longest = [max(points, key=lambda point: point[1]) for points in bins]
    panel = Panel(top, STEP_HEIGHT, until_s, 0.01, 10.0, is_log=True)
    labels = [(0.01, "10 ms"), (0.1, "100 ms"), (1.0, "1 s"), (10.0, "10 s")]
    title = "time from step to step of workers whose node was not hurt: longest (orange) and median (grey)"
    yield from draw_frame(panel, title, labels)
    yield draw_line(panel, _within(middle, panel), colour=FAINT)
    yield draw_line(panel, _within(longest, panel), colour=ORANGE)


def _within(points: Iterable[Point], panel: Panel) -> list[Point]:
    return [(at_s, min(max(value, panel.low), panel.high)) for at_s, value in points]


def _lanes(run: Run, names: Sequence[str], *, top: float, until_s: float) -> Iterable[str]:
    panel = Panel(top, LANE_HEIGHT, until_s, 0.0, 1.0)
    yield draw_text(LEFT, top - 8, "when each node made steps")
    for index, name in enumerate(names):
        y = top + index * LANE_HEIGHT
        yield draw_text(LEFT - 10, y + 13, f"node {name}", fill=FAINT, anchor="end")
        times_s = sorted(
            step.at_s - run.began_s for worker in run.workers if worker.node == name for step in worker.steps
        )
        for from_s, to_s in _stretches(times_s):
            left, right = panel.x(from_s), panel.x(to_s)
            yield (
                f'<rect x="{left:.1f}" y="{y + 3}" width="{max(right - left, 1):.1f}" '
                f'height="{LANE_HEIGHT - 6}" fill="{GREEN}"/>'
            )


def _stretches(times_s: Sequence[float]) -> list[Point]:
    """
    >>> _stretches([1.0, 1.25, 9.0])
    [(1.0, 1.25), (9.0, 9.0)]
    """
    if not times_s:
        return []
    cuts = [(before, after) for before, after in itertools.pairwise(times_s) if after - before > LANE_GAP_S]
    starts = [times_s[0], *(after for _, after in cuts)]
    return list(zip(starts, [*(before for before, _ in cuts), times_s[-1]], strict=True))


def draw_seconds(until_s: float, *, top: float) -> Iterable[str]:
    panel = Panel(top, 1, until_s, 0, 1)
    for second in ticks(until_s):
        yield draw_text(panel.x(second), top + 18, f"{second:g} s", fill=FAINT, anchor="middle")


def draw_frame(panel: Panel, title: str, labels: Sequence[tuple[float, str]]) -> Iterable[str]:
    for value, label in labels:
        y = panel.y(value)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield draw_text(LEFT - 8, y + 4, label, fill=FAINT, anchor="end")
    yield draw_text(LEFT + 4, panel.top - 8 if panel.is_log else panel.top + panel.height - 8, title)


def draw_line(panel: Panel, points: Sequence[Point], *, colour: str) -> str:
    placed = " ".join(f"{panel.x(at_s):.1f},{panel.y(value):.1f}" for at_s, value in points)
    return f'<polyline points="{placed}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def draw_text(x: float, y: float, text: str, *, fill: str = INK, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
