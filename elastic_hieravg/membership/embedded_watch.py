"""The embedded store's watch: a connection on which the server tells what changes.

Invariant: what it tells never goes back, unless the store itself began anew.
"""

import threading
import time
from collections.abc import Callable

from elastic_hieravg.errors import Problem, StoreAwayError, StoreError
from elastic_hieravg.membership.frames import FrameError, Stream
from elastic_hieravg.membership.kv import Changes, Snapshot
from elastic_hieravg.membership.wire import raise_if_away, read_update

# The first wait after a watch ended, and the longest.
RETRY_S = 0.05
RETRY_MAX_S = 1.0


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

    def interrupt(self) -> None:
        """End a `next` in another thread soon, and all that follow. It still has to be closed."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            stream.end()

    def close(self) -> None:
        self.interrupt()
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
            answer = self._stream.receive(deadline_s=deadline_s)
            raise_if_away(answer)
            update = read_update(answer)
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
