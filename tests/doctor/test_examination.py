"""A whole examination, from flags to findings, on a machine that is made up; and how it is told."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_hieravg.doctor.findings import Section, Severity, count, document, note, ok, problem, warning
from elastic_hieravg.doctor.software import Software
from elastic_hieravg.doctor.text import lines
from elastic_hieravg.errors import UsageError
from tests.doctor.patients import SOFTWARE, examined, only, severities
from tests.membership.etcd_servers import free_ports

ROOT = Path(__file__).parent.parent.parent
SECTIONS = ["software", "machine", "names", "ports", "settings", "store", "pod", "peer"]
TWO_NODES = ("--nnodes", "1:2", "--local-addr", "127.0.0.1", "--rdzv-endpoint")


def test_a_node_that_is_well_has_no_problems() -> None:
    found = examined("--nproc-per-node", "2", "--params", "1M")
    assert list(found) == SECTIONS
    assert count(list(found.values()), Severity.PROBLEM) == 0
    assert count(list(found.values()), Severity.WARNING) == 0


@pytest.mark.parametrize(
    ("arguments", "check", "found"),
    [
        (["--lease-ttl-s", "0.5"], "flags", "--lease-ttl-s is '0.5'"),
        (["--hang-timeout-s", "0.1"], "flags", "--hang-timeout-s is '0.1'"),
        (["--hierarchy", "node=4,global=6"], "flags", "not a multiple of the 4 of node"),
        (
            ["--hierarchy", "zone=4,global=8"],
            "flags",
            "level zone of --hierarchy zone=4,global=8 needs a label",
        ),
        (["--rdzv-conf", "jointimeout=3"], "flags", "--rdzv-conf has jointimeout, which is unknown"),
        (["--metrics-port", "many"], "flags", "--metrics-port is 'many'"),
        (["--nnodes", "1:2"], "flags", "--rdzv-endpoint is ''"),
        (["--rdzv-backend", "zookeeper"], "flags", "--rdzv-backend is zookeeper"),
    ],
)
def test_settings_that_an_agent_would_refuse_are_problems(arguments: list[str], check: str, found: str) -> None:
    finding = only(examined(*arguments)["settings"].findings, check)
    assert finding.severity is Severity.PROBLEM
    assert found in finding.found
    assert finding.advice


def test_a_user_without_tls_is_a_problem(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("correct horse\n")
    conf = f"user=me,password_file={secret}"
    found = examined("--rdzv-backend", "etcd3", "--rdzv-endpoint", "127.0.0.1:1", "--rdzv-conf", conf)
    assert "and no cacert, without which there is no TLS" in only(found["settings"].findings, "flags").found
    assert severities(found["store"].findings) == {Severity.ABSENT}
    assert "correct horse" not in json.dumps(document(list(found.values())))


def test_an_endpoint_without_an_address_is_told_once_and_stops_nothing() -> None:
    found = examined("--nnodes", "1:2", "--rdzv-endpoint", "h9:29400")
    assert only(found["names"].findings, "name h9").severity is Severity.PROBLEM
    assert only(found["names"].findings, "address for others").severity is Severity.ABSENT
    assert only(found["settings"].findings, "lease").severity is Severity.OK


def test_a_free_endpoint_of_this_machine_is_well() -> None:
    (port,) = free_ports(1)
    found = examined(*TWO_NODES, f"127.0.0.1:{port}")
    assert only(found["ports"].findings, f"endpoint 127.0.0.1:{port}").severity is Severity.OK
    assert only(found["names"].findings, "address for others").severity is Severity.WARNING


def test_a_misspelt_variable_is_told_with_the_name_that_is_meant() -> None:
    environment = {"HIERAVG_HIERACHY": "global=4", "PET_NNODE": "2", "PET_RDZV_CONF": ""}
    found = examined(environment=environment)["settings"].findings
    assert {each.advice for each in found if each.check == "variables"} == {
        "is it HIERAVG_HIERARCHY?",
        "is it PET_NNODES?",
    }


def test_every_variable_of_our_manifests_is_read() -> None:
    manifests = "".join(path.read_text() for path in (ROOT / "k8s").rglob("*.yaml"))
    names = set(re.findall(r"\b(?:HIERAVG|PET)_[A-Z_]+[A-Z]\b", manifests))
    assert {"HIERAVG_GRACE_S", "PET_RDZV_ENDPOINT"} <= names
    from torch.distributed.run import get_args_parser

    flags = tuple(action.dest for action in get_args_parser()._actions)
    found = examined(software=replace(SOFTWARE, flags=flags), environment=dict.fromkeys(names, ""))
    assert only(found["settings"].findings, "variables").severity is Severity.OK


def test_without_torch_nothing_is_said_about_its_variables() -> None:
    found = examined(software=Software(why="no torch"), environment={"PET_XYZZY": "2"})
    assert only(found["settings"].findings, "variables").severity is Severity.ABSENT


def test_workers_are_counted_as_torch_does() -> None:
    assert "8 workers" in only(examined("--nproc-per-node", "auto")["machine"].findings, "cores").found
    gpus = replace(SOFTWARE, accelerator="cuda", num_accelerators=3)
    assert (
        "3 workers"
        in only(examined("--nproc-per-node", "gpu", software=gpus)["machine"].findings, "cores").found
    )


def test_a_pod_is_looked_at_with_its_own_settings(tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    labels.write_text('topology.kubernetes.io/zone="z1"\n')
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HIERAVG_LABELS_FILE": str(labels)}
    found = examined("--grace-s", "40", environment=pod)["pod"].findings
    assert "zone=z1" in only(found, "labels").found
    assert only(found, "grace").advice == "let terminationGracePeriodSeconds be 55 or more"


def test_a_service_without_an_address_is_told_once() -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    found = examined("--nnodes", "1:2", "--rdzv-endpoint", "h9.hieravg:29400", environment=pod)
    (told,) = [each for section in found.values() for each in section.findings if "h9.hieravg" in each.check]
    assert (told.check, told.severity) == ("service h9.hieravg", Severity.PROBLEM)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--nnodes", "two"], "--nnodes is 'two'"),
        (["--nproc-per-node", "0"], "--nproc-per-node is '0'"),
        (["--nproc-per-node", "9" * 5000], "--nproc-per-node is '9999"),
        (["--rdzv-conf", "join_timeout"], "--rdzv-conf has 'join_timeout'"),
        (["--params", "many"], "--params is 'many'"),
        (["--peer", "h2:port"], "--peer is 'h2:port'"),
        (["--peer", ":1"], "--peer is ':1'"),
    ],
)
def test_what_cannot_be_read_is_a_usage_error(arguments: list[str], found: str) -> None:
    with pytest.raises(UsageError) as raised:
        examined(*arguments)
    assert found in str(raised.value)


SICK = [
    Section("names", (ok("own name", "h1"), warning("interface", "eth0", "take ib0"))),
    Section(
        "ports", (problem("listening", "not allowed", "allow it"), note("metrics", "taken", "take another"))
    ),
]


def test_people_get_one_line_for_each_check_and_what_to_do_at_the_end() -> None:
    assert "\n".join(map(str, lines(SICK))).splitlines() == [
        "names",
        "  ok       own name   h1",
        "  warning  interface  eth0",
        "",
        "ports",
        "  problem  listening  not allowed",
        "  note     metrics    taken (take another)",
        "",
        "problem: ports, listening: not allowed",
        "  do: allow it",
        "warning: names, interface: eth0",
        "  do: take ib0",
        "1 problem, 1 warning, 1 note, 1 ok",
    ]


def test_scripts_get_one_document() -> None:
    told = json.loads(json.dumps(document(SICK)))
    assert told["counts"] == {"problem": 1, "warning": 1, "note": 1, "ok": 1}
    assert told["findings"][2] == {
        "group": "ports",
        "check": "listening",
        "severity": "problem",
        "found": "not allowed",
        "advice": "allow it",
    }


def test_a_value_stays_on_its_line_and_does_nothing_to_a_terminal() -> None:
    told = lines([Section("x", (ok("y", "a\nb\x1b[31m"),))])
    assert str(told[1]) == "  ok       y  a b [31m"
