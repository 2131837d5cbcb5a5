"""How far another node is: round trip, bandwidth both ways, its clock. One doctor listens, another asks.

A question is a message of a few bytes; what follows is bounded in time and bytes, whoever asks. Invariant:
nothing that arrives on the listening port is kept, run or believed, and one connection never holds up the next
for longer than `QUESTION_S`.
"""

import contextlib
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elastic_hieravg.doctor.findings import Finding, note, ok, problem, warning
from elastic_hieravg.doctor.resources import MODEL_BYTES_PER_PARAM, bytes_text
from elastic_hieravg.errors import Problem, UsageError
from elastic_hieravg.membership.frames import FrameError, Stream

PROTOCOL = "elastic_hieravg/doctor/1"
DEFAULT_PORT = 9401
CONNECT_S = 3.0
# One connection, with one question.
QUESTION_S = 10.0
TRIPS = 20
# Measured for so long each way, or for so many bytes.
MEASURE_S = 1.0
MEASURE_BYTES_MAX = 1 << 30
CHUNK = bytes(256 * 1024)
POLL_S = 0.5
SLOW_TRIP_S = 0.2
SLOW_ROUND_S = 60.0
CLOCK_S = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """`clock_ahead_s`: how far the peer's clock is before ours, give or take half a round trip."""

    round_trip_s: float
    sent_bytes_per_s: float
    received_bytes_per_s: float
    clock_ahead_s: float


def read_peer(text: str) -> tuple[str, int]:
    """Read HOST[:PORT].

    >>> read_peer("h2"), read_peer("[fd00::1]:9000")
    (('h2', 9401), ('fd00::1', 9000))
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if not host.strip("[]") or not _is_port(port):
        raise UsageError(
            Problem(f"--peer is {text!r}", f"write HOST or HOST:PORT, for example h2:{DEFAULT_PORT}")
        )
    return host.strip("[]"), int(port)


def read_listen(text: str) -> int:
    if not _is_port(text):
        raise UsageError(Problem(f"--listen is {text!r}", f"give a port, for example {DEFAULT_PORT}"))
    return int(text)


def check_peer(peer: tuple[str, int], *, params: int | None) -> list[Finding]:
    host, port = peer
    try:
        measured = measure(host, port)
    except (OSError, FrameError, ValueError) as exc:
        advice = f"run `hieravg doctor --listen {port}` on {host}, and let the firewall pass that port"
        return [problem(f"peer {host}:{port}", f"{exc}" or type(exc).__name__, advice)]
    return judge(f"{host}", measured, params=params)


def judge(host: str, measured: Measured, *, params: int | None) -> list[Finding]:
    """Pure."""
    trip_ms = measured.round_trip_s * 1000
    if measured.round_trip_s > SLOW_TRIP_S:
        advice = "average with it seldom: put it into a zone of its own, with a longer period"
        trip = warning("round trip", f"{trip_ms:.0f} ms to {host}", advice)
    else:
        trip = ok("round trip", f"{trip_ms:.2g} ms to {host}")
    slowest = min(measured.sent_bytes_per_s, measured.received_bytes_per_s)
    there, back = (bytes_text(each) for each in (measured.sent_bytes_per_s, measured.received_bytes_per_s))
    found = f"{there}/s to {host}, {back}/s from it"
    if params is None:
        bandwidth = ok("bandwidth", f"{found}; --params says for which model")
    else:
        # Between two nodes one model crosses the link each way.
        seconds = params * MODEL_BYTES_PER_PARAM / max(slowest, 1.0)
        asked = (
            f"{found}; a round of {bytes_text(params * MODEL_BYTES_PER_PARAM)} takes {seconds:.2g} s or more"
        )
        if seconds > SLOW_ROUND_S:
            advice = "is it the right interface (--local-addr)? Else average between nodes with a longer period"
            bandwidth = warning("bandwidth", asked, advice)
        else:
            bandwidth = ok("bandwidth", asked)
    return [trip, bandwidth, _clock(host, measured)]


def measure(host: str, port: int) -> Measured:
    """`OSError`, `FrameError` or `ValueError` if the peer is none."""
    with _asking(host, port) as stream:
        deadline_s = time.monotonic() + QUESTION_S
        trips = [_trip(stream, deadline_s) for _ in range(TRIPS)]
    with _asking(host, port) as stream:
        deadline_s = time.monotonic() + QUESTION_S
        stream.send({"protocol": PROTOCOL, "ask": "take"}, deadline_s=deadline_s)
        stream.receive(deadline_s=deadline_s)
        _give(stream.sock)
        taken = stream.receive(deadline_s=deadline_s)
    with _asking(host, port) as stream:
        stream.send({"protocol": PROTOCOL, "ask": "give"}, deadline_s=time.monotonic() + QUESTION_S)
        given_bytes, given_s = _take(stream.sock)
    # The quickest answer says best what time it was there.
    _, ahead_s = min(trips)
    return Measured(
        statistics.median(seconds for seconds, _ in trips),
        _number(taken, "bytes") / max(_number(taken, "seconds"), 1e-6),
        given_bytes / max(given_s, 1e-6),
        ahead_s,
    )


def listen(
    server: socket.socket, *, seconds_max: float, say: Callable[[str], None], is_over: Callable[[], bool]
) -> int:
    """Answer one connection after the other until it is over; how many of them were doctors'."""
    num_served = 0
    deadline_s = time.monotonic() + seconds_max
    server.settimeout(POLL_S)
    while time.monotonic() < deadline_s and not is_over():
        try:
            sock, where = server.accept()
        except TimeoutError:
            continue
        with sock:
            try:
                asked = answer(sock)
            except (OSError, FrameError, ValueError) as exc:
                say(f"{where[0]} is no doctor: {exc or type(exc).__name__}")
                continue
            num_served += 1
            say(f"{where[0]} asked: {asked}")
    return num_served


def answer(sock: socket.socket) -> str:
    """What a doctor asks over one connection, and its answer; an error if it is none."""
    deadline_s = time.monotonic() + QUESTION_S
    stream = _Asked(sock)
    message = stream.receive(deadline_s=deadline_s)
    asked = message.get("ask")
    if message.get("protocol") != PROTOCOL or asked not in ("time", "take", "give"):
        raise ValueError("an unknown question")
    if asked == "time":
        for _ in range(TRIPS - 1):
            stream.send({"now_s": time.time()}, deadline_s=deadline_s)
            stream.receive(deadline_s=deadline_s)
        stream.send({"now_s": time.time()}, deadline_s=deadline_s)
        return "round trip"
    if asked == "give":
        _give(sock)
        return "bandwidth from here"
    stream.send({"ready": True}, deadline_s=deadline_s)
    num_bytes, seconds = _take(sock)
    stream.send({"bytes": num_bytes, "seconds": seconds}, deadline_s=deadline_s)
    # What is still on its way has to be taken, or the answer is lost with the connection.
    _take(sock)
    return "bandwidth to here"


class _Asked(Stream):
    """A stream whose socket also carries what is no message."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock


@contextlib.contextmanager
def _asking(host: str, port: int) -> Iterator[_Asked]:
    with socket.create_connection((host, port), timeout=CONNECT_S) as sock:
        yield _Asked(sock)


def _trip(stream: Stream, deadline_s: float) -> tuple[float, float]:
    began_s, then_s = time.monotonic(), time.time()
    stream.send({"protocol": PROTOCOL, "ask": "time"}, deadline_s=deadline_s)
    now_s = _number(stream.receive(deadline_s=deadline_s), "now_s")
    seconds = time.monotonic() - began_s
    return seconds, now_s - (then_s + seconds / 2)


def _give(sock: socket.socket) -> None:
    """Send for a while, or for as long as somebody takes it."""
    deadline_s = time.monotonic() + MEASURE_S
    num_bytes = 0
    with contextlib.suppress(TimeoutError, ConnectionError):
        while (left_s := deadline_s - time.monotonic()) > 0 and num_bytes < MEASURE_BYTES_MAX:
            sock.settimeout(left_s)
            num_bytes += sock.send(CHUNK)


def _take(sock: socket.socket) -> tuple[int, float]:
    """How many bytes come within the time, and when the last did."""
    buffer = bytearray(len(CHUNK))
    num_bytes = 0
    began_s = last_s = time.monotonic()
    deadline_s = began_s + MEASURE_S
    with contextlib.suppress(TimeoutError, ConnectionError):
        while (left_s := deadline_s - time.monotonic()) > 0 and num_bytes < MEASURE_BYTES_MAX:
            sock.settimeout(left_s)
            length = sock.recv_into(buffer)
            if not length:
                break
            num_bytes, last_s = num_bytes + length, time.monotonic()
    return num_bytes, last_s - began_s


def _clock(host: str, measured: Measured) -> Finding:
    off_s = abs(measured.clock_ahead_s)
    if off_s <= max(CLOCK_S, measured.round_trip_s):
        return ok("clock", f"within {max(off_s, measured.round_trip_s / 2):.2g} s of that of {host}")
    found = f"{off_s:.1f} s {'behind' if measured.clock_ahead_s > 0 else 'before'} that of {host}"
    return note("clock", found, "leases do not depend on clocks; logs and dashboards do: run chrony or ntpd")


def _number(message: dict[str, object], name: str) -> float:
    value = message.get(name)
    if not isinstance(value, int | float):
        raise ValueError(f"{name} is missing")  # noqa: TRY004 - the other end's fault
    return float(value)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 1 << 16
