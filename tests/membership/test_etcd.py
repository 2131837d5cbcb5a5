"""A real etcd that loses members, its leader, its memory of the past and all its data; and who is let in."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from elastic_hieravg.errors import StoreAwayError, StoreDeniedError, StoreError, UsageError
from elastic_hieravg.membership.etcd import EtcdKeyValue, EtcdWatch
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.kv import Put, Snapshot, Write
from tests.membership.etcd_servers import (
    PASSWORD,
    TOKEN_TTL_S,
    USER,
    Certificates,
    EtcdCluster,
    EtcdMember,
    etcd_cluster,
)

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 60.0

_numbers = count()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("three"), num_members=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    folder = tmp_path_factory.mktemp("guarded")
    with etcd_cluster(folder, certificates=Certificates.make(folder), has_users=True) as cluster:
        yield cluster


class Bookkeeper:
    """Writes numbers and watches them arrive: every number that was acknowledged must be told of."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.key = f"/hieravg/numbers-{next(_numbers)}/n"
        self.kv = EtcdKeyValue(settings)
        self.watch: EtcdWatch = self.kv.watch(self.key)
        self.written = 0
        self.told: list[int] = []
        self.errors = 0

    def write(self, within_s: float = PATIENCE_S) -> float:
        """Write the next number, trying until it is taken; how long it took."""
        started_s = time.monotonic()
        self.written += 1
        while True:
            try:
                assert self.kv.write(Write({}, (Put(self.key, str(self.written)),))) is not None
                return time.monotonic() - started_s
            except StoreAwayError:
                self.errors += 1
                assert time.monotonic() < started_s + within_s
                time.sleep(0.02)

    def read(self) -> None:
        """Follow the watch until the last number is told."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.told or self.told[-1] != self.written:
            assert time.monotonic() < deadline_s, self.told
            with contextlib.suppress(StoreAwayError):
                update = self.watch.next(timeout_s=1.0)
                if update is None:
                    continue
                changes = update.entries.items() if isinstance(update, Snapshot) else update.changes
                self.told += [int(entry.value) for _, entry in changes if entry is not None]

    def close(self) -> None:
        self.kv.close()


@contextlib.contextmanager
def keeper(cluster: EtcdCluster) -> Iterator[Bookkeeper]:
    opened = Bookkeeper(cluster.settings())
    try:
        opened.write()
        opened.read()
        yield opened
    finally:
        opened.close()


def current(cluster: EtcdCluster, kv: EtcdKeyValue) -> EtcdMember:
    return next(each for each in cluster.members if f"127.0.0.1:{each.client_port}" == kv.endpoint)


@pytest.mark.parametrize("which", ["the leader", "a follower", "the one we talk to"])
def test_one_of_three_members_is_killed(three: EtcdCluster, which: str) -> None:
    with keeper(three) as numbers:
        leader = three.leader()
        victim = {
            "the leader": leader,
            "a follower": next(each for each in three.members if each is not leader),
            "the one we talk to": current(three, numbers.kv),
        }[which]
        victim.kill()
        for _ in range(20):
            numbers.write()
        numbers.read()
        victim.start()
        for _ in range(20):
            numbers.write()
        numbers.read()
        # Every write that was taken was told, in order; one that was not answered may be told twice.
        assert sorted(set(numbers.told)) == list(range(1, numbers.written + 1))
        assert numbers.told == sorted(numbers.told)


def test_a_frozen_member_is_left_by_calls_and_watches(three: EtcdCluster) -> None:
    with keeper(three) as numbers:
        frozen = current(three, numbers.kv)
        lease_id = numbers.kv.grant(10.0)
        frozen.send(signal.SIGSTOP)
        try:
            # Reading and keeping alive try elsewhere by themselves, within one call.
            numbers.kv.keep_alive(lease_id)
            assert current(three, numbers.kv) is not frozen
            for _ in range(5):
                numbers.write()
            numbers.read()
        finally:
            frozen.send(signal.SIGCONT)
        assert numbers.told == list(range(1, numbers.written + 1))


def test_all_members_are_killed_and_started_again(three: EtcdCluster) -> None:
    with keeper(three) as numbers:
        for member in three.members:
            member.kill()
        with pytest.raises(StoreAwayError, match="UNAVAILABLE"):
            numbers.kv.get(numbers.key)
        for member in three.members:
            member.start()
        for _ in range(5):
            numbers.write()
        numbers.read()
        assert sorted(set(numbers.told)) == list(range(1, numbers.written + 1))
        assert numbers.errors > 0


def test_the_single_member_is_killed_and_restarted_with_its_leases(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path) as cluster, keeper(cluster) as numbers:
        lease_id = numbers.kv.grant(30.0)
        leased = f"/hieravg/leased-{next(_numbers)}"
        numbers.kv.write(Write({}, (Put(leased, "kept", lease_id),)))
        cluster.members[0].kill()
        with pytest.raises(StoreAwayError, match="UNAVAILABLE"):
            numbers.kv.write(Write({}, (Put(numbers.key, "lost"),)))
        cluster.members[0].start()
        numbers.write()
        numbers.read()
        numbers.kv.keep_alive(lease_id)
        assert numbers.kv.get(leased).entries[leased].value == "kept"


def test_compaction_while_the_watch_is_away(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path) as cluster, keeper(cluster) as numbers:
        cluster.members[0].kill()
        cluster.members[0].start()
        other = EtcdKeyValue(cluster.settings())
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(StoreAwayError):
                snapshot = other.get("/hieravg/")
                break
            assert time.monotonic() < deadline_s
        for number in range(50):
            other.write(Write({}, (Put("/hieravg/elsewhere", str(number)),)))
        cluster.control("compaction", str(snapshot.revision + 50))
        other.close()
        numbers.write()
        numbers.read()
        assert numbers.told[-1] == numbers.written


def test_an_etcd_that_lost_its_data_begins_anew(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path / "first") as cluster, keeper(cluster) as numbers:
        for _ in range(30):
            numbers.write()
        numbers.read()
        member = cluster.members[0]
        member.kill()
        folder = member.command.index("--data-dir") + 1
        member.command[folder] = str(tmp_path / "second")
        member.start()
        # Its revisions are lower now than what the watch has seen.
        numbers.write()
        numbers.read()
        assert numbers.kv.get(numbers.key).revision < 30


def test_every_call_has_a_deadline(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path) as cluster:
        kv = EtcdKeyValue(cluster.settings(), call_timeout_s=0.5)
        lease_id = kv.grant(60.0)
        cluster.members[0].send(signal.SIGSTOP)
        calls: list[Callable[[], object]] = [
            lambda: kv.get("/hieravg/x"),
            lambda: kv.write(Write({}, (Put("/hieravg/x", "1"),))),
            lambda: kv.grant(10.0),
            lambda: kv.keep_alive(lease_id),
            lambda: kv.revoke(lease_id),
        ]
        try:
            for call in calls:
                with pytest.raises(StoreAwayError, match="DEADLINE_EXCEEDED"):
                    call()
        finally:
            cluster.members[0].send(signal.SIGCONT)
            kv.close()


def test_a_stream_that_ends_without_an_answer_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = EtcdKeyValue(EtcdSettings(("127.0.0.1:9",)))
    (endpoint,) = kv._client._endpoints
    monkeypatch.setattr(endpoint, "method", lambda *_: lambda *_, **__: iter(()))
    with pytest.raises(StoreAwayError, match=r"etcd at 127\.0\.0\.1:9 ended a call without an answer"):
        kv.keep_alive(7)
    kv.close()


# --- who is let in --------------------------------------------------------------------------------------------


def test_a_token_that_expired_is_renewed_by_calls_and_watches(guarded: EtcdCluster) -> None:
    with keeper(guarded) as numbers:
        for _ in range(2):
            time.sleep(TOKEN_TTL_S + 2)
            numbers.write()
            assert numbers.errors == 0
            numbers.read()
        # A watch that has to begin again needs a token that is valid then.
        numbers.watch._move()
        numbers.write()
        numbers.read()


def settings_with(guarded: EtcdCluster, **changes: object) -> EtcdSettings:
    settings = guarded.settings()
    values = {name: getattr(settings, name) for name in EtcdSettings.__slots__}
    return EtcdSettings(**{**values, **changes})


def error_of(settings: EtcdSettings, key: str = "/hieravg/x") -> StoreError:
    kv = EtcdKeyValue(settings, call_timeout_s=3.0)
    try:
        with pytest.raises(StoreError) as found:
            kv.get(key)
    finally:
        kv.close()
    return found.value


def test_a_wrong_password_is_told_and_not_shown(guarded: EtcdCluster) -> None:
    settings = settings_with(guarded, password="wrong horse")
    error = error_of(settings)
    assert isinstance(error, StoreDeniedError)
    assert "authentication failed" in str(error)
    assert "give user and password_file of a user" in str(error)
    assert "horse" not in f"{error} {error!r} {settings!r} {settings}"


def test_a_user_without_the_right_role_is_told(guarded: EtcdCluster) -> None:
    error = error_of(guarded.settings(), key="/somewhere/else")
    assert isinstance(error, StoreDeniedError)
    assert "PERMISSION_DENIED" in str(error)
    assert "that may read and write under /hieravg/" in str(error)


def test_a_missing_user_is_told(guarded: EtcdCluster) -> None:
    error = error_of(settings_with(guarded, user=None, password=None))
    assert isinstance(error, StoreDeniedError)
    assert "give user and password_file" in str(error)


def test_a_foreign_certificate_is_told(guarded: EtcdCluster, tmp_path: Path) -> None:
    foreign = Certificates.make(tmp_path)
    error = error_of(settings_with(guarded, cacert=foreign.cacert))
    assert isinstance(error, StoreAwayError)
    assert "check cacert, cert and key" in str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoints": ()}, "there is no --rdzv-endpoint"),
        ({"endpoints": ("h1",)}, "--rdzv-endpoint has 'h1'"),
        ({"endpoints": ("h1:0",)}, "--rdzv-endpoint has 'h1:0'"),
        ({"endpoints": (":2379", "h1:etcd")}, "2 problems"),
        ({"cert": Path("c")}, "--rdzv-conf has cert and no key"),
        ({"key": Path("k"), "cacert": Path("ca")}, "--rdzv-conf has key and no cert"),
        ({"key": Path("k"), "cert": Path("c")}, "--rdzv-conf has cert and no cacert"),
        ({"user": "u", "cacert": Path("ca")}, "--rdzv-conf has user and no password_file"),
        ({"password": "p", "cacert": Path("ca")}, "--rdzv-conf has password_file and no user"),
        (
            {"user": "u", "password": "secret"},
            "--rdzv-conf has user u and no cacert, without which there is no TLS",
        ),
    ],
)
def test_settings_that_contradict_themselves_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        EtcdSettings(**{"endpoints": ("h1:2379",), **changes})  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "secret" not in str(error.value)


def test_a_certificate_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.pem cannot be read: No such file"):
        EtcdKeyValue(EtcdSettings(("h1:2379",), cacert=tmp_path / "missing.pem"))


# --- what it leaves alone -------------------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


@pytest.mark.parametrize("before", [None, "upb"])
def test_loading_etcd3_leaves_the_environment_and_children_alone(before: str | None) -> None:
    variable = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
    child = "from google.protobuf.internal import api_implementation as a; print(a.Type())"
    code = (
        "import os, subprocess, sys\n"
        "from elastic_hieravg.membership.etcd_stubs import etcd_stubs\n"
        "assert etcd_stubs().__name__ == 'etcd3.etcdrpc'\n"
        f"assert os.environ.get({variable!r}) == {before!r}\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    )
    environment = {} if before is None else {variable: before}
    assert run_python(code, **environment) == "upb"


def test_without_the_fork_somebody_elses_protobuf_is_told() -> None:
    code = (
        "import google.protobuf.descriptor_pb2, sys\n"
        "sys.modules['pyetcd'] = None\n"
        "from elastic_hieravg.membership.etcd_stubs import etcd_stubs\n"
        "from elastic_hieravg.errors import UsageError\n"
        "try:\n    etcd_stubs()\nexcept UsageError as exc:\n    print(exc)\n"
    )
    assert "hint: install etcd-sdk-python" in run_python(code)


def test_closing_ends_every_thread(three: EtcdCluster) -> None:
    before = threading.active_count()
    with keeper(three) as numbers:
        numbers.write()
    deadline_s = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:
        # gRPC's own threads end a little after their streams.
        assert time.monotonic() < deadline_s, threading.enumerate()
        time.sleep(0.05)


def test_the_password_is_in_no_error_of_the_settings() -> None:
    settings = EtcdSettings(("h1:2379",), cacert=Path("ca"), user=USER, password=PASSWORD)
    assert PASSWORD not in repr(settings)
