"""The store with nothing installed: the first agent serves a ledger to the others over TCP.

Not a torch TCPStore: a client of one whose server is frozen waits for ever, whatever its timeout. Leases are
judged by the server's clock alone. Invariant: time in which the server itself stood still ends no lease.
"""

import contextlib
import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic_hieravg.errors import LeaseLostError, Problem, StoreAwayError, StoreDeniedError, StoreError
from elastic_hieravg.membership.frames import RECEIVE_BYTES, Decoder, FrameError, Stream, encode
from elastic_hieravg.membership.kv import Changes, Entry, Put, Snapshot, Write
from elastic_hieravg.membership.ledger import Ledger, lease_lost

PROTOCOL = "elastic_hieravg/embedded/1"
CALL_TIMEOUT_S = 3.0
CONNECTIONS_MAX = 4096
# A client that does not read what it asked for is let go.
UNSENT_BYTES_MAX = 64 * 1024 * 1024
# Later than this the server was held up, and so was everybody's heartbeat.
STALL_S = 0.5
POLL_S = 0.5
BACKLOG = 512
# The first wait after a watch ended, and the longest.
RETRY_S = 0.05
RETRY_MAX_S = 1.0


class EmbeddedServer:
    """Serves one run's store in a thread of its own until closed."""

    def __init__(
        self, address: str, port: int, *, run_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_id = run_id
        self._clock = clock
        # Ids that no server before this one gave away.
        self._ledger = Ledger(first_lease_id=secrets.randbits(47) << 8)
        self._listener = socket.create_server((address, port), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="hieravg-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        self._thread.join()

    def _serve(self) -> None:
        try:
            last_s = self._clock()
            while not self._is_closed:
                timeout_s = self._timeout_s(last_s)
                ready = self._selector.select(timeout_s)
                now_s = self._clock()
                if now_s - last_s > timeout_s + STALL_S:
                    self._ledger.forgive(now_s - last_s - timeout_s)
                last_s = now_s
                for key, events in ready:
                    self._handle(now_s, key.fileobj, events)
                # After the heartbeats that waited, not before: they were in time.
                self._ledger.expire(now_s)
                self._tell_watchers()
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            for sock in (self._listener, self._waker, self._woken):
                sock.close()
            self._selector.close()

    def _timeout_s(self, now_s: float) -> float:
        expiry_s = self._ledger.next_expiry_s()
        return POLL_S if expiry_s is None else min(POLL_S, max(0.0, expiry_s - now_s))

    def _handle(self, now_s: float, sock: Any, events: int) -> None:
        if sock is self._listener:
            self._accept()
            return
        client = self._clients.get(sock)
        if client is None:
            return
        try:
            if events & selectors.EVENT_WRITE:
                client.flush()
            if events & selectors.EVENT_READ:
                for message in client.read():
                    client.send(self._answer(now_s, client, message))
            self._selector.modify(sock, client.events)
        except (OSError, FrameError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            # Gone, or no client of ours: whatever it sends, the others are served on.
            self._drop(client)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._clients) >= CONNECTIONS_MAX:
                sock.close()
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._clients[sock] = _Client(sock)
            self._selector.register(sock, selectors.EVENT_READ)

    def _drop(self, client: "_Client") -> None:
        del self._clients[client.sock]
        self._selector.unregister(client.sock)
        client.sock.close()

    def _answer(self, now_s: float, client: "_Client", message: Mapping[str, Any]) -> dict[str, Any]:
        if not client.is_known:
            return self._greet(client, message)
        try:
            match message["call"]:
                case "get":
                    return _snapshot_message(self._ledger.get(str(message["prefix"])))
                case "write":
                    return {"revision": self._ledger.write(_read_write(message))}
                case "grant":
                    return {"lease_id": self._ledger.grant(now_s, ttl_s=_read_ttl_s(message))}
                case "keep_alive":
                    self._ledger.keep_alive(now_s, lease_id=int(message["lease_id"]))
                    return {}
                case "revoke":
                    self._ledger.revoke(int(message["lease_id"]))
                    return {}
                case "watch":
                    return self._watch(client, str(message["prefix"]), message["revision"])
                case other:
                    raise FrameError(f"there is no call {other!r}")
        except LeaseLostError:
            return {"lease_lost": True}

    def _greet(self, client: "_Client", message: Mapping[str, Any]) -> dict[str, Any]:
        wanted = {"protocol": PROTOCOL, "run_id": self._run_id}
        client.is_known = message == wanted
        return wanted

    def _watch(self, client: "_Client", prefix: str, revision: int | None) -> dict[str, Any]:
        changes = None if revision is None else self._ledger.changes_after(revision, prefix=prefix)
        client.prefix = prefix
        client.revision = self._ledger.revision
        # A revision that is not known here was another server's.
        if changes is None or revision is None or revision > self._ledger.revision:
            return _snapshot_message(self._ledger.get(prefix))
        return _changes_message(changes)

    def _tell_watchers(self) -> None:
        for client in list(self._clients.values()):
            if client.prefix is None or client.revision == self._ledger.revision:
                continue
            changes = self._ledger.changes_after(client.revision, prefix=client.prefix)
            client.revision = self._ledger.revision
            try:
                if changes is None:
                    client.send(_snapshot_message(self._ledger.get(client.prefix)))
                elif changes.changes:
                    client.send(_changes_message(changes))
                self._selector.modify(client.sock, client.events)
            except (OSError, FrameError):
                self._drop(client)


class _Client:
    """A connection as the server sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_known = False
        self.prefix: str | None = None
        self.revision = 0
        self._decoder = Decoder()
        self._unsent = bytearray()

    @property
    def events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def read(self) -> list[dict[str, Any]]:
        data = self.sock.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the client hung up")
        return self._decoder.feed(data)

    def send(self, message: dict[str, Any]) -> None:
        self._unsent += encode(message)
        if len(self._unsent) > UNSENT_BYTES_MAX:
            raise FrameError("the client does not read")
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]


class EmbeddedKeyValue:
    """A client of an `EmbeddedServer`. Connections are opened as threads need them, and kept."""

    def __init__(self, host: str, port: int, *, run_id: str, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._where = (host, port)
        self._run_id = run_id
        self._call_timeout_s = call_timeout_s
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._is_closed = False

    def get(self, prefix: str) -> Snapshot:
        return _read_snapshot(self._call({"call": "get", "prefix": prefix}))

    def write(self, write: Write) -> int | None:
        revision = self._call({"call": "write", **_write_message(write)})["revision"]
        return None if revision is None else int(revision)

    def grant(self, ttl_s: float) -> int:
        return int(self._call({"call": "grant", "ttl_s": ttl_s})["lease_id"])

    def keep_alive(self, lease_id: int) -> None:
        self._call({"call": "keep_alive", "lease_id": lease_id})

    def revoke(self, lease_id: int) -> None:
        self._call({"call": "revoke", "lease_id": lease_id})

    def watch(self, prefix: str) -> "EmbeddedWatch":
        return EmbeddedWatch(self.connect, prefix, call_timeout_s=self._call_timeout_s)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def connect(self, deadline_s: float) -> Stream:
        """A new connection to the server, after the greeting."""
        host, port = self._where
        try:
            sock = socket.create_connection((host, port), timeout=max(0.001, deadline_s - time.monotonic()))
        except OSError as exc:
            raise self._away(exc) from exc
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = Stream(sock)
        mine = {"protocol": PROTOCOL, "run_id": self._run_id}
        try:
            stream.send(mine, deadline_s=deadline_s)
            theirs = stream.receive(deadline_s=deadline_s)
        except (OSError, FrameError) as exc:
            stream.close()
            raise self._away(exc) from exc
        if theirs != mine:
            stream.close()
            raise StoreDeniedError(
                Problem(
                    f"the store at {host}:{port} serves {theirs.get('run_id')!r}, {theirs.get('protocol')}; "
                    f"this node asks for {self._run_id!r}, {PROTOCOL}",
                    "give every run its own endpoint, and run the same version on every node",
                )
            )
        return stream

    def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        deadline_s = time.monotonic() + self._call_timeout_s
        stream = self._take(deadline_s)
        try:
            stream.send(message, deadline_s=deadline_s)
            answer = stream.receive(deadline_s=deadline_s)
        except (OSError, FrameError) as exc:
            stream.close()
            raise self._away(exc) from exc
        self._give_back(stream)
        if answer.get("lease_lost"):
            raise lease_lost(int(message.get("lease_id", 0)))
        return answer

    def _take(self, deadline_s: float) -> Stream:
        with self._lock:
            if self._is_closed:
                raise StoreAwayError(Problem("the store's client was closed", "open another one"))
            if self._idle:
                return self._idle.pop()
        return self.connect(deadline_s)

    def _give_back(self, stream: Stream) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(stream)
                return
        stream.close()

    def _away(self, exc: Exception) -> StoreAwayError:
        host, port = self._where
        return StoreAwayError(
            Problem(
                f"the store at {host}:{port} does not answer: {exc}",
                "is the first node's agent running, and is the endpoint its address?",
            )
        )


class EmbeddedWatch:
    def __init__(self, connect: Callable[[float], Stream], prefix: str, *, call_timeout_s: float) -> None:
        self._connect = connect
        self._prefix = prefix
        self._call_timeout_s = call_timeout_s
        self._revision: int | None = None
        self._stream: Stream | None = None
        self._closed = threading.Event()
        self._wants_all = threading.Event()
        self._lock = threading.Lock()
        self._wait_s = 0.0

    def next(self, *, timeout_s: float) -> Snapshot | Changes | None:
        with self._lock:
            return None if self._closed.is_set() else self._next(timeout_s)

    def resync(self) -> None:
        self._wants_all.set()
        stream = self._stream
        if stream is not None:
            stream.end()

    def close(self) -> None:
        self._closed.set()
        stream = self._stream
        if stream is not None:
            stream.end()
        with self._lock:
            self._end()

    def _next(self, timeout_s: float) -> Snapshot | Changes | None:
        deadline_s = time.monotonic() + timeout_s
        try:
            if self._wants_all.is_set():
                self._end()
            while self._stream is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._closed.wait(min(self._wait_s, left_s)):
                    return None
                self._begin()
            update = _read_update(self._stream.receive(deadline_s=deadline_s))
        except TimeoutError:
            return None
        except (OSError, FrameError, StoreError) as exc:
            self._end()
            if self._wants_all.is_set():
                # Ended from here, and begun again with the next call.
                return None
            is_news, self._wait_s = self._wait_s == 0.0, min(2 * self._wait_s or RETRY_S, RETRY_MAX_S)
            if not is_news or self._closed.is_set():
                return None
            if isinstance(exc, StoreError):
                raise
            raise StoreAwayError(
                Problem(f"the store's watch ended: {exc}", "it goes on when the store is back")
            ) from exc
        self._revision, self._wait_s = update.revision, 0.0
        return update

    def _begin(self) -> None:
        deadline_s = time.monotonic() + self._call_timeout_s
        if self._wants_all.is_set():
            # Cleared before it is asked: who asks after this is told of a later state.
            self._wants_all.clear()
            self._revision = None
        stream = self._connect(deadline_s)
        try:
            message = {"call": "watch", "prefix": self._prefix, "revision": self._revision}
            stream.send(message, deadline_s=deadline_s)
        except OSError:
            stream.close()
            raise
        self._stream = stream

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


# --- messages -----------------------------------------------------------------------------------------------


def _write_message(write: Write) -> dict[str, Any]:
    return {
        "guards": dict(write.guards),
        "puts": [[put.key, put.value, put.lease_id] for put in write.puts],
        "deletes": list(write.deletes),
    }


def _read_write(message: Mapping[str, Any]) -> Write:
    return Write(
        {str(key): int(revision) for key, revision in message["guards"].items()},
        tuple(Put(str(key), str(value), int(lease_id)) for key, value, lease_id in message["puts"]),
        tuple(map(str, message["deletes"])),
    )


def _read_ttl_s(message: Mapping[str, Any]) -> float:
    ttl_s = float(message["ttl_s"])
    if not 0 < ttl_s < math.inf:
        raise FrameError(f"a lease of {ttl_s} s is none")
    return ttl_s


def _entry_message(entry: Entry | None) -> list[Any] | None:
    return None if entry is None else [entry.value, entry.revision, entry.lease_id]


def _read_entry(value: Any) -> Entry:
    text, revision, lease_id = value
    return Entry(str(text), int(revision), int(lease_id))


def _snapshot_message(snapshot: Snapshot) -> dict[str, Any]:
    entries = {key: _entry_message(entry) for key, entry in snapshot.entries.items()}
    return {"entries": entries, "revision": snapshot.revision}


def _read_snapshot(message: Mapping[str, Any]) -> Snapshot:
    entries = {str(key): _read_entry(entry) for key, entry in message["entries"].items()}
    return Snapshot(entries, int(message["revision"]))


def _changes_message(changes: Changes) -> dict[str, Any]:
    told = [[key, _entry_message(entry)] for key, entry in changes.changes]
    return {"changes": told, "revision": changes.revision}


def _read_update(message: Mapping[str, Any]) -> Snapshot | Changes:
    if "entries" in message:
        return _read_snapshot(message)
    changes = tuple(
        (str(key), None if entry is None else _read_entry(entry)) for key, entry in message["changes"]
    )
    return Changes(changes, int(message["revision"]))
