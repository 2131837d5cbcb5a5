"""The store with nothing installed: the first agent serves a ledger to the others over TCP.

Not a torch TCPStore: a client of one whose server is frozen waits for ever, whatever its timeout. Leases are
judged by the server's clock alone. Invariant: time in which the server itself stood still ends no lease.
"""

import contextlib
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic_hieravg.errors import LeaseLostError, Problem, StoreAwayError, StoreDeniedError
from elastic_hieravg.membership.embedded_watch import EmbeddedWatch
from elastic_hieravg.membership.frames import RECEIVE_BYTES, Decoder, FrameError, Stream, encode
from elastic_hieravg.membership.kv import Snapshot, Write
from elastic_hieravg.membership.ledger import HISTORY_MAX, Ledger, lease_lost
from elastic_hieravg.membership.wire import (
    changes_message,
    raise_if_away,
    read_snapshot,
    read_ttl_s,
    read_write,
    snapshot_message,
    write_message,
)

PROTOCOL = "elastic_hieravg/embedded/1"
CALL_TIMEOUT_S = 3.0
CONNECTIONS_MAX = 4096
# A client that does not read what it asked for is let go.
UNSENT_BYTES_MAX = 64 * 1024 * 1024
# Later than this the server was held up, and so was everybody's heartbeat.
STALL_S = 0.5
POLL_S = 0.5
BACKLOG = 512
_CALLS = frozenset({"get", "write", "grant", "keep_alive", "revoke", "watch"})


class Steward(Protocol):
    """Who owns a server that may come to serve, or cease to. Called in the server's thread."""

    def hear(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Answer what is no call to the store."""

    def admit(self, now_s: float, ledger: Ledger, write: Write) -> Write:
        """The write as it is to be applied; `StoreAwayError` if not now."""

    def why_away(self) -> str:
        """Why the store is not served here."""


def new_lease_id() -> int:
    """Ids from here on were given away by no server before."""
    return secrets.randbits(47) << 8


class EmbeddedServer:
    """Serves one run's store in a thread of its own until closed.

    With a `steward` it may also stand by: it then answers what the steward answers, and no call to the store.
    `server_id` is this server's alone, whatever was or will be at its address. `history_max`: how many changes
    are kept for those who watch.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
        steward: Steward | None = None,
        is_serving: bool = True,
        history_max: int = HISTORY_MAX,
    ) -> None:
        self._run_id = run_id
        self._clock = clock
        self._steward = steward
        self.server_id = secrets.token_hex(8)
        self._ledger = Ledger(history_max=history_max, first_lease_id=new_lease_id())
        self._is_serving = is_serving
        self._orders: queue.SimpleQueue[Ledger | None] = queue.SimpleQueue()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
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

    def serve(self, ledger: Ledger | None) -> None:
        """Go on with this ledger, or stand by. Whoever is connected has to come anew."""
        self._orders.put(ledger)
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _serve(self) -> None:
        try:
            last_s = self._clock()
            while not self._is_closed:
                timeout_s = self._timeout_s(last_s)
                ready = self._selector.select(timeout_s)
                self._take_orders()
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

    def _take_orders(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                ledger = self._orders.get_nowait()
                self._is_serving = ledger is not None
                self._ledger = ledger or Ledger()
                for client in [each for each in self._clients.values() if each.prefix is not None]:
                    self._drop(client)

    def _timeout_s(self, now_s: float) -> float:
        expiry_s = self._ledger.next_expiry_s()
        return POLL_S if expiry_s is None else min(POLL_S, max(0.0, expiry_s - now_s))

    def _handle(self, now_s: float, sock: Any, events: int) -> None:
        if sock is self._listener:
            self._accept()
            return
        if sock is self._woken:
            self._woken.recv(RECEIVE_BYTES)
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
        steward = self._steward
        try:
            if steward is not None and message["call"] not in _CALLS:
                return steward.hear(message)
            if steward is not None and not self._is_serving:
                return {"away": steward.why_away()}
            return self._call(now_s, client, message)
        except LeaseLostError:
            return {"lease_lost": True}
        except StoreAwayError as exc:
            return {"away": exc.problems[0].message}

    def _call(self, now_s: float, client: "_Client", message: Mapping[str, Any]) -> dict[str, Any]:
        match message["call"]:
            case "get":
                return snapshot_message(self._ledger.get(str(message["prefix"])))
            case "write":
                write = read_write(message)
                if self._steward is not None:
                    write = self._steward.admit(now_s, self._ledger, write)
                return {"revision": self._ledger.write(write)}
            case "grant":
                return {"lease_id": self._ledger.grant(now_s, ttl_s=read_ttl_s(message))}
            case "keep_alive":
                return {"ttl_s": self._ledger.keep_alive(now_s, lease_id=int(message["lease_id"]))}
            case "revoke":
                self._ledger.revoke(int(message["lease_id"]))
                return {}
            case "watch":
                return self._watch(client, str(message["prefix"]), message["revision"])
            case other:
                raise FrameError(f"there is no call {other!r}")

    def _greet(self, client: "_Client", message: Mapping[str, Any]) -> dict[str, Any]:
        wanted = {"protocol": PROTOCOL, "run_id": self._run_id}
        client.is_known = message == wanted
        return {**wanted, "server_id": self.server_id}

    def _watch(self, client: "_Client", prefix: str, revision: int | None) -> dict[str, Any]:
        changes = None if revision is None else self._ledger.changes_after(revision, prefix=prefix)
        client.prefix = prefix
        client.revision = self._ledger.revision
        # A revision that is not known here was another server's.
        if changes is None or revision is None or revision > self._ledger.revision:
            return snapshot_message(self._ledger.get(prefix))
        return changes_message(changes)

    def _tell_watchers(self) -> None:
        for client in list(self._clients.values()):
            if client.prefix is None or client.revision == self._ledger.revision:
                continue
            changes = self._ledger.changes_after(client.revision, prefix=client.prefix)
            client.revision = self._ledger.revision
            try:
                if changes is None:
                    client.send(snapshot_message(self._ledger.get(client.prefix)))
                elif changes.changes:
                    client.send(changes_message(changes))
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
    """A client of an `EmbeddedServer`. Connections are opened as threads need them, and kept.

    `server_id`: the only server it takes for the one it asks. `is_gone`: there is proof that the process it was
    connected to has ended: nobody is at its address, or somebody else.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        run_id: str,
        call_timeout_s: float = CALL_TIMEOUT_S,
        server_id: str | None = None,
    ) -> None:
        self._where = (host, port)
        self._run_id = run_id
        self._server_id = server_id
        self.is_gone = False
        self._call_timeout_s = call_timeout_s
        self._lock = threading.Lock()
        self._idle: list[Stream] = []
        self._busy: set[Stream] = set()
        self._is_closed = False

    def get(self, prefix: str) -> Snapshot:
        return read_snapshot(self.call({"call": "get", "prefix": prefix}))

    def write(self, write: Write) -> int | None:
        revision = self.call({"call": "write", **write_message(write)})["revision"]
        return None if revision is None else int(revision)

    def grant(self, ttl_s: float) -> int:
        return int(self.call({"call": "grant", "ttl_s": ttl_s})["lease_id"])

    def keep_alive(self, lease_id: int) -> None:
        self.renew(lease_id)

    def renew(self, lease_id: int) -> float:
        """As `keep_alive`; how long the lease lives, in seconds."""
        return float(self.call({"call": "keep_alive", "lease_id": lease_id})["ttl_s"])

    def revoke(self, lease_id: int) -> None:
        self.call({"call": "revoke", "lease_id": lease_id})

    def watch(self, prefix: str) -> EmbeddedWatch:
        return EmbeddedWatch(self.connect, prefix, call_timeout_s=self._call_timeout_s)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for stream in self._busy:
                # Whoever waits for an answer waits no more, and closes it.
                stream.end()
        for stream in idle:
            stream.close()

    def connect(self, deadline_s: float) -> Stream:
        """A new connection to the server, after the greeting."""
        host, port = self._where
        try:
            sock = socket.create_connection((host, port), timeout=max(0.001, deadline_s - time.monotonic()))
        except OSError as exc:
            # Refused by an address that never answered may also be a firewall's word.
            self.is_gone |= isinstance(exc, ConnectionRefusedError) and self._server_id is not None
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
        if theirs.get("server_id") != self._server_id and self._server_id is not None:
            stream.close()
            self.is_gone = True
            raise self._away(ConnectionError("another process is there now"))
        if {key: theirs.get(key) for key in mine} != mine:
            stream.close()
            raise StoreDeniedError(
                Problem(
                    f"the store at {host}:{port} serves run {theirs.get('run_id')!r}, "
                    f"{theirs.get('protocol')}; "
                    f"this node asks for run {self._run_id!r}, {PROTOCOL}",
                    "give the nodes of a job the same --rdzv-id, every job its own --rdzv-endpoint, "
                    "and run the same version on every node",
                )
            )
        return stream

    def call(self, message: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Ask the server, or its steward."""
        deadline_s = time.monotonic() + (self._call_timeout_s if timeout_s is None else timeout_s)
        stream = self._take(deadline_s)
        try:
            with self._lock:
                self._busy.add(stream)
            stream.send(message, deadline_s=deadline_s)
            answer = stream.receive(deadline_s=deadline_s)
        except (OSError, FrameError) as exc:
            stream.close()
            raise self._away(exc) from exc
        finally:
            with self._lock:
                self._busy.discard(stream)
        self._give_back(stream)
        if answer.get("lease_lost"):
            raise lease_lost(int(message.get("lease_id", 0)))
        raise_if_away(answer)
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
                "check that the first node's agent runs, and that --rdzv-endpoint is its address",
            )
        )
