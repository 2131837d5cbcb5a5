"""A store inside this process: for tests, and for a job whose agents all live in one process.

A ledger with a lock and a clock. Everybody who shares the object shares the store.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_hieravg.errors import Problem, StoreAwayError
from elastic_hieravg.membership.kv import Changes, Snapshot, Write
from elastic_hieravg.membership.ledger import Ledger


class MemoryKeyValue:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ledger = Ledger()
        self._changed = threading.Condition()
        self._is_closed = False

    def get(self, prefix: str) -> Snapshot:
        with self._locked() as ledger:
            return ledger.get(prefix)

    def write(self, write: Write) -> int | None:
        with self._locked() as ledger:
            return ledger.write(write)

    def grant(self, ttl_s: float) -> int:
        with self._locked() as ledger:
            return ledger.grant(self._clock(), ttl_s=ttl_s)

    def keep_alive(self, lease_id: int) -> None:
        with self._locked() as ledger:
            ledger.keep_alive(self._clock(), lease_id=lease_id)

    def revoke(self, lease_id: int) -> None:
        with self._locked() as ledger:
            ledger.revoke(lease_id)

    def compact(self) -> None:
        """Forget the history, as stores do from time to time."""
        with self._locked() as ledger:
            ledger.compact()

    def watch(self, prefix: str) -> "MemoryWatch":
        return MemoryWatch(self._ledger, self._changed, self._clock, prefix)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True

    @contextmanager
    def _locked(self) -> Iterator[Ledger]:
        with self._changed:
            if self._is_closed:
                raise StoreAwayError(Problem("the store was closed", "open another one"))
            before = self._ledger.revision
            self._ledger.expire(self._clock())
            yield self._ledger
            if self._ledger.revision != before:
                self._changed.notify_all()


class MemoryWatch:
    def __init__(
        self, ledger: Ledger, changed: threading.Condition, clock: Callable[[], float], prefix: str
    ) -> None:
        self._ledger = ledger
        self._changed = changed
        self._clock = clock
        self._prefix = prefix
        self._revision: int | None = None
        self._is_closed = False

    def next(self, *, timeout_s: float) -> Snapshot | Changes | None:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._is_closed:
                self._ledger.expire(self._clock())
                update = self._update()
                left_s = deadline_s - time.monotonic()
                if update is not None or left_s <= 0:
                    return update
                expiry_s = self._ledger.next_expiry_s()
                ends_s = left_s if expiry_s is None else expiry_s - self._clock()
                self._changed.wait(max(0.0, min(left_s, ends_s)))
        return None

    def resync(self) -> None:
        with self._changed:
            self._revision = None
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _update(self) -> Snapshot | Changes | None:
        known = self._revision
        changes = None if known is None else self._ledger.changes_after(known, prefix=self._prefix)
        if changes is None:
            snapshot = self._ledger.get(self._prefix)
            self._revision = snapshot.revision
            return snapshot
        self._revision = changes.revision
        return changes if changes.changes else None
