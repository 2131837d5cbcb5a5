"""Each check, made to fail by one thing that is wrong; all of it on values, without the real machine."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_hieravg.agent.elastic_agent import LEAVE_S, STOP_TIMEOUT_S
from elastic_hieravg.config import MetricsPlace
from elastic_hieravg.doctor import network, pods, resources, software, timeouts
from elastic_hieravg.doctor.children import Lookup
from elastic_hieravg.doctor.findings import Finding, Severity
from elastic_hieravg.doctor.machine import Interface, Machine, Mount
from elastic_hieravg.doctor.software import Software
from tests.doctor.patients import GIB, MACHINE, SOFTWARE, only, severities

OK, NOTE, WARNING, PROBLEM, ABSENT = (
    Severity.OK,
    Severity.NOTE,
    Severity.WARNING,
    Severity.PROBLEM,
    Severity.ABSENT,
)

# --- software -------------------------------------------------------------------------------------------------


def test_software_that_goes_together_is_well() -> None:
    assert severities(software.check_software(SOFTWARE, needs_etcd=True)) == {OK}


@pytest.mark.parametrize(
    ("ill", "check", "severity", "found"),
    [
        (Software(why="no answer within 90 s"), "software", PROBLEM, "no answer within 90 s"),
        (replace(SOFTWARE, python="3.10.4"), "Python", PROBLEM, "3.10.4, older than 3.11"),
        (replace(SOFTWARE, versions={"torch": "2.1.0"}), "torch", NOTE, "2.1.0; 2.13 is the version"),
        (replace(SOFTWARE, versions={"torch": "2.130.0"}), "torch", NOTE, "2.130.0"),
        (replace(SOFTWARE, torch_why="ImportError: no torch", versions={}), "torch", PROBLEM, "no torch"),
        (replace(SOFTWARE, has_gloo=False), "gloo", PROBLEM, "this torch has no gloo"),
        (
            replace(SOFTWARE, accelerator="cuda", num_accelerators=8, backend="nccl"),
            "accelerator",
            NOTE,
            "8 cuda; torch's backend would be nccl",
        ),
        (
            replace(SOFTWARE, etcd_why="TypeError: Descriptors"),
            "etcd client",
            PROBLEM,
            "TypeError: Descriptors",
        ),
    ],
)
def test_software_that_does_not(ill: Software, check: str, severity: Severity, found: str) -> None:
    finding = only(software.check_software(ill, needs_etcd=True), check)
    assert finding.severity is severity
    assert found in finding.found
    assert finding.advice


def test_an_etcd_client_that_nobody_needs_is_not_counted() -> None:
    ill = replace(SOFTWARE, etcd_why="TypeError: Descriptors")
    assert only(software.check_software(ill, needs_etcd=False), "etcd client").severity is ABSENT


@pytest.mark.parametrize("answer", ["exit code -11: ", {}, {"torch": [], "versions": 3, "etcd": None}])
def test_whatever_a_probe_answers_is_read(answer: dict[str, object] | str) -> None:
    found = list(software.check_software(software.read_software(answer), needs_etcd=True))
    assert PROBLEM in severities(found)


# --- machine --------------------------------------------------------------------------------------------------


def resources_of(machine: Machine = MACHINE, **changes: object) -> list[Finding]:
    asked: dict[str, object] = {
        "slots": 2,
        "num_ranks": 8,
        "params": 125_000_000,
        "is_restarting": False,
        "has_accelerator": False,
        "threads": "",
    }
    return list(resources.check_resources(machine, **(asked | changes)))  # type: ignore[arg-type]


def test_a_machine_with_enough_is_well() -> None:
    assert severities(resources_of()) == {OK, ABSENT}


SMALL = Mount("tmpfs", 2 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("machine", "changes", "check", "severity", "found"),
    [
        (replace(MACHINE, cores=1.0), {}, "cores", WARNING, "1 core for 2 workers"),
        (MACHINE, {"threads": "8"}, "OMP_NUM_THREADS", WARNING, "8 threads for each of 2 workers on 8 cores"),
        (MACHINE, {"threads": "many"}, "OMP_NUM_THREADS", WARNING, "'many'"),
        (MACHINE, {"params": 10**12}, "memory", PROBLEM, "2 workers with AdamW need about 40 TB"),
        (replace(MACHINE, available_bytes=GIB), {}, "memory", WARNING, "1.07 GB of 68.7 GB free"),
        (replace(MACHINE, shared_memory=None), {}, "shared memory", WARNING, "there is none"),
        (replace(MACHINE, shared_memory=SMALL), {}, "shared memory", WARNING, "snapshots with AdamW need 3 GB"),
        (
            replace(MACHINE, shared_memory=SMALL),
            {"is_restarting": True},
            "shared memory",
            PROBLEM,
            "snapshots with AdamW need 6 GB: workers that start anew begin at step 0",
        ),
        (
            replace(MACHINE, shared_memory=Mount("tmpfs", 64 << 20, 64 << 20)),
            {"params": None},
            "shared memory",
            WARNING,
            "67.1 MB of 67.1 MB free",
        ),
        (
            replace(MACHINE, open_files_max=256),
            {},
            "open files",
            WARNING,
            "256 for up to 8 ranks; about 320 are needed",
        ),
        (
            replace(MACHINE, locked_bytes_max=8 << 20),
            {"has_accelerator": True},
            "locked memory",
            NOTE,
            "8.39 MB",
        ),
    ],
)
def test_a_machine_that_lacks_something(
    machine: Machine, changes: dict[str, object], check: str, severity: Severity, found: str
) -> None:
    finding = only(resources_of(machine, **changes), check)
    assert finding.severity is severity
    assert found in finding.found
    assert finding.advice


# --- names ----------------------------------------------------------------------------------------------------


def names_of(machine: Machine = MACHINE, **changes: object) -> list[Finding]:
    asked: dict[str, object] = {
        "own": Lookup("h1", ("10.0.0.1",), 0.01),
        "reverse": Lookup("10.0.0.1", ("h1",), 0.01),
        "endpoints": [Lookup("h2", ("10.0.0.2",), 0.01)],
        "address": "10.0.0.1",
        "nodes_max": 4,
        "gloo_interface": "",
    }
    return list(network.check_names(machine, **(asked | changes)))  # type: ignore[arg-type]


def test_names_that_lead_to_the_right_interface_are_well() -> None:
    assert severities(names_of()) == {OK, ABSENT}
    assert only(names_of(), "interface").found == "eth0 10000 Mbit/s"


FAST = replace(MACHINE, interfaces=(*MACHINE.interfaces, Interface("ib0", ("10.1.0.1",), 100000)))


@pytest.mark.parametrize(
    ("machine", "changes", "check", "severity", "found"),
    [
        # Debian writes this into /etc/hosts.
        (MACHINE, {"own": Lookup("h1", ("127.0.1.1",), 0.01)}, "own name", WARNING, "h1 is 127.0.1.1"),
        (
            MACHINE,
            {"own": Lookup("h1", (), 0.01, "unknown")},
            "own name",
            WARNING,
            "h1 has no address: unknown",
        ),
        (MACHINE, {"own": Lookup("h1", ("10.9.9.9",), 0.01)}, "own name", WARNING, "10.9.9.9 is none of this"),
        (MACHINE, {"own": Lookup("h1", ("10.0.0.1",), 5.0)}, "own name", WARNING, "after 5.0 s"),
        (
            MACHINE,
            {"own": Lookup("h1", ("127.0.1.1",), 0.01), "nodes_max": 1},
            "own name",
            NOTE,
            "h1 is 127.0.1.1",
        ),
        (MACHINE, {"address": "127.0.0.1"}, "address for others", WARNING, "only this machine finds it"),
        (MACHINE, {"address": "10.9.9.9"}, "address for others", PROBLEM, "10.9.9.9 is on no interface"),
        # A recovery of 948 s came from this.
        (FAST, {}, "interface", WARNING, "eth0 10000 Mbit/s, while ib0 has 100000 Mbit/s"),
        (MACHINE, {"gloo_interface": "eth7"}, "GLOO_SOCKET_IFNAME", PROBLEM, "eth7 is no interface"),
        (FAST, {"gloo_interface": "ib0"}, "GLOO_SOCKET_IFNAME", WARNING, "ib0, while others are told 10.0.0.1"),
        (MACHINE, {"reverse": Lookup("10.0.0.1", (), 5.01)}, "reverse lookup", WARNING, "nameless, after 5 s"),
        (
            MACHINE,
            {"endpoints": [Lookup("h9", (), 0.5, "no")]},
            "name h9",
            PROBLEM,
            "no address after 0.5 s: no",
        ),
        (MACHINE, {"endpoints": [Lookup("h9", ("10.0.0.9",), 3.0)]}, "name h9", WARNING, "after 3 s"),
    ],
)
def test_names_that_lead_elsewhere(
    machine: Machine, changes: dict[str, object], check: str, severity: Severity, found: str
) -> None:
    finding = only(names_of(machine, **changes), check)
    assert finding.severity is severity
    assert found in finding.found
    assert finding.advice


def test_the_fast_interface_is_named_with_its_address() -> None:
    assert only(names_of(FAST), "interface").advice.endswith("--local-addr 10.1.0.1")


@pytest.mark.parametrize(
    ("machine", "severity", "found"),
    [
        (MACHINE, OK, "32768 to 60999"),
        (replace(MACHINE, ephemeral_ports=None), ABSENT, "not known"),
        (replace(MACHINE, ephemeral_ports=(1024, 65535)), NOTE, "metrics (9400) among them"),
        (replace(MACHINE, ephemeral_ports=(60000, 60999)), WARNING, "1000 in all"),
    ],
)
def test_ephemeral_ports(machine: Machine, severity: Severity, found: str) -> None:
    finding = network.check_ephemeral_ports(machine, ports={"metrics": 9400})
    assert (finding.severity, found in finding.found) == (severity, True)


# --- times and variables --------------------------------------------------------------------------------------


def times_of(**changes: object) -> list[Finding]:
    asked: dict[str, object] = {
        "lease_ttl_s": 3.0,
        "grace_s": 25.0,
        "hang_timeout_s": None,
        "join_timeout_s": 600.0,
        "step_s": None,
    }
    return list(timeouts.check_timeouts(**(asked | changes)))  # type: ignore[arg-type]


def test_the_defaults_do_not_contradict_themselves() -> None:
    assert severities(times_of()) == {OK}


def test_leaving_takes_what_the_agent_takes() -> None:
    assert math.isclose(timeouts.LEAVING_S, LEAVE_S + STOP_TIMEOUT_S)


@pytest.mark.parametrize(
    ("changes", "check", "found"),
    [
        ({"lease_ttl_s": 120.0}, "lease", "120 s"),
        ({"grace_s": 4.0}, "grace", "no round is waited for"),
        ({"grace_s": 25.0, "lease_ttl_s": 30.0}, "grace", "a lost node alone holds a round up for 30 s"),
        ({"hang_timeout_s": 2.0}, "hang timeout", "2 s, below the lease of 3 s"),
        ({"hang_timeout_s": 20.0, "step_s": 4.0}, "hang timeout", "with steps of 4 s: a slow one is killed"),
        ({"join_timeout_s": 5.0}, "join timeout", "5 s"),
    ],
)
def test_times_that_contradict_each_other(changes: dict[str, object], check: str, found: str) -> None:
    finding = only(times_of(**changes), check)
    assert finding.severity is WARNING
    assert found in finding.found
    assert finding.advice


@pytest.mark.parametrize(
    ("nodes_min", "nodes_max", "num_endpoints", "severity"),
    [(1, 1, 0, OK), (1, 4, 3, OK), (1, 4, None, OK), (1, 4, 1, NOTE), (4, 4, 3, NOTE)],
)
def test_bounds(nodes_min: int, nodes_max: int, num_endpoints: int | None, severity: Severity) -> None:
    finding = timeouts.check_bounds(nodes_min=nodes_min, nodes_max=nodes_max, num_endpoints=num_endpoints)
    assert finding.severity is severity


def test_a_variable_that_nothing_reads_is_told_with_the_nearest_name() -> None:
    known = {"HIERAVG_LEASE_TTL_S", "HIERAVG_GRACE_S", "PET_NNODES"}
    environment = {"HIERAVG_LEASE_TTL": "3", "PET_NODES": "2", "HIERAVG_XYZZY": "1", "HIERAVG_GRACE_S": "9"}
    found = list(timeouts.check_variables(environment, known=known))
    assert [(each.severity, each.found.split()[0], each.advice) for each in found] == [
        (WARNING, "HIERAVG_LEASE_TTL", "is it HIERAVG_LEASE_TTL_S?"),
        (WARNING, "HIERAVG_XYZZY", "take it away, or correct its name"),
        (WARNING, "PET_NODES", "is it PET_NNODES?"),
    ]


def test_variables_that_kubernetes_makes_of_services_are_left_alone() -> None:
    names = (
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_METRICS",
        "PORT",
        "PORT_29400_TCP",
        "PORT_9400_TCP_ADDR",
    )
    environment = {f"HIERAVG_{name}": "x" for name in names}
    assert severities(timeouts.check_variables(environment, known=set())) == {OK}
    assert severities(timeouts.check_variables({}, known=set())) == {ABSENT}


# --- pods -----------------------------------------------------------------------------------------------------

POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "HIERAVG_LABELS_FILE": "/etc/hieravg/pod/labels",
    "HIERAVG_TERMINATION_FILE": "/dev/termination-log",
}
PLACE = MetricsPlace("0.0.0.0", 9400)


def pod_of(machine: Machine = MACHINE, **changes: object) -> list[Finding]:
    asked: dict[str, object] = {
        "environment": POD,
        "endpoints": [Lookup("h1.hieravg", ("10.0.0.1",), 0.01)],
        "address": "10.0.0.1",
        "labels": {"zone": "z1", "host": "h1"},
        "grace_s": 25.0,
        "metrics": PLACE,
        "is_reached": None,
        "is_etcd": False,
    }
    return list(pods.check_pod(machine, **(asked | changes)))  # type: ignore[arg-type]


def test_a_pod_as_our_manifests_make_it_is_well() -> None:
    assert severities(pod_of()) == {OK}


def test_no_pod_is_one_word() -> None:
    (found,) = pod_of(environment={})
    assert found.severity is ABSENT


def started(*command: str) -> Machine:
    return replace(MACHINE, root_process=command)


NO_HEADLESS = {**POD, "HIERAVG_SERVICE_HOST": "10.96.7.7"}


@pytest.mark.parametrize(
    ("machine", "changes", "check", "severity", "found"),
    [
        (
            MACHINE,
            {"endpoints": [Lookup("h1.hieravg", (), 0.01, "no name")]},
            "service h1.hieravg",
            PROBLEM,
            "no address: no name",
        ),
        (
            MACHINE,
            {"environment": NO_HEADLESS, "endpoints": [Lookup("hieravg", ("10.96.7.7",), 0.01)]},
            "service hieravg",
            PROBLEM,
            "10.96.7.7 is the address of a Service",
        ),
        (
            MACHINE,
            {"endpoints": [Lookup("h1.hieravg", ("10.0.0.7",), 0.01)]},
            "service h1.hieravg",
            PROBLEM,
            "10.0.0.7, while this pod is 10.0.0.1",
        ),
        (started("/bin/sh", "-c", "hieravg run x"), {}, "process 1", WARNING, "a shell passes no signals on"),
        (started("/pause"), {}, "process 1", NOTE, "pause"),
        (MACHINE, {"grace_s": 30.0}, "grace", WARNING, "--grace-s is 30"),
        (MACHINE, {"labels": {"host": "h1"}}, "labels", NOTE, "no zone among host=h1"),
        (
            MACHINE,
            {"metrics": MetricsPlace("127.0.0.1", 9400)},
            "metrics in the pod",
            WARNING,
            "served at 127.0.0.1",
        ),
        (MACHINE, {"metrics": MetricsPlace("0.0.0.0", 0)}, "metrics in the pod", WARNING, "a free port"),
        (MACHINE, {"is_reached": False}, "metrics in the pod", WARNING, "does not answer at the pod's address"),
        (MACHINE, {"metrics": None}, "metrics in the pod", NOTE, "off"),
        (
            replace(MACHINE, unwritable=("/tmp: Read-only file system",)),
            {},
            "folders",
            PROBLEM,
            "/tmp: Read-only file system",
        ),
        (replace(MACHINE, is_root_writable=True), {}, "folders", NOTE, "the root takes files too"),
        (
            replace(MACHINE, shared_memory=Mount("tmpfs", 64 << 20, 64 << 20)),
            {},
            "shared memory",
            WARNING,
            "the runtime's, not a volume",
        ),
        (
            replace(MACHINE, shared_memory=Mount("ext4", GIB, GIB)),
            {},
            "shared memory",
            WARNING,
            "not in memory",
        ),
        (
            MACHINE,
            {"environment": {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}},
            "termination message",
            NOTE,
            "not asked for",
        ),
    ],
)
def test_a_pod_that_has_something_wrong(
    machine: Machine, changes: dict[str, object], check: str, severity: Severity, found: str
) -> None:
    finding = only(pod_of(machine, **changes), check)
    assert finding.severity is severity
    assert found in finding.found
    assert finding.advice


@pytest.mark.parametrize("command", [("tini", "--", "hieravg"), ("/usr/bin/python", "/bin/hieravg", "run")])
def test_a_first_process_that_passes_signals_on(command: tuple[str, ...]) -> None:
    assert only(pod_of(started(*command)), "process 1").severity is OK


# --- what is not well says what to do -------------------------------------------------------------------------


@pytest.mark.parametrize("severity", [PROBLEM, WARNING])
def test_a_finding_that_is_not_well_needs_advice(severity: Severity) -> None:
    make: Callable[[], Finding] = lambda: Finding("x", severity, "found")  # noqa: E731
    with pytest.raises(AssertionError):
        make()
