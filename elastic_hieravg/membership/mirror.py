"""What one agent has seen of a job's keys, and since when. Pure: the time comes in with every update.

A mirror follows a watch and turns what it holds into the `View` that `decide` looks at. Invariant: it is fed by
that one watch alone, so it only ever goes forward, or begins anew when the store does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import quote

from elastic_hieravg.errors import DocumentError
from elastic_hieravg.membership.decisions import Live, Loss, View, is_usable
from elastic_hieravg.membership.kv import ABSENT, Changes, Entry, Snapshot
from elastic_hieravg.membership.records import (
    Bounds,
    Closing,
    Generation,
    Job,
    NodeRecord,
    NodeState,
    Refusal,
    StoreOffer,
    Suspicion,
    read_bounds,
    read_closing,
    read_generation,
    read_job,
    read_node,
    read_offer,
    read_refusal,
    read_suspicion,
)
from elastic_hieravg.plan import Node

ROOT = "/hieravg"
LEFT = "it left on purpose"

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one run. No run's prefix is the beginning of another's."""

    run_id: str
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"{ROOT}/{quote(self.run_id, safe='')}/")

    @property
    def job(self) -> str:
        return f"{self.prefix}job"

    @property
    def bounds(self) -> str:
        return f"{self.prefix}bounds"

    @property
    def generation(self) -> str:
        return f"{self.prefix}generation"

    @property
    def quorum(self) -> str:
        """The embedded store's own: what its host judges the next generation by."""
        return f"{self.prefix}quorum"

    @property
    def store(self) -> str:
        return f"{self.prefix}store"

    @property
    def closing(self) -> str:
        return f"{self.prefix}closing"

    def node(self, node_id: str) -> str:
        return f"{self.prefix}nodes/{node_id}"

    def suspicion(self, node_id: str) -> str:
        return f"{self.prefix}suspicions/{node_id}"

    def refusal(self, node_id: str) -> str:
        return f"{self.prefix}refusals/{node_id}"

    def broken(self, group: str) -> str:
        return f"{self.prefix}broken/{group}"


class Mirror:
    """Work is done per changed key, not per key: a large job changes often, a little at a time."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.revision = 0
        self.is_synced = False
        self.nodes: dict[str, NodeRecord] = {}
        self.suspicions: dict[str, Suspicion] = {}
        self.refusals: dict[str, Refusal] = {}
        self.broken: set[str] = set()
        self.job: Job | None = None
        self.bounds: Bounds | None = None
        self.generation: Generation | None = None
        self.offer: StoreOffer | None = None
        self.closing: Closing | None = None
        self.unreadable: dict[str, DocumentError] = {}
        self._entries: dict[str, Entry] = {}
        self._live: dict[str, Live] = {}
        self._lost: dict[str, Loss] = {}
        self._broken_since_s = math.inf
        self._paused_since_s = math.inf
        self._bounds_since_s = math.inf
        self._view: View | None = None

    def revision_of(self, key: str) -> int:
        entry = self._entries.get(key)
        return entry.revision if entry else ABSENT

    def lease_of(self, key: str) -> int:
        entry = self._entries.get(key)
        return entry.lease_id if entry else 0

    def apply(self, now_s: float, update: Snapshot | Changes, *, nodes_min: int) -> None:
        """Take in what the watch told, in the order it was told. `nodes_min`: if the store has no bounds."""
        if isinstance(update, Snapshot):
            gone = self._entries.keys() - update.entries.keys()
            changes = [*((key, None) for key in gone), *update.entries.items()]
            self.is_synced = True
        else:
            changes = list(update.changes)
        self.revision = update.revision
        for key, entry in changes:
            if self._entries.get(key) != entry:
                self._take(now_s, key, entry)
        self._note_times(now_s, self.bounds.nodes_min if self.bounds else nodes_min)
        self._view = None

    def view(self, me: Node) -> View:
        """The same object as long as nothing changes."""
        if self._view is None or self._view.me != me:
            self._view = View(
                me,
                dict(self._live),
                self.generation,
                dict(self._lost),
                tuple(sorted(self.broken)),
                self._broken_since_s,
                self._paused_since_s,
                self.closing,
                self._bounds_since_s,
                self.bounds or (self.job.bounds if self.job else None),
            )
        return self._view

    def suspicion_of(self, node: Node) -> Suspicion | None:
        """The suspicion against this very incarnation, if there is one."""
        suspicion = self.suspicions.get(node.node_id)
        return suspicion if suspicion and suspicion.incarnation == node.incarnation else None

    def refusal_of(self, node: Node) -> Refusal | None:
        refusal = self.refusals.get(node.node_id)
        return refusal if refusal and refusal.incarnation == node.incarnation else None

    def _take(self, now_s: float, key: str, entry: Entry | None) -> None:
        if entry is None:
            del self._entries[key]
        else:
            self._entries[key] = entry
        section, _, name = key.removeprefix(self.keys.prefix).partition("/")
        self.unreadable.pop(key, None)
        try:
            self._read(section, name, entry)
        except DocumentError as exc:
            # As if it were not there; whoever needs it looks among the unreadable ones.
            self._read(section, name, None)
            self.unreadable[key] = exc
        if section in ("nodes", "suspicions", "refusals"):
            self._note_node(now_s, name)
        elif section == "generation":
            self._note_members(now_s)
        elif section in ("job", "bounds"):
            self._bounds_since_s = now_s

    def _read(self, section: str, name: str, entry: Entry | None) -> None:
        match section:
            case "nodes":
                _keep(self.nodes, name, entry, read_node)
            case "suspicions":
                _keep(self.suspicions, name, entry, read_suspicion)
            case "refusals":
                _keep(self.refusals, name, entry, read_refusal)
            case "broken":
                (self.broken.add if entry else self.broken.discard)(name)
            case "job":
                self.job = read_job(entry.value) if entry else None
            case "bounds":
                self.bounds = read_bounds(entry.value) if entry else None
            case "generation":
                self.generation = read_generation(entry.value) if entry else None
            case "store":
                self.offer = read_offer(entry.value) if entry else None
            case "closing":
                self.closing = read_closing(entry.value) if entry else None

    def _note_node(self, now_s: float, node_id: str) -> None:
        """Something of a node changed: whether it counts, in which state, and since when."""
        record, before = self.nodes.get(node_id), self._live.pop(node_id, None)
        if record is not None and self._why_out(record) is None:
            is_same = before is not None and _state(before.record) == _state(record)
            self._live[node_id] = Live(record, before.since_s if before and is_same else now_s)
        member = self.generation.member(node_id) if self.generation else None
        if member is not None:
            self._note_member(now_s, member)

    def _note_members(self, now_s: float) -> None:
        before, self._lost = self._lost, {}
        for member in self.generation.members if self.generation else ():
            loss = before.get(member.node_id)
            if loss is not None and loss.incarnation == member.incarnation:
                self._lost[member.node_id] = loss
            self._note_member(now_s, member)

    def _note_member(self, now_s: float, member: Node) -> None:
        why, before = self._why_lost(member), self._lost.pop(member.node_id, None)
        if why is not None:
            # The time counts from the first sign, whatever is learnt of the cause later.
            since_s = before.since_s if before else now_s
            self._lost[member.node_id] = Loss(member.incarnation, since_s, why, why == LEFT)

    def _note_times(self, now_s: float, nodes_min: int) -> None:
        self._broken_since_s = min(self._broken_since_s, now_s) if self.broken else math.inf
        is_paused = self.generation is None or bool(self.generation.hold)
        if not is_paused:
            is_paused = sum(map(is_usable, self._live.values())) < nodes_min
        self._paused_since_s = min(self._paused_since_s, now_s) if is_paused else math.inf

    def _why_lost(self, member: Node) -> str | None:
        record = self.nodes.get(member.node_id)
        if record is None:
            return "its lease ended"
        if record.node.incarnation != member.incarnation:
            return "it started anew"
        if record.state is NodeState.LEAVING:
            return LEFT
        return self._why_out(record)

    def _why_out(self, record: NodeRecord) -> str | None:
        """Why a node whose record is there does not count."""
        suspicion = self.suspicion_of(record.node)
        if suspicion is not None:
            return f"{suspicion.why} (seen by {suspicion.by})"
        refusal = self.refusal_of(record.node)
        return refusal.reason if refusal else None


def _state(record: NodeRecord) -> tuple[str, NodeState, int]:
    return record.node.incarnation, record.state, record.asked


def _keep(found: dict[str, R], name: str, entry: Entry | None, read: Callable[[str], R]) -> None:
    if entry is None:
        found.pop(name, None)
    else:
        found[name] = read(entry.value)
