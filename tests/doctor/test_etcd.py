"""The doctor at real etcd servers: well, away, denied, with an alarm; certificates that do not fit."""

import datetime as dt
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from elastic_hieravg.doctor import certificates, etcd
from elastic_hieravg.doctor.etcd import MemberSeen, Written, check_etcd, check_members, check_written, look_at
from elastic_hieravg.doctor.findings import Finding, Severity
from elastic_hieravg.errors import Problem
from elastic_hieravg.membership.etcd_client import EtcdClient, EtcdSettings
from tests.doctor.patients import examined, only, severities
from tests.doctor.strangers import silent_server, tls_server
from tests.membership.etcd_servers import PASSWORD, USER, Certificates, EtcdCluster, etcd_cluster, free_ports

NOW_S = time.time()
DAY = dt.timedelta(days=1)
TODAY = dt.datetime.now(tz=dt.UTC)
OK, NOTE, WARNING, PROBLEM, ABSENT = (
    Severity.OK,
    Severity.NOTE,
    Severity.WARNING,
    Severity.PROBLEM,
    Severity.ABSENT,
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("plain")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdCluster, Certificates]]:
    folder = tmp_path_factory.mktemp("tls")
    files = Certificates.make(folder)
    files.client_key.chmod(0o600)
    with etcd_cluster(folder, certificates=files, has_users=True) as cluster:
        yield cluster, files


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody answers whom it would be worth to wait for."""
    monkeypatch.setattr(etcd, "ANSWER_S", 0.5)


def found_at(settings: EtcdSettings, lease_ttl_s: float = 3.0) -> list[Finding]:
    return list(check_etcd(settings, lease_ttl_s=lease_ttl_s))


# --- real servers ---------------------------------------------------------------------------------------------


def test_an_etcd_that_is_well_is_told_with_its_version_and_latency(plain: EtcdCluster) -> None:
    found = found_at(plain.settings(), lease_ttl_s=600.0)
    assert PROBLEM not in severities(found)
    assert only(found, f"etcd {plain.endpoints[0]}").found.startswith("3.")
    assert only(found, "alarms").severity is OK
    assert only(found, "write").severity is OK
    assert only(found, "clock").severity is OK
    assert only(found, "certificates").severity is ABSENT
    # The key goes with its lease, which is given back.
    assert plain.control("get", "--prefix", "/hieravg/.doctor").strip() == ""


def test_one_endpoint_that_is_away_is_a_warning_if_another_answers(plain: EtcdCluster) -> None:
    away = f"127.0.0.1:{free_ports(1)[0]}"
    found = found_at(EtcdSettings((*plain.endpoints, away)))
    assert only(found, f"etcd {away}").severity is WARNING
    assert only(found, "cluster").found == "1 of 2 endpoints answer"
    assert PROBLEM not in severities(found)


@pytest.mark.usefixtures("_impatient")
def test_an_etcd_that_is_away_is_a_problem_within_a_bound(tmp_path: Path) -> None:
    away = f"127.0.0.1:{free_ports(1)[0]}"
    began_s = time.monotonic()
    found = found_at(EtcdSettings((away,)))
    assert time.monotonic() - began_s < 60.0
    assert only(found, f"etcd {away}").severity is PROBLEM
    assert only(found, "write").severity is ABSENT
    shown = found_at(EtcdSettings((away,), cacert=Certificates.make(tmp_path).cacert))
    assert only(shown, f"certificate of {away}").severity is ABSENT


def test_an_alarm_is_a_problem_until_it_is_over(plain: EtcdCluster) -> None:
    settings = plain.settings()
    with closing(EtcdClient(settings)) as client:
        request = client.stubs.AlarmRequest(action=1, memberID=0, alarm=1)
        client.call("Maintenance", "Alarm", request)
    found = found_at(settings)
    plain.control("alarm", "disarm")
    assert (only(found, "alarms").severity, only(found, "alarms").found) == (PROBLEM, "NOSPACE")
    assert only(found, "write").severity is PROBLEM
    assert only(found_at(settings), "alarms").severity is OK


def test_tls_with_a_user_is_well(secured: tuple[EtcdCluster, Certificates]) -> None:
    cluster, files = secured
    found = found_at(cluster.settings(), lease_ttl_s=600.0)
    assert PROBLEM not in severities(found)
    assert "client@example.org" in only(found, "cert").found
    assert "localhost, 127.0.0.1" in only(found, f"certificate of {cluster.endpoints[0]}").found
    assert only(found, "user").found == f"{USER}, its password goes over TLS"
    assert only(found, "clock").severity is OK
    assert all(PASSWORD not in f"{each}" for each in found)
    assert files.key.exists()


@pytest.mark.usefixtures("_impatient")
def test_a_client_without_a_certificate_is_told_if_etcd_wants_one(
    secured: tuple[EtcdCluster, Certificates],
) -> None:
    cluster, files = secured
    finding = only(
        found_at(EtcdSettings(cluster.endpoints, files.cacert)), f"certificate of {cluster.endpoints[0]}"
    )
    assert (finding.severity, "it refuses this client" in finding.found) == (PROBLEM, True)


def test_a_wrong_password_is_a_problem(secured: tuple[EtcdCluster, Certificates]) -> None:
    cluster, _ = secured
    found = found_at(replace(cluster.settings(), password="wrong"))
    assert PROBLEM in severities(found)
    assert any("user and password_file" in each.advice for each in found)


@pytest.mark.usefixtures("_impatient")
def test_another_authority_is_a_problem(secured: tuple[EtcdCluster, Certificates], tmp_path: Path) -> None:
    cluster, _ = secured
    other = Certificates.make(tmp_path)
    settings = replace(cluster.settings(), cacert=other.cacert)
    finding = only(found_at(settings), f"certificate of {cluster.endpoints[0]}")
    assert finding.severity is PROBLEM
    assert "not trusted" in finding.found
    assert "localhost, 127.0.0.1" in finding.found


@pytest.mark.usefixtures("_impatient")
def test_a_server_without_tls_is_told(plain: EtcdCluster, tmp_path: Path) -> None:
    files = Certificates.make(tmp_path)
    found = found_at(replace(plain.settings(), cacert=files.cacert))
    assert only(found, f"certificate of {plain.endpoints[0]}").severity is WARNING
    assert only(found, f"etcd {plain.endpoints[0]}").severity is PROBLEM


def test_a_server_whose_certificate_is_over_or_for_another_name(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    settings = EtcdSettings(("127.0.0.1:2379",), cacert=tmp_path / "ca.pem")
    over = authority.issue_cert("127.0.0.1", not_before=TODAY - 9 * DAY, not_after=TODAY - 2 * DAY)
    stranger = authority.issue_cert("etcd.example.org")
    for issued, why, names in ((over, "expired", "127.0.0.1"), (stranger, "mismatch", "etcd.example.org")):
        with tls_server(issued) as port:
            shown = certificates.shown_by("127.0.0.1", port, settings)
        finding = certificates.check_shown(f"127.0.0.1:{port}", shown, now_s=NOW_S)
        assert finding.severity is PROBLEM
        assert why in finding.found
        assert f"it is for {names}" in finding.found


def test_the_whole_examination_asks_etcd(plain: EtcdCluster) -> None:
    found = examined("--rdzv-backend", "etcd3", "--rdzv-endpoint", plain.endpoints[0])
    assert only(found["store"].findings, "write").severity in (OK, WARNING)


# --- files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    made = Certificates.make(tmp_path)
    made.client_key.chmod(0o600)
    return made


def files_of(files: Certificates) -> list[Finding]:
    settings = EtcdSettings(("h1:2379",), files.cacert, files.client_cert, files.client_key)
    return list(certificates.check_files(settings, now_s=NOW_S))


def test_files_that_go_together_are_well(files: Certificates) -> None:
    assert severities(files_of(files)) == {OK}


def test_a_file_that_is_not_there_is_a_problem(files: Certificates) -> None:
    files.client_cert.unlink()
    finding = only(files_of(files), "cert")
    assert (finding.severity, "No such file" in finding.found) == (PROBLEM, True)


def test_a_file_without_a_certificate_is_a_problem(files: Certificates) -> None:
    files.cacert.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    assert only(files_of(files), "cacert").severity is PROBLEM


def test_a_key_of_another_certificate_is_a_problem(files: Certificates) -> None:
    files.client_key.write_bytes(files.key.read_bytes())
    finding = only(files_of(files), "cert and key")
    assert (finding.severity, "do not go together" in finding.found) == (PROBLEM, True)


def test_a_key_that_everybody_can_read_is_a_warning(files: Certificates) -> None:
    files.client_key.chmod(0o644)
    assert only(files_of(files), "key").severity is WARNING


@pytest.mark.parametrize(
    ("since", "until", "severity", "found"),
    [
        (-9, -2, PROBLEM, "is over for 2.0 days"),
        (2, 9, PROBLEM, "begins in 2.0 days"),
        (-9, 5, WARNING, "for 5 more days"),
        (-9, 90, OK, "for 90 more days"),
    ],
)
def test_dates_of_a_clients_certificate(
    files: Certificates, since: int, until: int, severity: Severity, found: str
) -> None:
    issued = trustme.CA().issue_cert(
        "me@example.org", not_before=TODAY + since * DAY, not_after=TODAY + until * DAY
    )
    issued.cert_chain_pems[0].write_to_path(files.client_cert)
    issued.private_key_pem.write_to_path(files.client_key)
    finding = only(files_of(files), "cert")
    assert finding.severity is severity
    assert found in finding.found
    assert "me@example.org" in finding.found


def test_nobody_is_asked_with_files_that_cannot_be_used(files: Certificates) -> None:
    files.client_key.unlink()
    settings = EtcdSettings(("192.0.2.77:2379",), files.cacert, files.client_cert, files.client_key)
    assert found_at(settings)[-1].severity is ABSENT


# --- judged without a server ----------------------------------------------------------------------------------

WELL = MemberSeen(
    "h1:2379", "3.5.1", cluster_id=7, leader_id=1, db_bytes=20000, seconds=0.002, clock_ahead_s=0.1
)


@pytest.mark.parametrize(
    ("seen", "check", "severity", "found"),
    [
        ([replace(WELL, leader_id=0)], "etcd h1:2379", PROBLEM, "it knows no leader"),
        ([replace(WELL, version="3.3.9")], "etcd h1:2379", NOTE, "3.3.9"),
        ([replace(WELL, seconds=0.4)], "etcd h1:2379", WARNING, "400.0 ms"),
        ([WELL, replace(WELL, endpoint="h2:2379", cluster_id=8)], "cluster", PROBLEM, "different clusters"),
        ([WELL, replace(WELL, endpoint="h2:2379", leader_id=2)], "cluster", NOTE, "2 leaders"),
        ([WELL], "cluster", NOTE, "1 of 1 endpoints answer"),
        ([WELL, replace(WELL, endpoint="h2:2379")], "cluster", OK, "2 of 2 endpoints answer"),
        ([replace(WELL, alarms=("CORRUPT",))], "alarms", PROBLEM, "CORRUPT"),
        ([replace(WELL, alarms=None)], "alarms", ABSENT, "not allowed"),
        ([replace(WELL, db_bytes=2 * 10**9)], "database", WARNING, "2 GB"),
        ([replace(WELL, clock_ahead_s=60.0)], "clock", WARNING, "60.0 s behind that of h1:2379"),
        ([replace(WELL, clock_ahead_s=-60.0)], "clock", WARNING, "60.0 s before that of h1:2379"),
        ([replace(WELL, clock_ahead_s=None)], "clock", ABSENT, "not told"),
    ],
)
def test_members_are_judged(seen: list[MemberSeen], check: str, severity: Severity, found: str) -> None:
    finding = only(check_members(seen), check)
    assert (finding.severity, found in finding.found) == (severity, True)
    if check == "clock" and severity is WARNING:
        assert "leases do not depend on clocks" in finding.advice


def test_writes_that_are_slow_against_the_lease_are_a_warning() -> None:
    assert check_written(Written(0.5), lease_ttl_s=3.0).severity is WARNING
    assert check_written(Written(0.01), lease_ttl_s=3.0).severity is OK
    assert check_written(Written(problem=Problem("no", "yes")), lease_ttl_s=3.0).severity is PROBLEM


@pytest.mark.usefixtures("_impatient")
def test_a_server_that_is_no_etcd_is_a_problem_within_a_bound() -> None:
    with silent_server() as port:
        began_s = time.monotonic()
        seen = look_at(f"127.0.0.1:{port}", EtcdSettings((f"127.0.0.1:{port}",)))
        assert time.monotonic() - began_s < 60.0
    assert seen.problem is not None
