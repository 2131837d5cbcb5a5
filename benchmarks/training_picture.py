"""`training.py` as a picture: loss and bytes between hosts over time, a line for each way, the kill marked."""

from collections.abc import Iterable, Sequence

from training_jobs import Run

from elastic_hieravg.demo.picture import (
    BLUE,
    FAINT,
    INK,
    LEFT,
    ORANGE,
    RIGHT,
    WIDTH,
    Panel,
    draw_frame,
    draw_line,
    draw_seconds,
    draw_text,
    ticks,
)

HEAD, LOSS_HEIGHT, SPACE, BYTES_HEIGHT, FOOT = 96, 280, 50, 160, 50
HEIGHT = HEAD + LOSS_HEIGHT + SPACE + BYTES_HEIGHT + FOOT
PURPLE = "#8a5aa8"
COLOURS = (ORANGE, PURPLE, BLUE)
MARK = 5


def draw_training(runs: Sequence[Run], *, title: str, told: str) -> str:
    """The picture of all runs. They are told apart by colour, and by their names at the top."""
    until_s = max(run.done_s for run in runs) * 1.02
    top = HEAD + LOSS_HEIGHT + SPACE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    parts = [
        head,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        draw_text(LEFT, 24, title, size=16),
        draw_text(LEFT, 42, told, fill=FAINT),
        *_names(runs),
        *_losses(runs, until_s=until_s),
        *_traffic(runs, top=top, until_s=until_s),
        *draw_seconds(until_s, top=top + BYTES_HEIGHT),
        draw_text(WIDTH / 2, HEIGHT - 10, "time since the first step", fill=FAINT, anchor="middle"),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _names(runs: Sequence[Run]) -> Iterable[str]:
    for index, run in enumerate(runs):
        x, colour = LEFT + 215 * index, COLOURS[index]
        yield f'<line x1="{x}" y1="63" x2="{x + 22}" y2="63" stroke="{colour}" stroke-width="3"/>'
        yield draw_text(x + 28, 67, run.system, size=13)
    x = LEFT + 215 * len(runs)
    yield _mark(x + 10, 63, colour=INK)
    yield draw_text(x + 22, 67, "one of four nodes killed", size=13)


def _losses(runs: Sequence[Run], *, until_s: float) -> Iterable[str]:
    # From the first average of all on: the untrained model's loss would leave no room for the rest.
    lines = [run.losses[1:] for run in runs]
    losses = [loss for line in lines for _, loss in line]
    panel = Panel(HEAD, LOSS_HEIGHT, until_s, min(losses) - 0.1, max(losses) + 0.1)
    labels = [(each, f"{each:g}") for each in ticks(panel.high, num_max=20) if each >= panel.low]
    yield from draw_frame(panel, "", labels)
    untrained = f"loss on text that was held out, nats per character (untrained: {runs[0].losses[0][1]:.2f})"
    yield draw_text(LEFT, HEAD - 8, untrained)
    for colour, run, line in zip(COLOURS, runs, lines, strict=False):
        yield draw_line(panel, line, colour=colour)
        yield _mark(panel.x(run.killed_s), panel.y(_at(line, run.killed_s)), colour=colour)


def _traffic(runs: Sequence[Run], *, top: float, until_s: float) -> Iterable[str]:
    lines = [tuple((at_s, sent / 1e9) for at_s, sent in run.traffic if at_s <= run.done_s) for run in runs]
    panel = Panel(top, BYTES_HEIGHT, until_s, 0.0, max(sent for line in lines for _, sent in line) * 1.05)
    yield from draw_frame(panel, "", [(each, f"{each:g} GB") for each in ticks(panel.high, num_max=5)])
    yield draw_text(LEFT, top - 8, "bytes sent between the hosts, as the kernel counted them")
    for colour, run, line in zip(COLOURS, runs, lines, strict=False):
        yield draw_line(panel, line, colour=colour)
        yield _mark(panel.x(run.killed_s), panel.y(_at(line, run.killed_s)), colour=colour)
    bottom = top + BYTES_HEIGHT
    yield f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}" stroke="{FAINT}"/>'


def _at(points: Sequence[tuple[float, float]], at_s: float) -> float:
    """The value of a line at this time.

    >>> _at([(0.0, 4.0), (2.0, 3.0), (4.0, 1.0)], 3.0)
    2.0
    """
    before = max((point for point in points if point[0] <= at_s), default=points[0])
    after = min((point for point in points if point[0] > at_s), default=before)
    if after[0] == before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (at_s - before[0]) / (after[0] - before[0])


def _mark(x: float, y: float, *, colour: str) -> str:
    side = 2 * MARK
    cross = f"M{x - MARK:.1f},{y - MARK:.1f} l{side},{side} m0,{-side} l{-side},{side}"
    return f'<path d="{cross}" stroke="{colour}" stroke-width="2.5"/>'
