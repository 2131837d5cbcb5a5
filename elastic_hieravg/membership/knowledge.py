"""What one agent knows of the embedded store: enough for another to go on with it. Pure; holds no lock.

It follows the watch, and sees what this agent itself writes: as which incarnation it asks to be in the job is
what its vote counts for. Invariant: from the moment an agent says that it goes or starts anew, it votes no more
as what it was.
"""

from collections.abc import Iterator

from elastic_hieravg.errors import DocumentError
from elastic_hieravg.membership.hosts import Where
from elastic_hieravg.membership.kv import Changes, Entry, Snapshot, Write
from elastic_hieravg.membership.mirror import Keys
from elastic_hieravg.membership.records import Generation, NodeRecord, NodeState, read_generation, read_node
from elastic_hieravg.membership.succession import Brought

# How many of its own former incarnations an agent tells of.
RENOUNCED_MAX = 64


class Knowledge:
    """`where`: at which address and port this agent stands by. `identity`: whom its vote counts for, if any."""

    def __init__(self, keys: Keys, where: Where) -> None:
        self._keys = keys
        self._where = where
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, tuple[float, float]] = {}
        self._own_lease = 0
        self.revision = 0
        self.identity = ""
        self.renounced: list[str] = []

    def apply(self, update: Snapshot | Changes) -> bool:
        """Take in what the watch told. Whether there is another generation now."""
        before = self._entries.get(self._keys.generation)
        if isinstance(update, Snapshot):
            self._entries = dict(update.entries)
        else:
            for key, entry in update.changes:
                if entry is None:
                    self._entries.pop(key, None)
                else:
                    self._entries[key] = entry
        self.revision = update.revision
        return self._entries.get(self._keys.generation) != before

    def note_write(self, write: Write) -> None:
        """What this agent is about to ask for, before anybody can have heard of it."""
        for put in write.puts:
            record = self._read_node(put.key, put.value)
            if record is None or (record.address, record.standby) != self._where:
                continue
            is_leaving = record.state is NodeState.LEAVING
            if is_leaving or record.node.incarnation != self.identity:
                self.renounce()
            self.identity = "" if is_leaving else record.node.incarnation
            self._own_lease = put.lease_id

    def renounce(self) -> None:
        """This agent is no longer what it was."""
        if self.identity:
            self.renounced = [*self.renounced, self.identity][-RENOUNCED_MAX:]
        self.identity = ""

    def note_lease(self, sent_s: float, lease_id: int, *, ttl_s: float) -> None:
        """A host has counted this lease's time anew, no earlier than it was asked to."""
        self._leases[lease_id] = sent_s, ttl_s

    def holds_lease(self, now_s: float) -> bool:
        """Whether this node's own lease cannot have ended yet."""
        sent_s, ttl_s = self._leases.get(self._own_lease, (now_s, 0.0))
        return now_s < sent_s + ttl_s

    def brought(self) -> Brought:
        used = {entry.lease_id for entry in self._entries.values()}
        ttls_s = {lease_id: ttl_s for lease_id, (_, ttl_s) in self._leases.items() if lease_id in used}
        return Brought(Snapshot(dict(self._entries), self.revision), ttls_s)

    def generation(self) -> Generation | None:
        entry = self._entries.get(self._keys.generation)
        try:
            return read_generation(entry.value) if entry else None
        except DocumentError:
            return None

    def agents(self) -> Iterator[tuple[str, Where]]:
        """Incarnations and where their agents stand by, members of the generation first, in rank order."""
        generation = self.generation()
        order = [self._keys.node(node.node_id) for node in generation.members] if generation else []
        others = sorted(
            key for key in self._entries if key.startswith(self._keys.node("")) and key not in order
        )
        for key in (*order, *others):
            entry = self._entries.get(key)
            record = None if entry is None else self._read_node(key, entry.value)
            if record is not None and record.standby:
                yield record.node.incarnation, (record.address, record.standby)

    def candidates(self) -> Iterator[tuple[str, Where]]:
        """As `agents`, of the members alone: those who may serve."""
        generation = self.generation()
        members = {node.incarnation for node in generation.members} if generation else set()
        return (each for each in self.agents() if each[0] in members)

    def _read_node(self, key: str, text: str) -> NodeRecord | None:
        if not key.startswith(self._keys.node("")):
            return None
        try:
            return read_node(text)
        except DocumentError:
            return None
