"""Writes what is generated here: the dashboards' JSON, and the rules as an object of Kubernetes.

Run `python -m dashboards.build` after a change of `training.py`, `membership.py`, `panels.py` or `rules.yaml`.
A test compares the files with what this makes.
"""

from pathlib import Path

from dashboards import membership, training

FOLDER = Path(__file__).parent
RULES = FOLDER / "rules.yaml"
_OBJECT = """\
# Written by `python -m dashboards.build` out of rules.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: hieravg
  labels:
    app.kubernetes.io/name: hieravg
spec:
"""


def generated() -> dict[str, str]:
    """The files by name."""
    return {
        "training.json": training.build(),
        "membership.json": membership.build(),
        "prometheus-rule.yaml": _OBJECT + _indented(RULES.read_text()),
    }


def _indented(text: str) -> str:
    return "".join(f"  {line}" if line.strip() else line for line in text.splitlines(keepends=True))


if __name__ == "__main__":
    for name, content in generated().items():
        (FOLDER / name).write_text(content)
