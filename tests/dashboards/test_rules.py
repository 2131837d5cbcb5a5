"""Recording and alerting rules: of the catalogue, explained in the runbook, shown to fire and not to."""

import json
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.training import EXPOSED_BUDGET
from tests.dashboards.expressions import (
    DASHBOARDS,
    FOLDER,
    TARGET_LABELS,
    labels_of,
    of_rules,
    panels_of,
    read_dashboard,
    read_rules,
    recorded_labels,
    selectors_of,
)

RULES = FOLDER / "rules.yaml"
CASES = FOLDER / "rules_test.yaml"
RUNBOOK = (FOLDER / "runbook.md").read_text()
ALERTS = [rule for rule in read_rules() if "alert" in rule]
RECORDED = [rule for rule in read_rules() if "record" in rule]

promtool = pytest.mark.needs("promtool", apt="prometheus")


def names_of(alert: dict[str, Any]) -> str:
    return str(alert["alert"])


def run_promtool(*arguments: object) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@promtool
def test_promtool_accepts_the_rules() -> None:
    assert f"{len(ALERTS) + len(RECORDED)} rules found" in run_promtool("check", "rules", RULES)


@promtool
def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in run_promtool("test", "rules", CASES)


@promtool
def test_the_readme_shows_how_to_scrape_and_load_them(tmp_path: Path) -> None:
    text = (FOLDER.parent / "README.md").read_text()
    settings, targets = (
        textwrap.dedent(re.findall(rf"^    {first}.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)[0])
        for first in (r"# prometheus\.yml", r"\[\n      \{")
    )
    assert {frozenset(each["labels"]) for each in json.loads(targets)} == {TARGET_LABELS}
    (tmp_path / "prometheus.yml").write_text(settings)
    (tmp_path / "hieravg.json").write_text(targets)
    (tmp_path / "dashboards").symlink_to(FOLDER)
    told = run_promtool("check", "config", tmp_path / "prometheus.yml")
    assert f"{len(ALERTS) + len(RECORDED)} rules found" in told
    assert f"{len(ALERTS)} alerts" in text


@pytest.mark.parametrize("alert", ALERTS, ids=names_of)
def test_every_alert_has_cases_of_both_kinds(alert: dict[str, Any]) -> None:
    cases = [
        case
        for test in yaml.safe_load(CASES.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == alert["alert"]
    ]
    assert any(case["exp_alerts"] for case in cases), "it never fires"
    assert any(not case["exp_alerts"] for case in cases), "it always fires"


@pytest.mark.parametrize("alert", ALERTS, ids=names_of)
def test_every_alert_says_what_it_is_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in {"critical", "warning"}
    texts = alert["annotations"]
    assert texts.keys() == {"summary", "description", "runbook_url"}
    assert "$labels.training_job" in texts["summary"]
    assert "$value" in texts["summary"] + texts["description"] or "store" in texts["summary"]
    anchor = alert["alert"].lower()
    assert texts["runbook_url"] == f"dashboards/runbook.md#{anchor}"
    (entry,) = re.findall(rf"^## {alert['alert']}\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\*\*(.*?)\.\*\*", entry, re.MULTILINE) == ["Means", "Look at", "Do", "Numbers"]


def test_the_runbook_has_no_entry_for_an_alert_that_is_gone() -> None:
    assert re.findall(r"^## (\w+)", RUNBOOK, re.MULTILINE) == [alert["alert"] for alert in ALERTS]
    anchors = {alert["alert"].lower() for alert in ALERTS}
    assert set(re.findall(r"\]\(#(\w+)\)", RUNBOOK)) <= anchors


def test_the_runbook_names_panels_that_are_there() -> None:
    titles = {panel["title"] for name in DASHBOARDS for panel in panels_of(read_dashboard(name))}
    named = set(re.findall(r'"([A-Z][^"]+)"', RUNBOOK))
    assert len(named) > 10
    assert named - titles == set()


def test_recorded_series_are_named_by_their_labels_and_used() -> None:
    labels = recorded_labels()
    asked = {str(each.name) for expression in of_rules() for each in selectors_of(expression.expr)}
    for rule in RECORDED:
        name = rule["record"]
        assert re.fullmatch(r"training_job(_[a-z]+)?:hieravg_[a-z_]+:[a-z_]*\d+[mh]", name)
        assert labels_of(rule["expr"], labels) == labels[name], name
        assert name in asked, f"{name} is for nothing"


def test_the_dashboard_shows_the_budget_of_the_alert() -> None:
    (alert,) = [each for each in ALERTS if each["alert"] == "HieravgExposedCommunication"]
    assert alert["expr"].endswith(f"> {EXPOSED_BUDGET}")
    assert f"budget of {EXPOSED_BUDGET:.0%}".replace("%", " %") in alert["annotations"]["description"]
