"""Figures as the README writes them: rounding, units, ranges, tables and paragraphs. Pure."""

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        assert len(row) == len(head)
        lines.append(f"| {' | '.join(row)} |")
    # An empty first cell of the head is written without a second space.
    return "\n".join(lines).replace("|  |", "| |", 1) if not head[0] else "\n".join(lines)


def paragraph(*sentences: str) -> str:
    text = " ".join(each for each in sentences if each)
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def seconds(value: float) -> str:
    """Hundredths below a second, tenths above; without the unit."""
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}"


def rough(value: float) -> str:
    """Tenths below 10, whole numbers above."""
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def span(values: Iterable[float], *, digits: int = 1) -> str:
    """From the least to the most, or the one that all of them are."""
    told = [f"{value:.{digits}f}" for value in sorted(values)]
    return told[0] if told[0] == told[-1] else f"{told[0]} to {told[-1]}"


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def short_version(text: str) -> str:
    """Without the build behind the plus."""
    return text.partition("+")[0]


def short_python(text: str) -> str:
    return ".".join(text.split(".")[:2])
