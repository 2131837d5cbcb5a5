"""A real Prometheus looks at a real job of three nodes, in which a worker dies, a replica is spoilt, and a node
is killed, comes back, and leaves in the end. Every expression of every panel, variable, annotation and rule is
run against it.
"""

import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.catalogue import CATALOGUE, Kind
from tests.dashboards.expressions import (
    FOLDER,
    Expression,
    labels_of,
    of_dashboards,
    of_rules,
    recorded_labels,
    selectors_of,
)
from tests.dashboards.prometheus_server import PrometheusServer, Series, prometheus_server
from tests.elastic.jobs import RunningJob, running_job

HIERARCHY = "node=4,zone=8,global=16"
ZONES = {"a": "z1", "b": "z1", "c": "z2"}
# Enough scrapes for a rate, at any moment.
WINDOW = "5s"
# Within so long what has happened is scraped and shown, on a busy machine.
SEEN_S = 10.0
LEFT = 143
# What Prometheus adds of itself.
OWN_LABELS = {"__name__", "instance", "job"}
_PORT = re.compile(r"metrics and status of this node: http://[^ ]*:(\d+)/")

pytestmark = pytest.mark.needs("prometheus", apt="prometheus")


@dataclass(frozen=True, slots=True)
class Observed:
    """A job whose life Prometheus has seen. Times are seconds since the epoch."""

    server: PrometheusServer
    job: RunningJob
    begin_s: float
    killed_s: float
    back_s: float
    end_s: float
    ports: dict[str, int]

    def fill_in(self, expr: str) -> str:
        """What Grafana puts in for its variables, and an alert for its labels."""
        seconds = int(self.end_s - self.begin_s)
        for name, value in {
            "$__rate_interval": WINDOW,
            "$__range": f"{seconds}s",
            "$training_job": self.job.run_id,
            "$node": ".+",
            "$level": ".+",
            "$reason": "killed",
        }.items():
            expr = expr.replace(name, value)
        return expr

    def run(self, expression: Expression) -> list[Series]:
        expr = self.fill_in(expression.expr)
        if expression.is_instant:
            return self.server.query(expr, at_s=self.end_s)
        return self.over_time(expr)

    def over_time(self, expr: str) -> list[Series]:
        return self.server.query_range(expr, begin_s=self.begin_s, end_s=self.end_s)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    with (
        prometheus_server(folder / "prometheus", rules=FOLDER / "rules.yaml") as server,
        running_job(
            folder / "watched", nnodes="1:3", hierarchy=HIERARCHY, flags=["--metrics-port", "auto"]
        ) as job,
    ):
        yield _live_through(server, job)
        job.finish()


def _live_through(server: PrometheusServer, job: RunningJob) -> Observed:
    begin_s = time.time()
    ports: dict[str, int] = {}
    # The embedded store is a's.
    _start(server, job, ports, "a")
    job.wait_for("a serves", lambda: "start" in [line["event"] for line in job.lines()])
    _start(server, job, ports, "b", "c")
    job.await_together("a", "b", "c")
    _await_nodes(server, training=3, lost=0)
    job.order("a", "nan")
    job.kill_worker("b")
    job.await_together("a", "c")
    job.await_together("a", "b", "c")
    _await_nodes(server, training=3, lost=0)
    killed_s = time.time()
    job.kill("c")
    job.await_together("a", "b")
    _await_nodes(server, training=2, lost=1)
    _start(server, job, ports, "c")
    job.await_together("a", "b", "c")
    back_s = time.time()
    _await_nodes(server, training=3, lost=0)
    server.wait_for(
        "the steps of all are seen",
        lambda: len(server.query(f"sum by (node) (rate({names.STEPS}[{WINDOW}])) > 0")) == 3,
    )
    assert job.terminate("c") == LEFT
    _await_nodes(server, training=2, lost=0)
    faults = {"worker ordered to nan": 1, "worker killed": 1, "node killed": 1, "node asked to leave": 1}
    assert job.faults == faults
    return Observed(server, job, begin_s, killed_s, back_s, time.time(), ports)


def _start(server: PrometheusServer, job: RunningJob, ports: dict[str, int], *nodes: str) -> None:
    """Start nodes, and have them scraped from their first moment on."""
    known = {node: len(_PORT.findall(job.log(node))) if node in job.nodes else 0 for node in nodes}
    for node in nodes:
        job.start(node, flags=["--label", f"zone={ZONES[node]}"])
    for node in nodes:
        job.wait_for(f"{node} serves metrics", lambda: len(_PORT.findall(job.log(node))) > known[node])  # noqa: B023
        ports[node] = int(_PORT.findall(job.log(node))[-1])
        server.scrape(node, ports[node], training_job=job.run_id)


def _await_nodes(server: PrometheusServer, *, training: int, lost: int) -> None:
    """Until everybody who is scraped sees so many."""

    def is_seen() -> bool:
        found = {
            state: {series.values[0] for series in server.query(f'{names.NODES}{{state="{state}"}}')}
            for state in ("training", "lost", "leaving")
        }
        return found == {"training": {training}, "lost": {lost}, "leaving": {0}}

    server.wait_for(f"{training} nodes train and {lost} are lost", is_seen)


# --- what is run ----------------------------------------------------------------------------------------------


def test_every_expression_of_the_dashboards_returns_data(observed: Observed) -> None:
    found = {each.where: _what_is_wrong(observed, each) for each in of_dashboards() if each.kind != "variable"}
    assert len(found) > 50
    assert {where: problem for where, problem in found.items() if problem} == {}


def _what_is_wrong(observed: Observed, expression: Expression) -> str:
    series = observed.run(expression)
    if not any(each.has_number for each in series):
        return f"no data: {observed.fill_in(expression.expr)}"
    wanted = labels_of(expression.expr, recorded_labels())
    for each in series:
        if each.labels.keys() - OWN_LABELS != wanted:
            return f"has {dict(each.labels)}, not {sorted(wanted)}"
        if each.labels.get("node", "a") not in ZONES:
            return f"has the node {each.labels['node']}"
    return ""


@pytest.mark.parametrize(
    ("variable", "values"),
    [("training_job", {"watched"}), ("node", {"a", "b", "c"}), ("level", {"node", "zone", "global"})],
)
def test_variables_offer_what_is_there(observed: Observed, variable: str, values: set[str]) -> None:
    asked = [each for each in of_dashboards() if each.where.endswith(f"${variable}")]
    assert len(asked) == 2
    for each in asked:
        assert set(observed.server.label_values(observed.fill_in(each.expr), each.label)) == values


def test_rules_are_evaluated_and_find_their_series(observed: Observed) -> None:
    rules = observed.server.rules()
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    for name, labels in recorded_labels().items():
        series = observed.server.query(name)
        assert any(each.has_number for each in series), name
        assert {frozenset(each.labels) - OWN_LABELS for each in series} == {labels}, name
    for expression in of_rules():
        observed.run(expression)
        for selector in selectors_of(observed.fill_in(expression.expr)):
            # The past of a job that is older than this one is in promtool's tests.
            if not selector.offset:
                assert observed.over_time(str(selector)), f"{expression.where}: {selector} finds nothing"


def test_the_alert_for_the_spoilt_replica_fires_and_no_other(observed: Observed) -> None:
    """The others have to last for minutes, and the job has healed before."""
    alerts = observed.server.alerts()
    firing = {name for name, alert in alerts.items() if alert["state"] == "firing"}
    assert firing == {"HieravgNonFinite"}
    alert = alerts["HieravgNonFinite"]
    assert alert["labels"]["training_job"] == observed.job.run_id
    assert "a replica of watched had NaN or infinity" in alert["annotations"]["summary"]


# --- what is seen ---------------------------------------------------------------------------------------------


def test_counters_of_agents_that_lived_never_go_back(observed: Observed) -> None:
    seconds = int(observed.end_s - observed.begin_s) + 1
    counters = {metric.name for metric in CATALOGUE if metric.kind is Kind.COUNTER}
    counters |= {
        f"{metric.name}_{part}"
        for metric in CATALOGUE
        if metric.kind is Kind.HISTOGRAM
        for part in ("bucket", "sum", "count")
    }
    for name in sorted(counters):
        series = observed.server.query(f'resets({name}{{node=~"a|b"}}[{seconds}s])', at_s=observed.end_s)
        assert series, name
        assert {each.values[0] for each in series} == {0.0}, name
    # b's workers were started anew, and the count of their steps went on.
    (restarts,) = observed.server.query(f'sum({names.WORKER_RESTARTS}{{node="b",reason="killed"}})')
    assert restarts.values == [1.0]


def test_the_change_is_seen_in_the_generation_and_annotated(observed: Observed) -> None:
    (series,) = observed.over_time(f'{names.GENERATION}{{node="a"}}')
    assert series.values == sorted(series.values)
    # The last changes may have come after the last scrape that was looked at.
    assert 0 < series.values[-1] <= observed.job.newest("a")
    kinds = [made.kind for made in observed.job.generations("a")]
    assert (kinds[0], kinds.count("loss"), kinds.count("round")) == ("start", 3, 1)
    before = [value for at_s, value in series.points if at_s < observed.killed_s]
    after = [value for at_s, value in series.points if at_s < observed.back_s + SEEN_S]
    assert after[-1] >= before[-1] + 2, "one without c, one with it"
    for reason in ("loss", "join"):
        (shown,) = _annotated(observed, reason)
        assert any(observed.killed_s < at_s < observed.back_s + SEEN_S for at_s, _ in shown.points)


def _annotated(observed: Observed, reason: str) -> list[Series]:
    (expression,) = {
        each.expr: each
        for each in of_dashboards()
        if each.kind == "annotation" and f'reason="{reason}"' in each.expr
    }.values()
    return observed.run(expression)


def test_all_phases_of_the_recovery_are_told(observed: Observed) -> None:
    series = observed.over_time(f"sum by (phase, node) ({names.RECOVERY_SECONDS}_count)")
    assert {each.labels["phase"] for each in series if each.values[-1] > 0} == set(names.Phase)
    # The first loss is an increase too.
    assert {each.values[0] for each in series if each.labels["node"] == "a"} == {0.0}


def test_promtool_finds_nothing_wrong_with_the_metrics(observed: Observed) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{observed.ports['a']}/metrics", timeout=30) as answer:
        text = answer.read()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
