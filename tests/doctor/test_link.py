"""Two doctors over the loopback, and everybody else who comes to the one that listens."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic_hieravg.doctor import link
from elastic_hieravg.doctor.findings import Severity
from elastic_hieravg.doctor.link import Measured
from elastic_hieravg.membership.frames import encode
from tests.doctor.patients import only
from tests.membership.etcd_servers import free_ports

WITHIN_S = 60.0
NEAR = Measured(0.0002, 1e9, 1e9, 0.001)


class Listening:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.num_served = 0
        self._over = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        self.num_served = link.listen(
            self._server, seconds_max=WITHIN_S, say=self.said.append, is_over=self._over.is_set
        )

    def close(self) -> None:
        self._over.set()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()
        self._server.close()


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    monkeypatch.setattr(link, "MEASURE_S", 0.2)
    found = Listening()
    yield found
    found.close()


def test_two_doctors_measure_the_way_between_them(listening: Listening) -> None:
    found = link.check_peer(("127.0.0.1", listening.port), params=1_000_000)
    assert [each.check for each in found] == ["round trip", "bandwidth", "clock"]
    assert only(found, "clock").severity is Severity.OK
    assert "a round of 4 MB takes" in only(found, "bandwidth").found
    listening.close()
    assert listening.num_served == 3


def test_the_measured_numbers_are_of_the_loopback(listening: Listening) -> None:
    measured = link.measure("127.0.0.1", listening.port)
    assert 0 < measured.round_trip_s < WITHIN_S
    # Nothing on the loopback is slower, however busy the machine is.
    assert measured.sent_bytes_per_s > 1e6
    assert measured.received_bytes_per_s > 1e6
    assert abs(measured.clock_ahead_s) < WITHIN_S


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: h1\r\n\r\n",
    b"\xff" * 70000,
    b"\0\0\0\0" * 100,
    struct.pack("!I", 1 << 31) + b"x",
    encode({"protocol": "another/1", "ask": "give"}),
    encode({"protocol": link.PROTOCOL, "ask": "everything"}),
    encode({"protocol": link.PROTOCOL, "ask": ["time"]}),
    struct.pack("!I", 4) + b"null",
    struct.pack("!I", 100000) + b"[" * 100000,
    b"",
]


def test_garbage_on_the_port_is_told_and_the_next_doctor_is_served(listening: Listening) -> None:
    for garbage in GARBAGE:
        there = socket.create_connection(("127.0.0.1", listening.port), timeout=WITHIN_S)
        with there as sock, contextlib.suppress(OSError):
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    assert link.measure("127.0.0.1", listening.port).round_trip_s > 0
    listening.close()
    assert len([text for text in listening.said if "is no doctor" in text]) == len(GARBAGE)
    assert listening.num_served == 3


def test_somebody_who_says_nothing_holds_nobody_up_for_long(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "QUESTION_S", 0.5)
    with socket.create_connection(("127.0.0.1", listening.port), timeout=WITHIN_S) as silent:
        # The listener lets go first.
        assert silent.recv(1) == b""
    monkeypatch.setattr(link, "QUESTION_S", WITHIN_S)
    assert link.measure("127.0.0.1", listening.port).round_trip_s > 0


def test_somebody_who_takes_for_ever_is_left_after_the_measured_time(listening: Listening) -> None:
    for ask in ("take", "give"):
        with socket.create_connection(("127.0.0.1", listening.port), timeout=WITHIN_S) as sock:
            sock.sendall(encode({"protocol": link.PROTOCOL, "ask": ask}))
            with contextlib.suppress(OSError):
                while sock.recv(1 << 20):
                    pass
    assert link.measure("127.0.0.1", listening.port).round_trip_s > 0


def test_listening_ends_by_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        began_s = time.monotonic()
        assert link.listen(server, seconds_max=0.1, say=print, is_over=lambda: False) == 0
        assert time.monotonic() - began_s < WITHIN_S


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", encode({"hello": 1}), encode({"now_s": "x"})]
)
def test_a_peer_that_is_no_doctor_is_a_problem(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        (found,) = link.check_peer(("127.0.0.1", server.getsockname()[1]), params=None)
        thread.join(WITHIN_S)
    assert found.severity is Severity.PROBLEM
    assert "hieravg doctor --listen" in found.advice


def test_a_peer_where_nobody_listens_is_a_problem() -> None:
    (port,) = free_ports(1)
    (found,) = link.check_peer(("127.0.0.1", port), params=None)
    assert (found.severity, "refused" in found.found) == (Severity.PROBLEM, True)


@pytest.mark.parametrize(
    ("measured", "check", "severity", "found"),
    [
        (NEAR, "round trip", Severity.OK, "0.2 ms to h2"),
        (replace(NEAR, round_trip_s=0.3), "round trip", Severity.WARNING, "300 ms to h2"),
        (NEAR, "bandwidth", Severity.OK, "a round of 500 MB takes 0.5 s or more"),
        (replace(NEAR, received_bytes_per_s=1e6), "bandwidth", Severity.WARNING, "takes 5e+02 s or more"),
        (NEAR, "clock", Severity.OK, "of that of h2"),
        (replace(NEAR, clock_ahead_s=90.0), "clock", Severity.NOTE, "90.0 s behind that of h2"),
        (replace(NEAR, clock_ahead_s=-90.0), "clock", Severity.NOTE, "90.0 s before that of h2"),
    ],
)
def test_what_was_measured_is_judged(measured: Measured, check: str, severity: Severity, found: str) -> None:
    finding = only(link.judge("h2", measured, params=125_000_000), check)
    assert (finding.severity, found in finding.found) == (severity, True)
    assert json.dumps(finding.found)
