"""The seam to a key-value store: what the membership protocol asks of etcd, and of what stands in for it.

Four homes: `etcd.EtcdKeyValue`, `embedded.EmbeddedKeyValue`, `failover.FailoverKeyValue`, which goes on with
another host when the embedded store's is lost, and `memory.MemoryKeyValue`. One suite of tests says what all of
them do. Invariant: every call returns or raises within a bound that its home names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

ABSENT = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """What a key holds. `revision` is that of its last change; the store counts all changes in one row."""

    value: str
    revision: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """`lease_id`: the lease the key ends with; 0 for none."""

    key: str
    value: str
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """All of it or nothing, and only if every guarded key is still at the revision named, or `ABSENT`.

    A key is named once among puts and deletes. Deleting a key that is not there changes nothing.
    """

    guards: Mapping[str, int]
    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every entry under a prefix, all as of one revision."""

    entries: Mapping[str, Entry]
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed under a prefix, oldest first, up to `revision`; None for a key that is gone."""

    changes: tuple[tuple[str, Entry | None], ...]
    revision: int


class Watch(Protocol):
    """A prefix being followed. The first update is a snapshot; a later one says that changes were missed.

    What it tells never goes back, unless the store itself began anew.
    """

    def next(self, *, timeout_s: float) -> Snapshot | Changes | None:
        """The next update, or None if there is none in time. `StoreError` once when the store is away.

        After an error the watch goes on where it was, in its own time: call again at once.
        """

    def resync(self) -> None:
        """Tell everything once more, as of now or later, before any further change."""

    def close(self) -> None:
        """End the watch, and a `next` that waits in another thread."""


class KeyValue(Protocol):
    """Any thread may call any of these. `StoreAwayError` from a write means that nobody knows its fate."""

    def get(self, prefix: str) -> Snapshot:
        """Every entry under a prefix, not older than anything any caller was told before."""

    def write(self, write: Write) -> int | None:
        """Its revision if it was applied, None if a guard refused it. `LeaseLostError` if a lease is over."""

    def grant(self, ttl_s: float) -> int:
        """A new lease, alive for at least so long."""

    def keep_alive(self, lease_id: int) -> None:
        """Count the lease's time anew; `LeaseLostError` if it is over."""

    def revoke(self, lease_id: int) -> None:
        """End a lease, and every key with it. Nothing happens if it is over."""

    def watch(self, prefix: str) -> Watch: ...

    def close(self) -> None:
        """End everything this home started here. Keys stay; leases run out."""
