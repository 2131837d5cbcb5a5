"""The README's table of metrics is the catalogue, row by row. `--regenerate` writes it anew."""

import re
from pathlib import Path

import pytest

from elastic_hieravg.metrics.catalogue import CATALOGUE, Metric

README = Path(__file__).parent.parent.parent / "README.md"
HEAD = "| metric | kind | labels | what it tells |\n|---|---|---|---|\n"
TABLE = re.compile(f"{re.escape(HEAD)}((?:\\|.*\\n)*)")


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |\n"


def test_the_table_of_metrics_is_the_catalogue(request: pytest.FixtureRequest) -> None:
    text = README.read_text()
    assert len(TABLE.findall(text)) == 1
    wanted = HEAD + "".join(map(row, CATALOGUE))
    if request.config.getoption("--regenerate"):
        README.write_text(TABLE.sub(lambda _: wanted, text))
    else:
        assert wanted in text
