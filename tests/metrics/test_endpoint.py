"""The HTTP endpoint, over real sockets: what it answers, and that no client keeps it from answering others."""

import contextlib
import http.client
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_hieravg.metrics import endpoint as endpoint_module
from elastic_hieravg.metrics.endpoint import (
    CONNECTIONS_MAX,
    HTML_TYPE,
    PLACEHOLDER,
    REQUEST_BYTES_MAX,
    Answer,
    Cached,
    Endpoint,
    Listener,
    Request,
    Route,
    listen,
    metrics_route,
    page,
)
from elastic_hieravg.metrics.registry import OPENMETRICS_TYPE, PLAIN_TYPE
from tests.metrics.test_registry import filled

WITHIN_S = 60.0
NUM_CLIENTS = 200
ROUNDS = 5
LARGE = b"x" * (8 * 1024 * 1024)
MEMORY_BYTES_MAX = 40 * 1024 * 1024


class Server:
    """An endpoint with a route of every kind. `seen` are the requests its routes got."""

    def __init__(self, listener: Listener | None = None) -> None:
        self.seen: list[Request] = []
        self.reports: list[str] = []
        self.num_made = 0
        registry = filled()
        cached = Cached(self._make)
        found = listener or listen("127.0.0.1", 0)
        assert found is not None
        self.endpoint = Endpoint(
            found,
            {
                "/": self._seen_by(Answer(b"<p>hello", HTML_TYPE)),
                "/metrics": metrics_route(registry),
                "/cached": lambda _: Answer(cached()),
                "/large": lambda _: Answer(LARGE),
                "/fails": self._fail,
                "/readyz": lambda _: Answer(b"not yet\n", status=503),
            },
            report=self.reports.append,
        )
        self.port = self.endpoint.port

    def _make(self) -> bytes:
        self.num_made += 1
        return b"made"

    def _seen_by(self, answer: Answer) -> Route:
        def route(request: Request) -> Answer:
            self.seen.append(request)
            return answer

        return route

    def _fail(self, _: Request) -> Answer:
        raise RuntimeError("out of order")

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=WITHIN_S)
        sock.settimeout(WITHIN_S)
        return sock

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers={"Connection": "close", **headers})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with contextlib.closing(made.endpoint):
        yield made


def received(sock: socket.socket) -> bytes:
    """All until the server hangs up."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            found += data
    return found


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def test_serves_what_the_registry_holds(server: Server) -> None:
    status, headers, body = server.get("/metrics")
    assert (status, headers["Content-Type"]) == (200, PLAIN_TYPE)
    assert b"# TYPE hieravg_steps_total counter\n" in body
    wanted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    status, headers, body = server.get("/metrics", Accept=wanted)
    assert (status, headers["Content-Type"]) == (200, OPENMETRICS_TYPE)
    assert body.endswith(b"# EOF\n")


def test_headers_keep_a_browser_from_anything_else(server: Server) -> None:
    _, headers, _ = server.get("/")
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http:" not in policy


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/?from=here", 200),
        ("HEAD", "/", 200),
        ("GET", "/readyz", 503),
        ("GET", "/nowhere", 404),
        ("GET", "/metrics/../etc/passwd", 404),
        ("POST", "/", 405),
        ("PUT", "/metrics", 405),
        ("DELETE", "/", 405),
        ("OPTIONS", "/", 405),
    ],
)
def test_is_for_reading_only(server: Server, method: str, path: str, status: int) -> None:
    found, headers, body = server.get(path, method=method)
    assert found == status
    assert ("Allow" in headers) == (status == 405)
    assert bool(body) == (method != "HEAD")


GARBAGE = {
    "no http": (b"hello there\r\n\r\n", b"400"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    "zeros": (b"\0" * 100, b"400"),
    "a long word": (b"A" * 100, b"400"),
    "another version": (b"GET / HTTP/2.0\r\n\r\n", b"400"),
    "no path": (b"GET  HTTP/1.1\r\n\r\n", b"400"),
    "a header that is none": (b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"400"),
    "a body": (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"400"),
    "chunks": (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
    "a line without end": (b"GET /" + b"x" * (REQUEST_BYTES_MAX + 1), b"431"),
    "headers without end": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * REQUEST_BYTES_MAX, b"431"),
    "a long header": (b"GET / HTTP/1.1\r\na: " + b"b" * REQUEST_BYTES_MAX + b"\r\n\r\n", b"431"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_at_once(server: Server, name: str) -> None:
    sent, status = GARBAGE[name]
    with contextlib.closing(server.connect()) as sock:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(sent)
        assert received(sock).startswith(b"HTTP/1.1 " + status)
    assert server.get("/")[0] == 200
    assert len(server.seen) == 1


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from([b"GET / HTTP/1.1", b"\r\n", b"\r\n\r\n", b"\n", b"Accept: x", b"GET", b" ", b"/"]),
        ),
        max_size=30,
    )
)
def test_any_bytes_are_a_request_or_none_or_refused(parts: list[bytes]) -> None:
    unread = bytearray()
    for part in parts:
        unread += part
        found = endpoint_module._next_request(unread)
        assert found is None or isinstance(found, Request) or found.status in (400, 405, 431)
        if isinstance(found, Answer):
            return


def test_a_connection_is_kept_for_more_requests(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WITHIN_S)
    with contextlib.closing(connection):
        for _ in range(3):
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert answer.getheader("Connection") == "keep-alive"
            answer.read()
        assert server.endpoint.num_clients == 1


def test_requests_in_a_row_are_answered_in_a_row(server: Server) -> None:
    with contextlib.closing(server.connect()) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 3 + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert received(sock).count(b"<p>hello") == 4


def test_a_request_may_come_byte_by_byte(server: Server) -> None:
    with contextlib.closing(server.connect()) as sock:
        for byte in b"GET / HTTP/1.0\r\nHost: x\r\n\r\n":
            sock.send(bytes([byte]))
        assert received(sock).endswith(b"<p>hello")


def test_a_large_answer_arrives_whole(server: Server) -> None:
    assert server.get("/large")[2] == LARGE


def test_a_route_that_fails_is_told_once_and_harms_nobody(server: Server) -> None:
    for _ in range(3):
        assert server.get("/fails")[0] == 500
    assert server.reports == ["/fails cannot be answered: RuntimeError: out of order"]
    assert server.get("/")[0] == 200


def test_what_is_costly_is_made_twice_a_second_at_most() -> None:
    now_s, made = 0.0, []
    cached = Cached(lambda: str(made.append(now_s)).encode(), clock=lambda: now_s)  # type: ignore[func-returns-value]
    for tick in range(101):
        now_s = tick / 64
        cached()
    assert made == [0.0, 0.5, 1.0, 1.5]


def test_a_port_that_is_taken_is_no_reason_to_fail() -> None:
    first = listen("127.0.0.1", 0)
    assert first is not None
    with contextlib.closing(first.sock):
        port = first.sock.getsockname()[1]
        second = listen("127.0.0.1", port)
        assert second is not None
        with contextlib.closing(second.sock):
            other = second.sock.getsockname()[1]
            assert other != port
            assert f"port {port} of 127.0.0.1 cannot be used (Address already in use);" in second.warning
            assert second.warning.endswith(f"metrics are at port {other}")
    assert first.warning == ""
    assert listen("192.0.2.1", 0) is None
    assert listen("no.such.name.invalid", 0) is None


def test_the_page_is_a_part_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert page().lower().startswith(b"<!doctype html>")
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    assert page() == PLACEHOLDER


# --- clients that mean no good --------------------------------------------------------------------------------


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def ask(server: Server) -> int:
    status, _, body = server.get("/metrics")
    assert body.startswith(b"# HELP")
    return status


def test_many_clients_at_once_are_all_answered_and_cost_little(server: Server) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(lambda _: ask(server), range(NUM_CLIENTS)))
        memory, descriptors = memory_bytes(), num_descriptors()
        for _ in range(ROUNDS):
            statuses = Counter(pool.map(lambda _: ask(server), range(NUM_CLIENTS)))
            assert statuses == {200: NUM_CLIENTS}
        wait_until("all connections are closed", lambda: server.endpoint.num_clients == 0)
        assert num_descriptors() <= descriptors
        assert memory_bytes() - memory < MEMORY_BYTES_MAX
    for _ in range(NUM_CLIENTS):
        server.get("/cached")
    assert server.num_made < NUM_CLIENTS / 2


def test_clients_that_never_finish_do_not_keep_others_away(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte now and then, for ever: each is let go at its deadline, and all others are served."""
    monkeypatch.setattr(endpoint_module, "REQUEST_S", 1.0)
    memory = memory_bytes()
    before = num_descriptors()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(contextlib.closing(server.connect())) for _ in range(NUM_CLIENTS)]
        for sock in slow:
            sock.sendall(b"GET /")
        assert server.get("/")[0] == 200
        wait_until("they are known", lambda: server.endpoint.num_clients > NUM_CLIENTS // 2)
        began_s = time.monotonic()
        while server.endpoint.num_clients and time.monotonic() < began_s + WITHIN_S:
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.send(b"x")
            assert server.get("/")[0] == 200
        assert server.endpoint.num_clients == 0, "nobody is kept"
        assert memory_bytes() - memory < MEMORY_BYTES_MAX
    assert num_descriptors() <= before
    assert len(server.seen) > 1


def test_clients_that_do_not_read_are_let_go(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "REQUEST_S", 1.0)
    memory = memory_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            sock = stack.enter_context(contextlib.closing(server.connect()))
            sock.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        assert server.get("/")[0] == 200
        # The answer is one for all: 200 of 8 MB would be 1.6 GB.
        assert memory_bytes() - memory < MEMORY_BYTES_MAX
        wait_until("they are let go", lambda: server.endpoint.num_clients == 0)


def test_whoever_comes_is_served_when_all_places_are_taken(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(contextlib.closing(server.connect())) for _ in range(CONNECTIONS_MAX + 40)]
        for sock in idle:
            with contextlib.suppress(OSError):
                sock.sendall(b"G")
        for _ in range(20):
            assert server.get("/")[0] == 200
            assert server.endpoint.num_clients <= CONNECTIONS_MAX


def test_close_leaves_nothing() -> None:
    threads, descriptors = threading.active_count(), num_descriptors()
    server = Server()
    sock = server.connect()
    with contextlib.closing(sock):
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert sock.recv(100)
        server.endpoint.close()
        server.endpoint.close()
        received(sock)
        with pytest.raises(ConnectionRefusedError):
            server.connect()
    assert threading.active_count() == threads
    assert num_descriptors() == descriptors
