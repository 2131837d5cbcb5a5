"""A watch that goes on with the next host. Its first update after a change of hosts is a snapshot."""

import threading
import time
from collections.abc import Callable

from elastic_hieravg.errors import StoreError
from elastic_hieravg.membership.embedded_watch import EmbeddedWatch
from elastic_hieravg.membership.following import Follower
from elastic_hieravg.membership.kv import Changes, Snapshot


class FailoverWatch:
    """`on_doubt` is called when the host does not answer, `on_close` when nobody needs this any more."""

    def __init__(
        self,
        follower: Follower,
        prefix: str,
        *,
        on_doubt: Callable[[], None],
        on_close: Callable[["FailoverWatch"], None],
    ) -> None:
        self._follower = follower
        self._prefix = prefix
        self._on_doubt = on_doubt
        self._on_close = on_close
        self._version = -1
        self._inner: EmbeddedWatch | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._over: list[EmbeddedWatch] = []

    def next(self, *, timeout_s: float) -> Snapshot | Changes | None:
        self._close_over()
        deadline_s = time.monotonic() + timeout_s
        version, inner = self._current(timeout_s)
        if inner is None:
            return None
        try:
            update = inner.next(timeout_s=max(0.0, deadline_s - time.monotonic()))
        except StoreError:
            self._on_doubt()
            raise
        return update if update is not None and self._follower.saw(version, update) else None

    def resync(self) -> None:
        inner = self._inner
        if inner is not None:
            inner.resync()

    def close(self) -> None:
        self._on_close(self)
        with self._changed:
            self._is_closed = True
        self.switch()
        self._close_over()

    def switch(self) -> None:
        """There is another host, or none. Whoever waits in `next` is woken, and not waited for."""
        with self._changed:
            inner, self._inner = self._inner, None
            if inner is not None:
                inner.interrupt()
                self._over.append(inner)
            self._changed.notify_all()

    def _close_over(self) -> None:
        with self._changed:
            over, self._over = self._over, []
        for inner in over:
            inner.close()

    def _current(self, timeout_s: float) -> tuple[int, EmbeddedWatch | None]:
        with self._changed:
            version, client = self._follower.client
            if self._is_closed or client is None:
                if not self._is_closed:
                    self._changed.wait(timeout_s)
                return version, None
            if self._inner is None:
                self._inner, self._version = client.watch(self._prefix), version
            return self._version, self._inner
