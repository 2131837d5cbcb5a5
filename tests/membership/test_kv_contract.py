"""What every home of the key-value seam does: in memory, embedded, and etcd in four set-ups.

`test_the_fork_does_the_same` runs the etcd part once more, in a process of its own, with the fork of `etcd3`
that takes over when protobuf was loaded before us.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from elastic_hieravg.errors import LeaseLostError, StoreAwayError
from elastic_hieravg.membership.kv import ABSENT, Changes, Entry, KeyValue, Put, Snapshot, Watch, Write
from tests.membership.homes import NAMES, Home, home

# etcd looks for ended leases twice a second, and a busy machine may look later.
ENDED_S = 20.0
PROMPT_S = 20.0
# Long enough that a busy machine keeps it alive in time.
KEPT_TTL_S = 2.0

_numbers = count()


# In the fork's process: one plain etcd, and all there is of it.
FORK_NAMES = ("etcd", "etcd-users")
IN_FORK = bool(os.environ.get("HIERAVG_TEST_FORK"))


@pytest.fixture(scope="module", params=FORK_NAMES if IN_FORK else NAMES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with home(request.param, tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


@pytest.fixture
def kv(place: Home) -> Iterator[KeyValue]:
    client = place.open()
    yield client
    if place.name != "memory":
        client.close()


@pytest.fixture
def prefix() -> str:
    return f"/hieravg/contract-{next(_numbers)}/"


def put(key: str, value: str, lease_id: int = 0) -> Write:
    return Write({}, (Put(key, value, lease_id),))


def next_update(watch: Watch) -> Snapshot | Changes:
    update = watch.next(timeout_s=PROMPT_S)
    assert update is not None
    return update


def values(snapshot: Snapshot) -> dict[str, str]:
    return {key: entry.value for key, entry in snapshot.entries.items()}


def follow(watch: Watch, until: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """The values a watch tells of, followed until they are as wanted."""
    known: dict[str, str] = {}
    deadline_s = time.monotonic() + ENDED_S
    while not until(known):
        assert time.monotonic() < deadline_s, known
        update = watch.next(timeout_s=1.0)
        if isinstance(update, Snapshot):
            known = values(update)
        elif update is not None:
            for key, entry in update.changes:
                if entry is None:
                    known.pop(key, None)
                else:
                    known[key] = entry.value
    return known


def test_gets_what_was_put(kv: KeyValue, prefix: str) -> None:
    assert kv.get(prefix).entries == {}
    revision = kv.write(put(f"{prefix}a", "1"))
    assert revision is not None
    snapshot = kv.get(prefix)
    assert snapshot.entries == {f"{prefix}a": Entry("1", revision)}
    assert snapshot.revision >= revision


def test_a_prefix_ends_where_it_ends(kv: KeyValue, prefix: str) -> None:
    kv.write(put(f"{prefix}a/1", "in"))
    kv.write(put(f"{prefix}ab", "out"))
    kv.write(put(f"{prefix}b", "out"))
    assert values(kv.get(f"{prefix}a/")) == {f"{prefix}a/1": "in"}


def test_keeps_long_values_and_any_letters(kv: KeyValue, prefix: str) -> None:
    long, odd = "x" * 200_000, 'Grüße "\\\n\t☃'
    kv.write(Write({}, (Put(f"{prefix}long", long), Put(f"{prefix}odd", odd), Put(f"{prefix}empty", ""))))
    assert values(kv.get(prefix)) == {f"{prefix}long": long, f"{prefix}odd": odd, f"{prefix}empty": ""}


def test_writes_only_if_the_guards_hold(kv: KeyValue, prefix: str) -> None:
    a, b = f"{prefix}a", f"{prefix}b"
    first = kv.write(Write({a: ABSENT}, (Put(a, "1"),)))
    assert first is not None
    assert kv.write(Write({a: ABSENT}, (Put(a, "2"),))) is None
    assert kv.write(Write({a: first + 1}, (Put(a, "2"),))) is None
    assert kv.write(Write({a: first, b: first}, (Put(b, "2"),))) is None
    assert values(kv.get(prefix)) == {a: "1"}
    second = kv.write(Write({a: first, b: ABSENT}, (Put(b, "2"),)))
    assert second is not None
    assert second > first


def test_all_of_a_write_or_nothing(kv: KeyValue, prefix: str) -> None:
    a, b, c = f"{prefix}a", f"{prefix}b", f"{prefix}c"
    kv.write(Write({}, (Put(a, "1"), Put(b, "1"))))
    revision = kv.write(Write({}, (Put(c, "2"), Put(b, "2")), (a,)))
    assert revision is not None
    assert kv.get(prefix).entries == {b: Entry("2", revision), c: Entry("2", revision)}
    assert kv.write(Write({c: ABSENT}, (Put(a, "3"),), (b,))) is None
    assert kv.get(prefix).entries == {b: Entry("2", revision), c: Entry("2", revision)}


def test_deleting_what_is_not_there_changes_nothing(kv: KeyValue, prefix: str) -> None:
    kv.write(put(f"{prefix}a", "1"))
    assert kv.write(Write({}, (), (f"{prefix}b",))) is not None
    assert values(kv.get(prefix)) == {f"{prefix}a": "1"}


def test_of_writers_at_once_one_wins_each_time(place: Home, kv: KeyValue, prefix: str) -> None:
    num_threads, num_each = 8, 20
    key = f"{prefix}counter"
    # Two clients for all threads: eight of them proving their passwords at once take a busy machine too long.
    other = place.open()
    clients = [kv, other]
    for client in clients:
        client.get(key)

    def count_up(client: KeyValue) -> None:
        for _ in range(num_each):
            while True:
                entry = client.get(key).entries.get(key)
                number, revision = (int(entry.value), entry.revision) if entry else (0, ABSENT)
                if client.write(Write({key: revision}, (Put(key, str(number + 1)),))) is not None:
                    break

    threads = [threading.Thread(target=count_up, args=(clients[i % 2],)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kv.get(key).entries[key].value == str(num_threads * num_each)
    if place.name != "memory":
        other.close()


def test_keys_end_with_their_lease(place: Home, kv: KeyValue, prefix: str) -> None:
    lease_id = kv.grant(place.ttl_s)
    kv.write(Write({}, (Put(f"{prefix}a", "1", lease_id), Put(f"{prefix}b", "1"))))
    assert kv.get(prefix).entries[f"{prefix}a"].lease_id == lease_id
    watch = kv.watch(prefix)
    try:
        assert follow(watch, lambda known: known.keys() == {f"{prefix}b"})
    finally:
        watch.close()
    with pytest.raises(LeaseLostError, match="is over"):
        kv.keep_alive(lease_id)
    with pytest.raises(LeaseLostError):
        kv.write(Write({}, (Put(f"{prefix}b", "2"), Put(f"{prefix}a", "2", lease_id))))
    assert values(kv.get(prefix)) == {f"{prefix}b": "1"}
    kv.revoke(lease_id)


def test_a_lease_lives_while_it_is_kept_alive(kv: KeyValue, prefix: str) -> None:
    lease_id = kv.grant(KEPT_TTL_S)
    kv.write(put(f"{prefix}a", "1", lease_id))
    end_s = time.monotonic() + 1.75 * KEPT_TTL_S
    while time.monotonic() < end_s:
        kv.keep_alive(lease_id)
        time.sleep(KEPT_TTL_S / 20)
    assert values(kv.get(prefix)) == {f"{prefix}a": "1"}


def test_revoking_a_lease_ends_its_keys_at_once(kv: KeyValue, prefix: str) -> None:
    lease_id = kv.grant(600.0)
    kv.write(put(f"{prefix}a", "1", lease_id))
    kv.revoke(lease_id)
    assert kv.get(prefix).entries == {}
    with pytest.raises(LeaseLostError):
        kv.keep_alive(lease_id)


def test_a_key_follows_its_last_lease_only(kv: KeyValue, prefix: str) -> None:
    first, second = kv.grant(600.0), kv.grant(600.0)
    kv.write(put(f"{prefix}a", "1", first))
    kv.write(put(f"{prefix}b", "1", first))
    kv.write(put(f"{prefix}a", "2", second))
    kv.write(put(f"{prefix}b", "2"))
    kv.revoke(first)
    assert values(kv.get(prefix)) == {f"{prefix}a": "2", f"{prefix}b": "2"}
    kv.revoke(second)
    assert values(kv.get(prefix)) == {f"{prefix}b": "2"}


def test_a_watch_begins_with_everything_and_tells_every_change_in_order(kv: KeyValue, prefix: str) -> None:
    a, b = f"{prefix}a", f"{prefix}b"
    kv.write(put(a, "0"))
    watch = kv.watch(prefix)
    try:
        first = next_update(watch)
        assert isinstance(first, Snapshot)
        assert values(first) == {a: "0"}
        wanted: list[tuple[str, str | None]] = []
        for number in range(10):
            kv.write(put(a, str(number)))
            kv.write(put("/hieravg/somebody-elses", "not told"))
            kv.write(put(b, str(number)))
            kv.write(Write({}, (), (b,)))
            wanted += [(a, str(number)), (b, str(number)), (b, None)]
        told: list[tuple[str, str | None]] = []
        revision = first.revision
        while len(told) < len(wanted):
            update = next_update(watch)
            assert isinstance(update, Changes)
            assert update.revision > revision
            revision = update.revision
            told += [(key, entry.value if entry else None) for key, entry in update.changes]
        assert told == wanted
    finally:
        watch.close()


def test_what_was_written_together_is_told_together(kv: KeyValue, prefix: str) -> None:
    watch = kv.watch(prefix)
    try:
        next_update(watch)
        kv.write(Write({}, (Put(f"{prefix}a", "1"), Put(f"{prefix}b", "1"))))
        update = next_update(watch)
        assert isinstance(update, Changes)
        assert {key for key, _ in update.changes} == {f"{prefix}a", f"{prefix}b"}
    finally:
        watch.close()


def test_a_watch_that_has_nothing_to_tell_returns_in_time(kv: KeyValue, prefix: str) -> None:
    watch = kv.watch(prefix)
    try:
        next_update(watch)
        assert watch.next(timeout_s=0.05) is None
    finally:
        watch.close()


def test_closing_a_watch_ends_a_wait_in_another_thread(kv: KeyValue, prefix: str) -> None:
    watch = kv.watch(prefix)
    next_update(watch)
    ended = threading.Event()

    def wait() -> None:
        assert watch.next(timeout_s=10 * PROMPT_S) is None
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    watch.close()
    assert ended.wait(PROMPT_S)
    thread.join()
    assert watch.next(timeout_s=0.05) is None


def test_a_watch_survives_compaction(place: Home, kv: KeyValue, prefix: str) -> None:
    watch = kv.watch(prefix)
    try:
        next_update(watch)
        for number in range(20):
            kv.write(put(f"{prefix}a", str(number)))
        place.compact()
        kv.write(put(f"{prefix}b", "after"))
        assert follow(watch, lambda known: f"{prefix}b" in known)[f"{prefix}b"] == "after"
    finally:
        watch.close()
    late = kv.watch(prefix)
    try:
        update = next_update(late)
        assert isinstance(update, Snapshot)
        assert values(update) == {f"{prefix}a": "19", f"{prefix}b": "after"}
    finally:
        late.close()


def test_a_watch_tells_everything_again_if_asked_to(kv: KeyValue, prefix: str) -> None:
    watch = kv.watch(prefix)
    try:
        next_update(watch)
        for number in range(5):
            written = kv.write(put(f"{prefix}a", str(number)))
            assert written is not None
            watch.resync()
            # Before it there may be what was told earlier, or the end of a wait.
            updates = (watch.next(timeout_s=PROMPT_S) for _ in range(10))
            update = next(update for update in updates if isinstance(update, Snapshot))
            assert update.revision >= written
            assert values(update) == {f"{prefix}a": str(number)}
        kv.write(put(f"{prefix}b", "and on"))
        assert follow(watch, lambda known: f"{prefix}b" in known)
    finally:
        watch.close()


def test_nothing_runs_on_after_closing(place: Home, prefix: str) -> None:
    if place.name == "memory":
        from elastic_hieravg.membership.memory import MemoryKeyValue

        client: KeyValue = MemoryKeyValue()
    else:
        client = place.open()
    client.write(put(f"{prefix}a", "1"))
    watch = client.watch(prefix)
    next_update(watch)
    watch.close()
    client.close()
    assert not [thread for thread in threading.enumerate() if "hieravg-etcd" in thread.name]
    with pytest.raises(StoreAwayError, match="was closed"):
        client.get(prefix)


def test_the_fork_does_the_same(tmp_path: Path) -> None:
    if IN_FORK:
        from elastic_hieravg.membership.etcd_stubs import etcd_stubs

        assert etcd_stubs().__name__ == "pyetcd.etcdrpc"
        return
    code = (
        "import google.protobuf.descriptor_pb2, sys, pytest;"
        "sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, __file__],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parent.parent.parent,
        env={**os.environ, "HIERAVG_TEST_FORK": "1"},
    )
    assert done.returncode == 0, done.stdout
    num_tests = sum(name.startswith("test_") for name in globals()) - 1
    assert f"{num_tests * len(FORK_NAMES) + 1} passed" in done.stdout
