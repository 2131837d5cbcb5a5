"""The dashboards' JSON: up to date, of the catalogue's metrics and labels, and complete for its readers."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.build import generated
from elastic_hieravg.metrics.catalogue import CATALOGUE
from tests.dashboards.expressions import (
    DASHBOARDS,
    FOLDER,
    Expression,
    everything,
    of_dashboards,
    panels_of,
    parse,
    problems_of,
    read_dashboard,
    recorded_labels,
    selectors_of,
)

GRID_WIDTH = 24


@pytest.mark.parametrize("name", generated())
def test_files_are_what_the_builders_make(name: str) -> None:
    assert (FOLDER / name).read_text() == generated()[name], "run `python -m dashboards.build`"


def test_every_metric_and_label_is_in_the_catalogue() -> None:
    recorded = recorded_labels()
    found = {each.where: problems_of(each, recorded=recorded) for each in everything()}
    assert len(found) > 80
    assert {where: problems for where, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    ("expr", "legend", "problem"),
    [
        ("hieravg_step_total", "", "hieravg_step_total is in no catalogue"),
        ("hieravg_step_seconds", "", "hieravg_step_seconds is in no catalogue"),
        ("hieravg_steps_total_bucket", "", "hieravg_steps_total_bucket is in no catalogue"),
        ('hieravg_steps_total{job="a"}', "", "has no label job"),
        ('hieravg_nodes{state="dead"}', "", "state of hieravg_nodes is never ['dead']"),
        ('hieravg_generations_total{reason!~"loss|joined"}', "", "is never ['joined']"),
        ("sum by (level) (hieravg_steps_total)", "", "groups by ['level']"),
        ("sum by (node) (hieravg_steps_total)", "{{local_rank}}", "shows ['local_rank']"),
        ("sum by (node) (hieravg_steps_total) / sum(hieravg_steps_total)", "", "['node'] never matches []"),
        ("hieravg_generation * on (level) hieravg_store_up", "", "matches on ['level']"),
        ("training_job:hieravg_steps:rate9m", "", "training_job:hieravg_steps:rate9m is in no catalogue"),
    ],
)
def test_what_is_not_in_the_catalogue_is_found(expr: str, legend: str, problem: str) -> None:
    found = problems_of(Expression("here", "panel", expr, legend), recorded=recorded_labels())
    assert problem in str(found)


def test_every_metric_of_the_catalogue_is_shown() -> None:
    shown = {str(each.name) for expression in of_dashboards() for each in selectors_of(expression.expr)}
    bare = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    assert {metric.name for metric in CATALOGUE} - bare == set()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_can_be_read(name: str) -> None:
    for panel in panels_of(read_dashboard(name)):
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        assert len(panel["description"]) > 20, title
        assert panel["description"].endswith("."), title
        assert defaults["unit"], title
        assert defaults["thresholds"]["steps"][0]["value"] is None, title
        assert panel["targets"], title
        for target in panel["targets"]:
            assert target["legendFormat"] not in ("", "__auto"), title
            assert target["datasource"]["uid"] == "${datasource}", title
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["showLegend"], title


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_are_numbered_and_do_not_cover_each_other(name: str) -> None:
    panels = read_dashboard(name)["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= GRID_WIDTH, panel["title"]
    for one, other in itertools.combinations(panels, 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    # Every row of panels is full: nothing is left to the right of it.
    widths: dict[int, int] = {}
    for panel in panels:
        widths[panel["gridPos"]["y"]] = widths.get(panel["gridPos"]["y"], 0) + panel["gridPos"]["w"]
    assert set(widths.values()) == {GRID_WIDTH}


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


def test_both_dashboards_are_told_apart_and_lead_to_each_other() -> None:
    found = [read_dashboard(name) for name in DASHBOARDS]
    assert [each["uid"] for each in found] == ["hieravg-training", "hieravg-membership"]
    for dashboard in found:
        (link,) = dashboard["links"]
        assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)
        assert all(set(link["tags"]) <= set(other["tags"]) for other in found)
        assert _variables(dashboard).keys() == {"datasource", "training_job", "node", "level"}
        assert [name for name, each in _variables(dashboard).items() if each.get("multi")] == ["node", "level"]
        assert [name for name, each in _variables(dashboard).items() if each.get("includeAll")] == [
            "node",
            "level",
        ]


def _variables(dashboard: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in dashboard["templating"]["list"]}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_changes_are_annotated_on_all_panels(name: str) -> None:
    annotations = read_dashboard(name)["annotations"]["list"]
    assert [each["name"] for each in annotations] == ["Nodes gone", "Nodes joined", "Other generations"]
    for annotation in annotations:
        assert annotation["enable"]
        assert "filter" not in annotation, "it would be on some panels only"
        assert annotation["target"]["expr"] == annotation["expr"]
        assert not annotation["hide"]


def test_every_panel_shows_the_chosen_job_only() -> None:
    for expression in of_dashboards():
        parse(expression.expr)
        if expression.where.endswith("$training_job"):
            continue
        for selector in selectors_of(expression.expr):
            assert 'training_job="$training_job"' in str(selector), expression


def test_windows_follow_the_zoom_or_are_named_in_the_title() -> None:
    """A window shorter than some scrapes has no data; one that is fixed has to be said."""
    named = {"24h": "24 h", "1h": "hour", "5m": "5 minutes"}
    for name in DASHBOARDS:
        for panel in panels_of(read_dashboard(name)):
            windows = {each for target in panel["targets"] for each in re.findall(r"\[(.*?)\]", target["expr"])}
            for window in windows - {"$__rate_interval", "$__range"}:
                said = panel["title"] + panel["description"]
                assert named[window] in said, panel["title"]


@pytest.mark.needs("kubectl", apt="kubectl")
def test_kustomize_includes_dashboards_and_rules(tmp_path: Path) -> None:
    """As another folder's component, with kubectl alone."""
    shutil.copytree(FOLDER, tmp_path / "dashboards")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "kustomization.yaml").write_text("components: [../dashboards]\nnamePrefix: my-\n")
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "job"], capture_output=True, text=True, timeout=60, check=True
    )
    objects = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert objects.keys() == {"ConfigMap", "PrometheusRule"}
    configs, rule = objects["ConfigMap"], objects["PrometheusRule"]
    assert configs["metadata"]["labels"] == {"grafana_dashboard": "1"}
    for name in DASHBOARDS:
        assert configs["data"][f"hieravg-{name}.json"] == (FOLDER / f"{name}.json").read_text()
    assert rule["spec"] == yaml.safe_load((FOLDER / "rules.yaml").read_text())
