"""The embedded store against clients that are not its own: it drops them, and serves the others on."""

import json
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_hieravg.errors import StoreAwayError, StoreDeniedError
from elastic_hieravg.membership import embedded
from elastic_hieravg.membership.embedded import PROTOCOL, EmbeddedKeyValue, EmbeddedServer
from elastic_hieravg.membership.frames import FRAME_BYTES_MAX, Decoder, FrameError, encode
from elastic_hieravg.membership.kv import Put, Write

HEARD_S = 30.0
HELLO = {"protocol": PROTOCOL, "run_id": "run"}
KEY = "/hieravg/run/a"


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    opened = EmbeddedServer("127.0.0.1", 0, run_id="run")
    yield opened
    opened.close()


@pytest.fixture
def kv(server: EmbeddedServer) -> Iterator[EmbeddedKeyValue]:
    opened = EmbeddedKeyValue("127.0.0.1", server.port, run_id="run", call_timeout_s=HEARD_S)
    opened.write(Write({}, (Put(KEY, "kept"),)))
    yield opened
    # Whatever a test did, the store still answers, and holds what it held.
    assert opened.get(KEY).entries[KEY].value == "kept"
    assert opened.write(Write({}, (Put(f"{KEY}/more", "1"),))) is not None
    opened.close()


def connect(server: EmbeddedServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=HEARD_S)


def greeted(server: EmbeddedServer) -> socket.socket:
    """A connection that is taken for a client's."""
    sock = connect(server)
    sock.sendall(encode(HELLO))
    assert sock.recv(1 << 16)
    return sock


def is_dropped(sock: socket.socket) -> bool:
    """Whether the server hangs up, in the time that a test has."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
        b"\xff" * 1000,
        struct.pack("!I", FRAME_BYTES_MAX + 1),
        struct.pack("!I", 4) + b"null",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 3) + b"\xff\xfe\xfd",
        struct.pack("!I", 100_000) + b"[" * 100_000,
        struct.pack("!I", 10_000) + b"9" * 10_000,
    ],
    ids=["http", "bytes", "oversized", "null", "list", "no text", "deep", "a long number"],
)
def test_garbage_is_dropped(server: EmbeddedServer, kv: EmbeddedKeyValue, garbage: bytes) -> None:
    for make in (connect, greeted):
        with make(server) as sock:
            sock.sendall(garbage)
            assert is_dropped(sock)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"call": "destroy"},
        {"call": None},
        {"call": ["get"]},
        {"call": "get"},
        {"call": "grant", "ttl_s": "soon"},
        {"call": "grant", "ttl_s": None},
        {"call": "grant", "ttl_s": -1},
        {"call": "keep_alive", "lease_id": {}},
        {"call": "revoke", "lease_id": []},
        {"call": "watch", "prefix": "/", "revision": "x"},
        {"call": "write", "guards": [], "puts": [], "deletes": []},
        {"call": "write", "guards": {}, "puts": [["k"]], "deletes": []},
        {"call": "write", "guards": {"k": None}, "puts": [], "deletes": []},
        {"call": "write", "guards": {}, "puts": 7, "deletes": []},
    ],
    ids=json.dumps,
)
def test_calls_that_make_no_sense_are_dropped(
    server: EmbeddedServer, kv: EmbeddedKeyValue, call: dict[str, Any]
) -> None:
    with greeted(server) as sock:
        sock.sendall(encode(call))
        assert is_dropped(sock)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["ttl_s", "lease_id"])
def test_numbers_that_are_none_are_dropped(
    server: EmbeddedServer, kv: EmbeddedKeyValue, field: str, number: str
) -> None:
    name = {"ttl_s": "grant", "lease_id": "keep_alive"}[field]
    text = f'{{"call": "{name}", "{field}": {number}}}'.encode()
    with greeted(server) as sock:
        sock.sendall(struct.pack("!I", len(text)) + text)
        assert is_dropped(sock)


def test_nothing_that_arrives_is_unpickled(
    server: EmbeddedServer, kv: EmbeddedKeyValue, tmp_path: Path
) -> None:
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(trap),)

    pickled = pickle.dumps(Trap())
    for make in (connect, greeted):
        with make(server) as sock:
            sock.sendall(struct.pack("!I", len(pickled)) + pickled)
            assert is_dropped(sock)
    assert not trap.exists()
    # The trap is one.
    pickle.loads(pickled)
    assert trap.exists()


def test_slow_clients_hold_nobody_up(server: EmbeddedServer, kv: EmbeddedKeyValue) -> None:
    hello = encode(HELLO)
    slow = [connect(server) for _ in range(50)]
    try:
        # One byte each, and then silence.
        for sock in slow:
            sock.sendall(hello[:1])
        for number in range(20):
            kv.write(Write({}, (Put(f"{KEY}/{number}", "x"),)))
        # They are served when they have said all of it.
        for byte in hello[1:]:
            slow[0].sendall(bytes([byte]))
        (answer,) = Decoder().feed(slow[0].recv(1 << 16))
        assert answer == {**HELLO, "server_id": server.server_id}
    finally:
        for sock in slow:
            sock.close()


def test_a_client_that_does_not_read_is_let_go(
    server: EmbeddedServer, kv: EmbeddedKeyValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "UNSENT_BYTES_MAX", 1 << 20)
    kv.write(Write({}, (Put(f"{KEY}/long", "x" * 500_000),)))
    with greeted(server) as sock, pytest.raises((ConnectionResetError, BrokenPipeError)):
        ask_on(sock)


def ask_on(sock: socket.socket) -> None:
    """Ask for long answers one by one, and read none of them."""
    deadline_s = time.monotonic() + HEARD_S
    while time.monotonic() < deadline_s:
        sock.sendall(encode({"call": "get", "prefix": KEY}))
        time.sleep(0.005)


def test_another_run_is_told_so_and_let_in_nowhere(server: EmbeddedServer, kv: EmbeddedKeyValue) -> None:
    other = EmbeddedKeyValue("127.0.0.1", server.port, run_id="other")
    with pytest.raises(
        StoreDeniedError,
        match=r"serves run 'run'.*asks for run 'other'.*\n\nhint: give the nodes of a job the same --rdzv-id",
    ):
        other.get(KEY)
    other.close()
    with connect(server) as sock:
        sock.sendall(encode({**HELLO, "run_id": "other"}) + encode({"call": "get", "prefix": KEY}))
        assert b"kept" not in sock.recv(1 << 16)


def test_a_server_that_is_none_of_ours_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kv = EmbeddedKeyValue("127.0.0.1", listener.getsockname()[1], run_id="run", call_timeout_s=0.3)
        # It takes the connection and says nothing.
        with pytest.raises(
            StoreAwayError, match=r"does not answer.*\n\nhint: check that the first node's agent runs"
        ):
            kv.get(KEY)
        kv.close()


def test_a_message_is_read_however_it_arrives_and_no_longer_than_allowed() -> None:
    messages = [{"n": number, "text": "ö" * number} for number in range(20)]
    data = b"".join(map(encode, messages))
    for size in (1, 3, 1000, len(data)):
        decoder = Decoder()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert [message for piece in pieces for message in decoder.feed(piece)] == messages
    with pytest.raises(FrameError, match="is longer than"):
        encode({"text": "x" * FRAME_BYTES_MAX})
    with pytest.raises(FrameError, match="is longer than"):
        Decoder().feed(struct.pack("!I", FRAME_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"number": float("nan")})
