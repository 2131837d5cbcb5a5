"""How etcd is: each endpoint asked by itself, and one key written where agents write theirs.

The key is bound to a lease of a few seconds, which is given back. Every question has a deadline.
"""

import socket
import ssl
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from secrets import token_hex

from elastic_hieravg.doctor import certificates
from elastic_hieravg.doctor.findings import Finding, absent, note, ok, problem, told, warning
from elastic_hieravg.doctor.ports import ask_http
from elastic_hieravg.doctor.resources import bytes_text
from elastic_hieravg.errors import HierAvgError, Problem, StoreDeniedError
from elastic_hieravg.membership.etcd import EtcdKeyValue
from elastic_hieravg.membership.etcd_client import EtcdClient, EtcdSettings
from elastic_hieravg.membership.kv import Put, Write

ANSWER_S = 3.0
ASKED = 3
SLOW_S = 0.1
# A heartbeat of a lease is a write, and several fit into a lease.
WRITES_PER_LEASE = 10
WRITE_LEASE_S = 5.0
VERSION_MIN = (3, 4)
# etcd stops taking writes at 2 GiB unless it is told otherwise.
DB_BYTES_LARGE = 1.6 * 1024**3
ALARMS = {1: "NOSPACE", 2: "CORRUPT"}


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """What one endpoint said. `seconds`: how long an answer takes. `problem`: it said nothing, because.

    `alarms` is None if they may not be asked for. `clock_ahead_s`: how far its clock is before ours.
    """

    endpoint: str
    version: str = ""
    cluster_id: int = 0
    leader_id: int = 0
    db_bytes: int = 0
    seconds: float = 0.0
    alarms: tuple[str, ...] | None = ()
    clock_ahead_s: float | None = None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A key written and read again. `problem`: it was not, because."""

    seconds: float = 0.0
    problem: Problem | None = None


def check_etcd(settings: EtcdSettings, *, lease_ttl_s: float) -> Iterator[Finding]:
    now_s = time.time()
    files = list(certificates.check_files(settings, now_s=now_s))
    yield from files
    if any(each.severity == "problem" for each in files):
        yield absent("etcd", "not asked with such files")
        return
    if settings.cacert is not None:
        for endpoint in settings.endpoints:
            yield _certificate_of(endpoint, settings, now_s=now_s)
    yield check_password(settings)
    seen = [look_at(endpoint, settings) for endpoint in settings.endpoints]
    yield from check_members(seen)
    if all(each.problem is not None for each in seen):
        yield absent("write", "nobody answers")
        return
    yield check_written(write_once(settings), lease_ttl_s=lease_ttl_s)


def check_password(settings: EtcdSettings) -> Finding:
    """That a password without TLS is refused was decided when the settings were made."""
    if settings.user is None:
        return absent("user", "none")
    return ok("user", f"{settings.user}, its password goes over TLS")


def check_members(seen: Sequence[MemberSeen]) -> Iterator[Finding]:
    """Each endpoint, and all of them together. Pure."""
    away = [each for each in seen if each.problem is not None]
    here = [each for each in seen if each.problem is None]
    for each in seen:
        yield _member(each, is_alone=not here)
    if not here:
        return
    yield _together(here, num_away=len(away), num_all=len(seen))
    alarms = sorted({alarm for each in here for alarm in each.alarms or ()})
    if alarms:
        advice = "etcdctl alarm list; for NOSPACE: compact, defrag, then etcdctl alarm disarm"
        yield problem("alarms", ", ".join(alarms), advice)
    elif any(each.alarms is None for each in here):
        yield absent("alarms", "not allowed")
    else:
        yield ok("alarms", "none")
    largest = max(each.db_bytes for each in here)
    if largest > DB_BYTES_LARGE:
        advice = "etcd stops at 2 GiB unless told otherwise: compact and defragment it"
        yield warning("database", bytes_text(largest), advice)
    else:
        yield ok("database", bytes_text(largest))
    yield check_clock({each.endpoint: each.clock_ahead_s for each in here})


def check_clock(ahead: dict[str, float | None], *, resolution_s: float = 1.0) -> Finding:
    """Clocks of others against ours. Leases do not depend on them. Pure."""
    known = {name: seconds for name, seconds in ahead.items() if seconds is not None}
    if not known:
        return absent("clock", "not told")
    name, seconds = max(known.items(), key=lambda item: abs(item[1]))
    if abs(seconds) <= max(2.0, 2 * resolution_s):
        return ok("clock", f"within {max(abs(seconds), resolution_s):.2g} s of {name}")
    found = f"{abs(seconds):.1f} s {'behind' if seconds > 0 else 'before'} that of {name}"
    # Certificates have dates, and nothing else of a job does.
    advice = "run chrony or ntpd; leases do not depend on clocks, but logs, dashboards and certificates do"
    return warning("clock", found, advice)


def check_written(written: Written, *, lease_ttl_s: float) -> Finding:
    """Pure."""
    if written.problem is not None:
        return problem("write", written.problem.message, written.problem.hint)
    found = f"{written.seconds * 1000:.1f} ms"
    if written.seconds * WRITES_PER_LEASE > lease_ttl_s:
        advice = "a lease needs several writes in its time: give etcd a faster disk, or a longer --lease-ttl-s"
        return warning("write", f"{found}, with a lease of {lease_ttl_s:g} s", advice)
    return ok("write", found)


def look_at(endpoint: str, settings: EtcdSettings) -> MemberSeen:
    """Ask one endpoint, not the next one if it does not answer."""
    alone = replace(settings, endpoints=(endpoint,))
    try:
        with closing(EtcdClient(alone, call_timeout_s=ANSWER_S)) as client:
            request = client.stubs.StatusRequest()
            seconds, status = [], None
            for _ in range(ASKED):
                began_s = time.monotonic()
                status = client.call("Maintenance", "Status", request)
                seconds.append(time.monotonic() - began_s)
            assert status is not None
            alarms = _alarms(client)
    except HierAvgError as exc:
        return MemberSeen(endpoint, problem=exc.problems[0])
    return MemberSeen(
        endpoint,
        version=str(status.version),
        cluster_id=int(status.header.cluster_id),
        leader_id=int(status.leader),
        db_bytes=int(status.dbSize),
        seconds=statistics.median(seconds),
        alarms=alarms,
        clock_ahead_s=_clock_ahead_s(endpoint, settings),
    )


def write_once(settings: EtcdSettings) -> Written:
    """Where agents write, as they do: bound to a lease."""
    key = f"/hieravg/.doctor-{token_hex(8)}"
    try:
        with closing(EtcdKeyValue(settings)) as kv:
            lease_id = kv.grant(WRITE_LEASE_S)
            try:
                began_s = time.monotonic()
                kv.write(Write({}, puts=(Put(key, "hieravg doctor", lease_id),)))
                return Written(time.monotonic() - began_s)
            finally:
                with suppress(HierAvgError):
                    kv.revoke(lease_id)
    except StoreDeniedError as exc:
        hint = f"the user has to have readwrite on the prefix /hieravg/; {exc.problems[0].hint}"
        return Written(problem=Problem(exc.problems[0].message, hint))
    except HierAvgError as exc:
        return Written(problem=exc.problems[0])


def _member(seen: MemberSeen, *, is_alone: bool) -> Finding:
    check = f"etcd {seen.endpoint}"
    if seen.problem is not None:
        if is_alone:
            return told(check, [seen.problem])[0]
        return warning(check, seen.problem.message, seen.problem.hint)
    found = f"{seen.version}, {seen.seconds * 1000:.1f} ms"
    if not seen.leader_id:
        advice = "more than half of etcd's members have to run and reach each other"
        return problem(check, f"{found}, and it knows no leader", advice)
    version = tuple(int(part) for part in seen.version.split(".")[:2] if part.isdecimal())
    if version < VERSION_MIN:
        return note(check, found, "3.4 and newer are tested")
    if seen.seconds > SLOW_S:
        advice = "is it near, and is its machine busy? Losses are noticed later by as much"
        return warning(check, found, advice)
    return ok(check, found)


def _together(here: Sequence[MemberSeen], *, num_away: int, num_all: int) -> Finding:
    check = "cluster"
    if len({each.cluster_id for each in here}) > 1:
        names = ", ".join(f"{each.endpoint} ({each.cluster_id:x})" for each in here)
        return problem(
            check, f"the endpoints are of different clusters: {names}", "name members of one cluster"
        )
    leaders = {each.leader_id for each in here if each.leader_id}
    if len(leaders) > 1:
        return note(check, f"{len(leaders)} leaders are named: it changes just now", "ask again")
    found = f"{num_all - num_away} of {num_all} endpoints answer"
    if num_all == 1:
        return note(
            check, found, "if it is away, the membership waits for it: run three members, name all of them"
        )
    return ok(check, found)


def _alarms(client: EtcdClient) -> tuple[str, ...] | None:
    request = client.stubs.AlarmRequest(action=0, memberID=0, alarm=0)
    try:
        answer = client.call("Maintenance", "Alarm", request)
    except StoreDeniedError:
        return None
    return tuple(ALARMS.get(int(each.alarm), f"alarm {each.alarm}") for each in answer.alarms)


def _certificate_of(endpoint: str, settings: EtcdSettings, *, now_s: float) -> Finding:
    host, port = _split(endpoint)
    try:
        shown = certificates.shown_by(host, port, settings)
    except (ConnectionRefusedError, TimeoutError):
        return absent(f"certificate of {endpoint}", "nobody answers")
    except OSError as exc:
        if isinstance(exc, ssl.SSLError) and "ALERT" in (exc.reason or ""):
            advice = "give cert and key of a client that etcd's authority has signed"
            return problem(f"certificate of {endpoint}", f"it refuses this client: {exc.reason}", advice)
        advice = "does it run there, with TLS? Without TLS leave cacert out"
        return warning(f"certificate of {endpoint}", f"no handshake: {exc.strerror or exc}", advice)
    return certificates.check_shown(endpoint, shown, now_s=now_s)


def _clock_ahead_s(endpoint: str, settings: EtcdSettings) -> float | None:
    """etcd says what time it is, to the second, in the head of an answer over HTTP."""
    host, port = _split(endpoint)
    try:
        with socket.create_connection((host, port), timeout=ANSWER_S) as plain:
            if settings.cacert is None:
                head, _ = ask_http(plain, "/version", host=host, timeout_s=ANSWER_S)
            else:
                context = certificates.client_context(settings)
                with context.wrap_socket(plain, server_hostname=host) as sock:
                    head, _ = ask_http(sock, "/version", host=host, timeout_s=ANSWER_S)
        dates = [line[5:].strip() for line in head.splitlines() if line.lower().startswith("date:")]
        # On average half a second is cut off.
        return parsedate_to_datetime(dates[0]).timestamp() + 0.5 - time.time()
    except (OSError, IndexError, ValueError):
        return None


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)
