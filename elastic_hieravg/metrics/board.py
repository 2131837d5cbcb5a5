"""What one agent has seen of its job over time: who is in which state, who came, who is lost and why.

Fed with the membership's views. Time comes in as an argument, in seconds since the epoch. Invariant: what is
remembered is bounded, however long the job runs and however many nodes pass through it.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_hieravg.membership.decisions import View
from elastic_hieravg.membership.mirror import LEFT
from elastic_hieravg.membership.records import Generation, NodeState
from elastic_hieravg.metrics.catalogue import NodeShown
from elastic_hieravg.plan import Node

EVENTS_MAX = 200
LOST_MAX = 256
# So long it is shown of a node that it left: who looks after a scale-down finds it.
LEFT_SHOWN_S = 300.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A node as it is shown. `reason`: why it is lost, or left. `since_s`: for how long it is in this state."""

    node: Node
    state: NodeShown
    address: str
    since_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """A generation that came."""

    at_s: float
    generation: int
    kind: str
    reason: str
    left: tuple[str, ...]
    came: tuple[str, ...]


class Board:
    def __init__(self, *, nodes_max: int) -> None:
        self._nodes_max = nodes_max
        self.generation: Generation | None = None
        self.generation_s = 0.0
        self.nodes: dict[str, Seen] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._lost: dict[str, Seen] = {}
        self._why: dict[str, str] = {}

    def see(self, now_s: float, view: View) -> None:
        """Take in what the membership sees now."""
        if view.generation is not None and view.generation != self.generation:
            self._follow(now_s, view.generation)
        for node_id, loss in (view.lost or {}).items():
            self._why.setdefault(node_id, loss.why)
        shown = self._shown(now_s, view)
        for node_id, seen in shown.items():
            # The record of one that leaves outlives its part in the job for a moment.
            if seen.state is not NodeShown.LEAVING:
                self._lost.pop(node_id, None)
        before, self.nodes = self.nodes, {}
        for node_id, seen in {**shown, **self._lost}.items():
            old = before.get(node_id)
            since_s = old.since_s if old and old.state is seen.state else seen.since_s
            self.nodes[node_id] = Seen(seen.node, seen.state, seen.address, since_s, seen.reason)

    def is_training(self, node_id: str) -> bool:
        seen = self.nodes.get(node_id)
        return seen is not None and seen.state is NodeShown.TRAINING

    def shown(self, now_s: float) -> dict[str, Seen]:
        """The nodes without those that left long ago."""
        return {
            node_id: seen
            for node_id, seen in self.nodes.items()
            if seen.state is not NodeShown.LEFT or now_s <= seen.since_s + LEFT_SHOWN_S
        }

    def count_by_state(self) -> dict[NodeShown, int]:
        """How many nodes of the job there are in each state; who left is none of them."""
        counts = Counter(seen.state for seen in self.nodes.values())
        return {state: counts[state] for state in NodeShown if state is not NodeShown.LEFT}

    def _follow(self, now_s: float, generation: Generation) -> None:
        before = self.generation
        was = {node.node_id: node for node in before.members} if before else {}
        now = {node.node_id: node for node in generation.members}
        left = tuple(node_id for node_id in was if node_id not in now)
        came = tuple(
            node_id
            for node_id, node in now.items()
            if node_id not in was or was[node_id].incarnation != node.incarnation
        )
        for node_id in left:
            address = before.addresses.get(node_id, "") if before else ""
            is_on_purpose = f"{node_id}: {LEFT}" in generation.reason
            why = self._why.get(node_id, LEFT if is_on_purpose else generation.reason)
            state = NodeShown.LEFT if why == LEFT else NodeShown.LOST
            self._lost[node_id] = Seen(was[node_id], state, address, now_s, why)
        while len(self._lost) > LOST_MAX:
            del self._lost[next(iter(self._lost))]
        self._why = {}
        self.generation, self.generation_s = generation, now_s
        self.events.append(Event(now_s, generation.number, str(generation.kind), generation.reason, left, came))

    def _shown(self, now_s: float, view: View) -> dict[str, Seen]:
        """Everybody who is in the generation or has a record."""
        found: dict[str, Seen] = {}
        generation, lost = view.generation, view.lost or {}
        members = generation.members if generation else ()
        nodes_max = view.bounds.nodes_max if view.bounds else self._nodes_max
        is_full = len(members) - len(lost) >= nodes_max
        for member in members:
            loss = lost.get(member.node_id)
            state = NodeShown.TRAINING
            if loss is not None:
                state = NodeShown.LEAVING if loss.is_on_purpose else NodeShown.LOST
            address = generation.addresses.get(member.node_id, "") if generation else ""
            found[member.node_id] = Seen(member, state, address, now_s, loss.why if loss else "")
        for node_id, live in view.nodes.items():
            if generation is not None and generation.lists(live.record.node):
                continue
            # A node that started anew is back, whatever became of it before.
            state = NodeShown.SPARE if is_full else NodeShown.JOINING
            state = _STATES.get(live.record.state, state)
            found[node_id] = Seen(live.record.node, state, live.record.address, now_s)
        return found


_STATES: Mapping[NodeState, NodeShown] = {
    NodeState.JOINING: NodeShown.JOINING,
    NodeState.LEAVING: NodeShown.LEAVING,
}
