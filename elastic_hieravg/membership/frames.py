"""Small JSON messages over a stream: a length, then the text. Nothing that arrives is ever unpickled.

Used by the embedded store. Invariant: no message is longer than `FRAME_BYTES_MAX`, whoever sends it.
"""

import json
import socket
import struct
import time
from typing import Any

FRAME_BYTES_MAX = 4 * 1024 * 1024
RECEIVE_BYTES = 64 * 1024

_LENGTH = struct.Struct("!I")


class FrameError(Exception):
    """What arrived is no message of ours."""


def encode(message: dict[str, Any]) -> bytes:
    text = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > FRAME_BYTES_MAX:
        raise FrameError(f"a message of {len(text)} bytes is longer than {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(text)) + text


class Decoder:
    """Takes bytes as they arrive and gives whole messages."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        self._unread += data
        found = []
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            if length > FRAME_BYTES_MAX:
                raise FrameError(f"a message of {length} bytes is longer than {FRAME_BYTES_MAX}")
            end = _LENGTH.size + length
            if len(self._unread) < end:
                break
            found.append(_parse(bytes(self._unread[_LENGTH.size : end])))
            del self._unread[:end]
        return found


class Stream:
    """One end of a connection, for a caller who waits. Not for two threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = Decoder()
        self._waiting: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], *, deadline_s: float) -> None:
        self._sock.settimeout(_left(deadline_s))
        self._sock.sendall(encode(message))

    def receive(self, *, deadline_s: float) -> dict[str, Any]:
        """The next message. `TimeoutError` at the deadline, `ConnectionError` if the other end is gone."""
        while not self._waiting:
            self._sock.settimeout(_left(deadline_s))
            data = self._sock.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the other end hung up")
            self._waiting = self._decoder.feed(data)
        return self._waiting.pop(0)

    def end(self) -> None:
        """End a wait in another thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It had ended already.
            return

    def close(self) -> None:
        self._sock.close()


def _parse(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise FrameError("a message is not JSON") from exc
    if not isinstance(message, dict):
        raise FrameError("a message is not an object")
    return message


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    return left_s
