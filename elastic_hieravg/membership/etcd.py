"""The store in etcd v3. `etcd_client` says how it is reached; here is what it is asked.

Leases and revisions are etcd's own. Invariant: a watch misses nothing: it goes on from its revision, or
begins with a snapshot again if etcd has forgotten it.
"""

import contextlib
import math
import queue
import threading
from collections.abc import Iterator
from typing import Any

from elastic_hieravg.errors import LeaseLostError, Problem, StoreAwayError, StoreError
from elastic_hieravg.membership.etcd_client import CALL_TIMEOUT_S, EtcdClient, EtcdSettings
from elastic_hieravg.membership.kv import Changes, Entry, Snapshot, Write
from elastic_hieravg.membership.ledger import lease_lost

# The first wait after a watch ended, and the longest.
RETRY_S = 0.05
RETRY_MAX_S = 1.0
# A reader that falls behind holds the stream up, not memory.
UPDATES_WAITING_MAX = 64


class EtcdKeyValue:
    def __init__(self, settings: EtcdSettings, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._client = EtcdClient(settings, call_timeout_s=call_timeout_s)
        self._stubs = self._client.stubs
        self._watches: list[EtcdWatch] = []

    @property
    def endpoint(self) -> str:
        """The endpoint that is asked now."""
        return self._client.endpoint

    def get(self, prefix: str) -> Snapshot:
        request = self._stubs.RangeRequest(key=prefix.encode(), range_end=_after(prefix))
        answer = self._client.call("KV", "Range", request)
        entries = {_text(each.key): _entry(each) for each in answer.kvs}
        return Snapshot(entries, int(answer.header.revision))

    def write(self, write: Write) -> int | None:
        answer = self._client.call("KV", "Txn", self._transaction(write), is_repeatable=False)
        return int(answer.header.revision) if answer.succeeded else None

    def grant(self, ttl_s: float) -> int:
        # An answer that is lost leaves a lease without keys behind, which ends by itself.
        request = self._stubs.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        return int(self._client.call("Lease", "LeaseGrant", request).ID)

    def keep_alive(self, lease_id: int) -> None:
        request = self._stubs.LeaseKeepAliveRequest(ID=lease_id)
        answer = self._client.call("Lease", "LeaseKeepAlive", request)
        if answer.TTL <= 0:
            raise lease_lost(lease_id)

    def revoke(self, lease_id: int) -> None:
        request = self._stubs.LeaseRevokeRequest(ID=lease_id)
        with contextlib.suppress(LeaseLostError):
            self._client.call("Lease", "LeaseRevoke", request)

    def watch(self, prefix: str) -> "EtcdWatch":
        watch = EtcdWatch(self, self._client, prefix)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        while self._watches:
            self._watches.pop().close()
        self._client.close()

    def _transaction(self, write: Write) -> Any:
        stubs = self._stubs
        compare = [
            stubs.Compare(
                result=stubs.Compare.EQUAL, target=stubs.Compare.MOD, key=key.encode(), mod_revision=revision
            )
            for key, revision in write.guards.items()
        ]
        puts = [
            stubs.RequestOp(
                request_put=stubs.PutRequest(key=put.key.encode(), value=put.value.encode(), lease=put.lease_id)
            )
            for put in write.puts
        ]
        deletes = [
            stubs.RequestOp(request_delete_range=stubs.DeleteRangeRequest(key=key.encode()))
            for key in write.deletes
        ]
        return stubs.TxnRequest(compare=compare, success=[*puts, *deletes])


class EtcdWatch:
    """A thread of its own reads the stream, because gRPC's cannot be waited for with a bound."""

    def __init__(self, store: EtcdKeyValue, client: EtcdClient, prefix: str) -> None:
        self._store = store
        self._client = client
        self._prefix = prefix
        self._revision: int | None = None
        self._updates: queue.Queue[Snapshot | Changes | StoreError | None] = queue.Queue(UPDATES_WAITING_MAX)
        self._closed = threading.Event()
        self._wants_all = threading.Event()
        self._lock = threading.Lock()
        self._stream: Any = None
        self._client.on_move.append(self._move)
        self._thread = threading.Thread(target=self._run, name="hieravg-etcd-watch", daemon=True)
        self._thread.start()

    def next(self, *, timeout_s: float) -> Snapshot | Changes | None:
        if self._closed.is_set():
            return None
        try:
            update = self._updates.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(update, StoreError):
            raise update
        return update

    def resync(self) -> None:
        self._wants_all.set()
        self._move()

    def close(self) -> None:
        self._closed.set()
        self._move()
        with contextlib.suppress(ValueError):
            self._client.on_move.remove(self._move)
        self._thread.join()
        # Whoever waits is let go; if there is no room for a word to it, it is not waiting.
        with contextlib.suppress(queue.Full):
            self._updates.put_nowait(None)

    def _move(self) -> None:
        """End the stream; the thread begins another one where the client is now."""
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()

    def _run(self) -> None:
        wait_s = RETRY_S
        is_away = False
        while not self._closed.is_set():
            try:
                for update in self._follow():
                    self._put(update)
                    wait_s, is_away = RETRY_S, False
            except StoreError as exc:
                if self._wants_all.is_set():
                    # Ended from here, and begun again at once.
                    continue
                if not is_away:
                    self._put(exc)
                is_away = True
            self._closed.wait(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    def _follow(self) -> Iterator[Snapshot | Changes]:
        """Updates until the stream ends, for whatever reason."""
        if self._revision is None or self._wants_all.is_set():
            # Cleared before it is read: who asks after this is told of a later state.
            self._wants_all.clear()
            snapshot = self._store.get(self._prefix)
            self._revision = snapshot.revision
            yield snapshot
        ended = threading.Event()
        stream = self._client.stream("Watch", "Watch", self._requests(ended))
        with self._lock:
            self._stream = stream
        try:
            # Asked while the stream began: nobody else ends it.
            if self._closed.is_set() or self._wants_all.is_set():
                stream.cancel()
            for answer in stream:
                # Forgotten by compaction, or a store that began anew: only a snapshot helps.
                if answer.compact_revision or (answer.created and answer.header.revision < self._revision):
                    self._revision = None
                    return
                if answer.canceled:
                    raise StoreAwayError(
                        Problem(f"etcd ended a watch: {answer.cancel_reason}", "it is begun again")
                    )
                if answer.events:
                    self._revision = int(answer.header.revision)
                    yield Changes(tuple(_change(event) for event in answer.events), self._revision)
        finally:
            with self._lock:
                self._stream = None
            stream.cancel()
            ended.set()

    def _requests(self, ended: threading.Event) -> Iterator[Any]:
        stubs = self._client.stubs
        assert self._revision is not None
        create = stubs.WatchCreateRequest(
            key=self._prefix.encode(), range_end=_after(self._prefix), start_revision=self._revision + 1
        )
        yield stubs.WatchRequest(create_request=create)
        # A stream lives as long as its requests do; a thread of gRPC waits here.
        ended.wait()

    def _put(self, update: Snapshot | Changes | StoreError) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._updates.put(update, timeout=RETRY_MAX_S)
                return


def _after(prefix: str) -> bytes:
    """The first key behind all that begin with the prefix."""
    encoded = prefix.encode()
    assert encoded, "a prefix is not empty"
    return encoded[:-1] + bytes([encoded[-1] + 1])


def _text(value: bytes) -> str:
    # What is not text was not written by us, and is refused where it is read.
    return value.decode(errors="replace")


def _entry(stored: Any) -> Entry:
    return Entry(_text(stored.value), int(stored.mod_revision), int(stored.lease))


def _change(event: Any) -> tuple[str, Entry | None]:
    # 1 is etcd's DELETE.
    return _text(event.kv.key), None if event.type == 1 else _entry(event.kv)
