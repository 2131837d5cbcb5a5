"""A small HTTP server for what a node tells about itself. Read only: nothing on it changes anything.

One thread and a selector serve all clients; none of them has a thread of its own. Requests, connections and
times are bounded, and what is costly to make is made at most twice a second, however many ask. Invariant:
whatever clients do, the others are served on, and nothing of it reaches the training.
"""

import contextlib
import errno
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources

from elastic_hieravg.metrics.registry import OPENMETRICS_TYPE, PLAIN_TYPE, Registry

CONNECTIONS_MAX = 256
REQUEST_BYTES_MAX = 8 * 1024
# From a request's first byte to its last, and for taking the answer.
REQUEST_S = 10.0
# A connection without a request is kept so long; whoever scrapes comes back within a minute.
IDLE_S = 90.0
# What is made for /metrics and /status is served for so long.
CACHE_S = 0.5
BACKLOG = 256
ACCEPTED_AT_ONCE = 32
TICK_S = 1.0
# After the process had no descriptor left for another client.
FULL_S = 0.05

TEXT_TYPE = "text/plain; charset=utf-8"
JSON_TYPE = "application/json; charset=utf-8"
HTML_TYPE = "text/html; charset=utf-8"
PLACEHOLDER = (
    b"<!doctype html><title>hieravg</title><p>See <a href=status>status</a> and <a href=metrics>metrics</a>."
)
_HEADERS = (
    "Cache-Control: no-store\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
)
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_REQUEST = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*)")


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    content_type: str = TEXT_TYPE
    status: int = 200


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    is_head: bool
    is_kept: bool
    accept: str


Route = Callable[[Request], Answer]


class Cached:
    """Makes something at most twice a second, for all who ask in between."""

    def __init__(self, make: Callable[[], bytes], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._made: tuple[float, bytes] | None = None

    def __call__(self) -> bytes:
        now_s = self._clock()
        if self._made is None or now_s - self._made[0] >= CACHE_S:
            self._made = now_s, self._make()
        return self._made[1]


def metrics_route(registry: Registry) -> Route:
    """What a registry holds, as OpenMetrics if that is asked for."""
    plain, openmetrics = Cached(registry.text), Cached(registry.openmetrics_text)

    def answer(request: Request) -> Answer:
        if "application/openmetrics-text" in request.accept:
            return Answer(openmetrics(), OPENMETRICS_TYPE)
        return Answer(plain(), PLAIN_TYPE)

    return answer


def page() -> bytes:
    """The page that is a part of this package."""
    try:
        return (resources.files("elastic_hieravg.metrics") / "page.html").read_bytes()
    except FileNotFoundError:
        return PLACEHOLDER


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket to serve at. `warning`: why it is not the one that was asked for, or nothing."""

    sock: socket.socket
    warning: str = ""


def listen(host: str, port: int) -> Listener | None:
    """Listen at the port, or at a free one if it is taken; None if the host is none of this machine's."""
    try:
        return Listener(_listen(host, port))
    except OSError as exc:
        try:
            sock = _listen(host, 0)
        except OSError:
            return None
        why = os.strerror(exc.errno) if exc.errno else str(exc)
        warning = f"port {port} of {host} cannot be used ({why}); metrics are at port"
        return Listener(sock, f"{warning} {sock.getsockname()[1]}")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


@dataclass(eq=False, slots=True)
class _Client:
    """A connection. `until_s`: when it is let go unless something whole arrives, or leaves.

    `active_s`: when it last had a request answered; at first, when it came.
    """

    sock: socket.socket
    until_s: float
    active_s: float
    unread: bytearray = field(default_factory=bytearray)
    unsent: list[memoryview] = field(default_factory=list)
    is_last: bool = False


class Endpoint:
    """Serves the routes at the listener's socket until closed. `report` is told of a route that fails, once."""

    def __init__(
        self,
        listener: Listener,
        routes: Mapping[str, Route],
        *,
        report: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routes = dict(routes)
        self._report = report
        self._has_reported = False
        self._clock = clock
        self._listener = listener.sock
        self._listener.setblocking(False)
        self.host, self.port = self._listener.getsockname()[:2]
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="hieravg-metrics", daemon=True)
        self._thread.start()

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        self._thread.join()

    # --- in the thread ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                ready = self._selector.select(TICK_S)
                now_s = self._clock()
                for key, events in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Client) and key.fileobj in self._clients:
                        self._handle(key.data, events)
                # Not later than that: while others were served, nobody could be in time.
                self._let_late_ones_go(now_s)
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            for sock in (self._listener, self._waker, self._woken):
                sock.close()
            self._selector.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE):
                    if self._clients:
                        self._drop(self._least_active())
                    # It stays to be accepted: not as fast as this thread can ask.
                    time.sleep(FULL_S)
                return
            if len(self._clients) >= CONNECTIONS_MAX:
                # Whoever has got nothing done for the longest makes room.
                self._drop(self._least_active())
            sock.setblocking(False)
            now_s = self._clock()
            client = self._clients[sock] = _Client(sock, now_s + REQUEST_S, now_s)
            self._selector.register(sock, selectors.EVENT_READ, client)

    def _least_active(self) -> _Client:
        return min(self._clients.values(), key=lambda client: client.active_s)

    def _let_late_ones_go(self, now_s: float) -> None:
        for client in [each for each in self._clients.values() if each.until_s <= now_s]:
            if client.unread and not client.unsent:
                with contextlib.suppress(OSError):
                    client.sock.send(_head(Answer(b"", status=408), is_kept=False))
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.sock]
        self._selector.unregister(client.sock)
        client.sock.close()

    def _handle(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not client.unsent:
                self._read(client)
            self._answer_all(client)
        except Exception:  # noqa: BLE001 - it is gone most of the time; whatever it did, the others are served on
            self._drop(client)
            return
        if client.is_last and not client.unsent:
            self._drop(client)
            return
        # Who does not take its answer is not heard either: what it sends waits in the kernel.
        self._selector.modify(
            client.sock, selectors.EVENT_WRITE if client.unsent else selectors.EVENT_READ, client
        )

    def _read(self, client: _Client) -> None:
        with contextlib.suppress(BlockingIOError):
            data = client.sock.recv(REQUEST_BYTES_MAX + 1)
            if not data:
                raise ConnectionResetError("the client hung up")
            if not client.unread:
                client.until_s = self._clock() + REQUEST_S
            client.unread += data

    def _answer_all(self, client: _Client) -> None:
        """Answer every whole request there is, each when the one before has been taken."""
        _flush(client)
        while not client.unsent and not client.is_last and client.unread:
            request = _next_request(client.unread)
            if request is None:
                return
            is_kept = isinstance(request, Request) and request.is_kept
            answer = self._answer(request) if isinstance(request, Request) else request
            client.is_last = not is_kept
            client.unsent = [memoryview(_head(answer, is_kept=is_kept))]
            if not (isinstance(request, Request) and request.is_head) and answer.body:
                client.unsent.append(memoryview(answer.body))
            client.active_s = self._clock()
            client.until_s = client.active_s + (REQUEST_S if client.unread else IDLE_S)
            _flush(client)
            if client.unsent:
                client.until_s = client.active_s + REQUEST_S

    def _answer(self, request: Request) -> Answer:
        route = self._routes.get(request.path)
        if route is None:
            return Answer(b"there is nothing here\n", status=404)
        try:
            return route(request)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the next request is answered
            if not self._has_reported:
                self._has_reported = True
                self._report(f"{request.path} cannot be answered: {type(exc).__name__}: {exc}")
            return Answer(b"this cannot be told at the moment\n", status=500)


def _flush(client: _Client) -> None:
    with contextlib.suppress(BlockingIOError):
        while client.unsent:
            num_sent = client.sock.send(client.unsent[0])
            rest = client.unsent[0][num_sent:]
            client.unsent[:1] = [rest] if rest else []


def _head(answer: Answer, *, is_kept: bool) -> bytes:
    lines = f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
    lines += f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n"
    lines += "Allow: GET, HEAD\r\n" if answer.status == 405 else ""
    lines += _HEADERS
    lines += f"Connection: {'keep-alive' if is_kept else 'close'}\r\n\r\n"
    return lines.encode()


def _next_request(unread: bytearray) -> Request | Answer | None:
    """Take the next request off what has arrived; None if it is not whole, an answer if it is none."""
    line, newline, _ = bytes(unread[:REQUEST_BYTES_MAX]).partition(b"\n")
    # Known by its first bytes already: another protocol may wait for us to speak.
    if not newline and ((len(line) > 20 and b" " not in line[:21]) or re.match(rb"[^A-Z\r]", line)):
        return _bad_request()
    end = unread.find(b"\r\n\r\n")
    if end < 0 or end > REQUEST_BYTES_MAX:
        if len(unread) > REQUEST_BYTES_MAX:
            return Answer(b"the request is too long\n", status=431)
        return None if not newline or _REQUEST.fullmatch(line.rstrip(b"\r")) else _bad_request()
    head = bytes(unread[:end])
    del unread[: end + 4]
    return _parse(head)


def _parse(head: bytes) -> Request | Answer:
    first, *lines = head.split(b"\r\n")
    match = _REQUEST.fullmatch(first)
    fields = [_FIELD.fullmatch(line) for line in lines]
    if match is None:
        return _bad_request()
    found: dict[str, str] = {}
    for each in fields:
        if each is None:
            return _bad_request()
        found[each[1].decode().lower()] = each[2].decode("latin-1").strip()
    if match[1] not in (b"GET", b"HEAD"):
        return Answer(b"this is for reading only\n", status=405)
    if found.get("content-length", "0") != "0" or "transfer-encoding" in found:
        return _bad_request()
    connection = found.get("connection", "").lower()
    is_kept = "close" not in connection if match[3] == b"1" else "keep-alive" in connection
    path = match[2].decode().partition("?")[0]
    return Request(path, match[1] == b"HEAD", is_kept, found.get("accept", ""))


def _bad_request() -> Answer:
    return Answer(b"this is no request of HTTP\n", status=400)
