"""The core of a store: keys, revisions, leases and a bounded history. Time comes in as an argument.

The in-memory store, the embedded server and the simulator are all shells around it. It holds no lock and
starts nothing. Invariant: each applied write gets the next revision, and its changes are seen all together.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from elastic_hieravg.errors import LeaseLostError, Problem
from elastic_hieravg.membership.kv import ABSENT, Changes, Entry, Snapshot, Write

# Whoever asks for what came before gets a snapshot instead.
HISTORY_MAX = 10_000


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    expires_s: float
    keys: set[str] = field(default_factory=set)


class Ledger:
    def __init__(self, *, history_max: int = HISTORY_MAX, first_lease_id: int = 1) -> None:
        self.revision = 1
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._next_lease_id = first_lease_id
        self._history: deque[tuple[int, str, Entry | None]] = deque(maxlen=history_max)
        self._first_revision = self.revision + 1

    @classmethod
    def resumed(
        cls,
        now_s: float,
        *,
        known: Snapshot,
        revision: int,
        ttls_s: Mapping[int, float],
        other_ttl_s: float,
        first_lease_id: int,
    ) -> "Ledger":
        """Go on from what was seen of a ledger that is lost: the same entries under the same leases.

        Every lease lives for one more of its times to live, `other_ttl_s` if that is not known. The history
        begins at `revision`.
        """
        assert revision >= known.revision, "revisions only grow"
        ledger = cls(first_lease_id=first_lease_id)
        ledger.revision, ledger._entries = revision, dict(known.entries)
        ledger.compact()
        for key, entry in known.entries.items():
            if entry.lease_id:
                ttl_s = ttls_s.get(entry.lease_id, other_ttl_s)
                ledger._leases.setdefault(entry.lease_id, _Lease(ttl_s, now_s + ttl_s)).keys.add(key)
        return ledger

    def get(self, prefix: str) -> Snapshot:
        found = {key: entry for key, entry in self._entries.items() if key.startswith(prefix)}
        return Snapshot(found, self.revision)

    def write(self, write: Write) -> int | None:
        """The write's revision, or None if a guard refused it."""
        for key, revision in write.guards.items():
            entry = self._entries.get(key)
            if (entry.revision if entry else ABSENT) != revision:
                return None
        for put in write.puts:
            if put.lease_id and put.lease_id not in self._leases:
                raise lease_lost(put.lease_id)
        changes: dict[str, Entry | None] = {
            put.key: Entry(put.value, self.revision + 1, put.lease_id) for put in write.puts
        }
        changes |= dict.fromkeys(key for key in write.deletes if key in self._entries)
        self._apply(changes)
        return self.revision

    def grant(self, now_s: float, *, ttl_s: float) -> int:
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        self._leases[lease_id] = _Lease(ttl_s, now_s + ttl_s)
        return lease_id

    def keep_alive(self, now_s: float, *, lease_id: int) -> float:
        """How long it lives from now on, in seconds."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise lease_lost(lease_id)
        lease.expires_s = now_s + lease.ttl_s
        return lease.ttl_s

    def revoke(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._apply(dict.fromkeys(sorted(lease.keys)))

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over."""
        over = [lease_id for lease_id, lease in self._leases.items() if lease.expires_s <= now_s]
        for lease_id in over:
            self.revoke(lease_id)

    def next_expiry_s(self) -> float | None:
        return min((lease.expires_s for lease in self._leases.values()), default=None)

    def forgive(self, stall_s: float) -> None:
        """Prolong all leases: for so long nobody's heartbeat could be heard."""
        for lease in self._leases.values():
            lease.expires_s += stall_s

    def changes_after(self, revision: int, *, prefix: str) -> Changes | None:
        """What changed under a prefix after a revision, or None if that is no longer known."""
        if revision + 1 < self._first_revision:
            return None
        return Changes(tuple(self._changes(revision, prefix)), self.revision)

    def compact(self) -> None:
        """Forget the history. What is there now stays."""
        self._history.clear()
        self._first_revision = self.revision + 1

    def _changes(self, revision: int, prefix: str) -> Iterator[tuple[str, Entry | None]]:
        newer = []
        for at, key, entry in reversed(self._history):
            if at <= revision:
                break
            if key.startswith(prefix):
                newer.append((key, entry))
        return reversed(newer)

    def _apply(self, changes: Mapping[str, Entry | None]) -> None:
        if not changes:
            return
        self.revision += 1
        for key, entry in changes.items():
            before = self._entries.pop(key, None)
            if before is not None and before.lease_id in self._leases:
                self._leases[before.lease_id].keys.discard(key)
            if entry is not None:
                self._entries[key] = entry
                if entry.lease_id:
                    self._leases[entry.lease_id].keys.add(key)
            if len(self._history) == self._history.maxlen:
                # The oldest goes, and with it the claim to know what came after the one before it.
                self._first_revision = self._history[0][0] + 1
            self._history.append((self.revision, key, entry))


def lease_lost(lease_id: int) -> LeaseLostError:
    return LeaseLostError(
        Problem(f"lease {lease_id} is over", "ask for a new one: it was not kept alive in time, or revoked")
    )
