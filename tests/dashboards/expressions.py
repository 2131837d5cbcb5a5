"""Every PromQL expression of the dashboards and the rules, with the place it stands in, and what it is made of.

Checked against the catalogue: the metrics, their labels and the values of these. Invariant: nothing is left out
that Grafana or Prometheus would run.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

from elastic_hieravg.events import Outcome
from elastic_hieravg.membership.records import Kind as Reason
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.catalogue import BY_NAME, Cause, Kind, Link, NodeShown, Phase, RestartReason
from elastic_hieravg.plan.plan import NoteKind

FOLDER = Path(__file__).parent.parent.parent / "dashboards"
DASHBOARDS = ("training", "membership")
TARGET_LABELS = frozenset({"training_job", "node"})
# What a label of the catalogue can be, where that is a small fixed set.
VALUES: Mapping[tuple[str, str], frozenset[str]] = {
    (names.ROUNDS, "outcome"): frozenset(Outcome),
    (names.COMM_BYTES, "link"): frozenset(Link),
    (names.BADPUT_SECONDS, "cause"): frozenset(Cause),
    (names.GENERATIONS, "reason"): frozenset(Reason),
    (names.NODES, "state"): frozenset(NodeShown),
    (names.NODES_LIMIT, "bound"): frozenset({"min", "max"}),
    (names.RECOVERY_SECONDS, "phase"): frozenset(Phase),
    (names.WORKER_RESTARTS, "reason"): frozenset(RestartReason),
    (names.PLAN_NOTES, "kind"): frozenset(NoteKind),
}
# What a person chooses at the top of a dashboard, or an alert puts into its text.
CHOSEN = frozenset({"$training_job", "$node", "$level", "$reason", ".+"})
_LABEL_VALUES = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")
_SET_OPERATORS = frozenset({"and", "or", "unless"})


@dataclass(frozen=True, slots=True)
class Expression:
    """`legend`: what names its series. `kind`: panel, annotation, variable, recording, alert or text."""

    where: str
    kind: str
    expr: str
    legend: str = ""
    is_instant: bool = True
    label: str = ""


def read_dashboard(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def read_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Without rows, and with what a collapsed row holds."""
    found = [each for panel in dashboard["panels"] for each in (panel, *panel.get("panels", []))]
    return [panel for panel in found if panel["type"] != "row"]


def of_dashboards() -> list[Expression]:
    return [each for name in DASHBOARDS for each in _of_dashboard(name)]


def _of_dashboard(name: str) -> Iterator[Expression]:
    dashboard = read_dashboard(name)
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            is_instant = bool(target.get("instant", False))
            where = f"{name}: {panel['title']} {target['refId']}"
            yield Expression(where, "panel", target["expr"], target["legendFormat"], is_instant)
    for annotation in dashboard["annotations"]["list"]:
        legend = f"{annotation['titleFormat']} {annotation['textFormat']}"
        yield Expression(
            f"{name}: {annotation['name']}", "annotation", annotation["expr"], legend, is_instant=False
        )
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = _LABEL_VALUES.fullmatch(variable["query"]["query"])
            assert found is not None, variable
            yield Expression(f"{name}: ${variable['name']}", "variable", found["series"], label=found["label"])


def of_rules() -> list[Expression]:
    found = []
    for rule in read_rules():
        kind = "alert" if "alert" in rule else "recording"
        found.append(Expression(rule.get("alert") or rule["record"], kind, rule["expr"]))
        for name, text in rule.get("annotations", {}).items():
            legend = " ".join(f"{{{{{label}}}}}" for label in re.findall(r"\$labels\.(\w+)", text))
            found.append(Expression(f"{rule['alert']}: {name}", "alert", rule["expr"], legend))
            for asked, labels in re.findall(r'printf "([^"]+)"((?: \$labels\.\w+)+) \| query', text):
                chosen = tuple(f"${label}" for label in re.findall(r"\.(\w+)", labels))
                found.append(
                    Expression(f"{rule['alert']}: in {name}", "text", asked.replace("%q", '"%s"') % chosen)
                )
    return found


def everything() -> list[Expression]:
    return [*of_dashboards(), *of_rules()]


def parse(expr: str) -> promql.Expr:
    """Grafana's variables that stand for times are put in; the others are values of labels and may stay."""
    return promql.parse(expr.replace("$__rate_interval", "5s").replace("$__range", "1m"))


def selectors_of(expr: str) -> list[promql.VectorSelector]:
    found: list[promql.VectorSelector] = []

    def visit(each: promql.Expr) -> None:
        if isinstance(each, promql.VectorSelector):
            found.append(each)
        elif isinstance(each, promql.MatrixSelector):
            found.append(each.vector_selector)

    promql.walk(parse(expr), visit)
    return found


# --- what the catalogue says of them --------------------------------------------------------------------------


def problems_of(expression: Expression, *, recorded: Mapping[str, frozenset[str]]) -> list[str]:
    """What the catalogue does not know, or what can never match."""
    problems: list[str] = []
    for selector in selectors_of(expression.expr):
        problems += _problems_of_selector(selector, recorded)
    if problems:
        return problems
    labels = _labels_of(parse(expression.expr), recorded, problems)
    shown = set(re.findall(r"\{\{(\w+)\}\}", expression.legend))
    if shown - labels:
        problems.append(f"shows {sorted(shown - labels)}, has {sorted(labels)}")
    if expression.label and expression.label not in labels:
        problems.append(f"asks for the values of {expression.label}")
    return problems


def recorded_labels() -> dict[str, frozenset[str]]:
    """The labels of each recorded series, as its name says: `training_job_level:...` has two."""
    found = {}
    for rule in read_rules():
        if "record" in rule:
            rest = rule["record"].partition(":")[0].removeprefix("training_job").split("_")
            found[rule["record"]] = frozenset({"training_job", *filter(None, rest)})
    return found


def labels_of(expr: str, recorded: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The labels that the result has."""
    problems: list[str] = []
    labels = _labels_of(parse(expr), recorded, problems)
    assert not problems, problems
    return labels


def _metric_of(name: str) -> tuple[names.Metric | None, frozenset[str]]:
    """The metric that a series belongs to, and the label that its buckets have beside."""
    for suffix in ("_bucket", "_sum", "_count"):
        metric = BY_NAME.get(name.removesuffix(suffix))
        if name.endswith(suffix) and metric is not None and metric.kind is Kind.HISTOGRAM:
            return metric, frozenset({"le"} if suffix == "_bucket" else ())
    metric = BY_NAME.get(name)
    return (None if metric is None or metric.kind is Kind.HISTOGRAM else metric), frozenset()


def _labels_of_series(name: str, recorded: Mapping[str, frozenset[str]]) -> frozenset[str]:
    if name in recorded:
        return recorded[name]
    metric, more = _metric_of(name)
    assert metric is not None, name
    return TARGET_LABELS | frozenset(metric.labels) | more


def _problems_of_selector(selector: promql.VectorSelector, recorded: Mapping[str, frozenset[str]]) -> list[str]:
    name = selector.name or ""
    metric, _ = _metric_of(name)
    if metric is None and name not in recorded:
        return [f"{name} is in no catalogue"]
    problems = []
    for matcher in selector.matchers.matchers:
        if matcher.name not in _labels_of_series(name, recorded):
            problems.append(f"{name} has no label {matcher.name}")
        allowed = VALUES.get((metric.name if metric else name, matcher.name))
        asked = set(matcher.value.split("|")) - CHOSEN
        if allowed is not None and asked - allowed:
            problems.append(f"{matcher.name} of {name} is never {sorted(asked - allowed)}")
    return problems


def _labels_of(expr: Any, recorded: Mapping[str, frozenset[str]], problems: list[str]) -> frozenset[str]:
    match expr:
        case promql.VectorSelector():
            return _labels_of_series(expr.name or "", recorded)
        case promql.MatrixSelector():
            return _labels_of(expr.vector_selector, recorded, problems)
        case promql.Call():
            inside = [_labels_of(each, recorded, problems) for each in expr.args]
            labels = frozenset[str]().union(*inside)
            return labels - {"le"} if expr.func.name == "histogram_quantile" else labels
        case promql.AggregateExpr():
            return _labels_of_aggregate(expr, _labels_of(expr.expr, recorded, problems), problems)
        case promql.BinaryExpr():
            left = _labels_of(expr.lhs, recorded, problems)
            return _labels_of_binary(expr, left, _labels_of(expr.rhs, recorded, problems), problems)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels_of(expr.expr, recorded, problems)
        case _:
            return frozenset()


def _labels_of_aggregate(
    expr: promql.AggregateExpr, inside: frozenset[str], problems: list[str]
) -> frozenset[str]:
    if str(expr.op) in {"topk", "bottomk"}:
        return inside
    if expr.modifier is None:
        return frozenset()
    named = frozenset(expr.modifier.labels)
    if named - inside:
        problems.append(f"groups by {sorted(named - inside)}, has {sorted(inside)}")
    return named if expr.modifier.type == promql.AggModifierType.By else inside - named


def _labels_of_binary(
    expr: promql.BinaryExpr, left: frozenset[str], right: frozenset[str], problems: list[str]
) -> frozenset[str]:
    if isinstance(expr.rhs, promql.NumberLiteral):
        return left
    if isinstance(expr.lhs, promql.NumberLiteral):
        return right
    if str(expr.op) == "or":
        return left | right
    matching = expr.modifier.matching if expr.modifier else None
    named = frozenset(matching.labels) if matching else frozenset()
    if named - (left | right):
        problems.append(f"matches on {sorted(named - (left | right))}, has {sorted(left | right)}")
    if matching is not None and matching.type == promql.LabelModifierType.Include:
        both = named, named
    else:
        both = left - named, right - named
    if both[0] != both[1]:
        problems.append(f"{sorted(both[0])} never matches {sorted(both[1])}")
    is_many = expr.modifier is not None and expr.modifier.card == promql.VectorMatchCardinality.ManyToOne
    return left if is_many or str(expr.op) in _SET_OPERATORS else both[0]
