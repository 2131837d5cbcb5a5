"""How long the phases of a recovery take, from a loss back to work. Pure: times come in as arguments.

Told by a node that survives: of a node that is lost, of the generation without it, of its own workers' entry
into that, and of their first global round there. Invariant: a phase is told once for each loss.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from elastic_hieravg.metrics.catalogue import Phase

# Losses that are known and have no generation yet.
LOSSES_MAX = 256

Phases = list[tuple[Phase, float]]


@dataclass(slots=True)
class Recovery:
    """`_evidence`: when each loss was known, by incarnation."""

    _evidence: dict[str, float] = field(default_factory=dict)
    _number: int = 0
    _adopted_s: float | None = None
    _entered_s: float | None = None

    def lost(self, incarnation: str, *, since_s: float, last_sign_s: float | None) -> Phases:
        """Somebody is lost, known since then. `last_sign_s`: its last sign of life, None if nobody knows."""
        if incarnation in self._evidence or len(self._evidence) >= LOSSES_MAX:
            return []
        self._evidence[incarnation] = since_s
        return [] if last_sign_s is None else [(Phase.DETECT, max(0.0, since_s - last_sign_s))]

    def spoke_up(self, incarnations: Collection[str]) -> None:
        """These are not lost, whatever was known before."""
        for incarnation in self._evidence.keys() & set(incarnations):
            del self._evidence[incarnation]

    def adopted(self, now_s: float, *, number: int, members: Collection[str]) -> Phases:
        """A generation with these incarnations has come. Only one without somebody who was lost counts."""
        known = [since_s for incarnation, since_s in self._evidence.items() if incarnation not in members]
        self._evidence = {each: since_s for each, since_s in self._evidence.items() if each in members}
        if not known:
            return []
        # A loss on the way to the generation after another: that way was the longer one.
        self._number, self._entered_s = number, None
        self._adopted_s = now_s if self._adopted_s is None else self._adopted_s
        return [(Phase.REPLAN, max(0.0, now_s - min(known)))]

    def entered(self, now_s: float, *, number: int) -> Phases:
        """All workers of this node work in a generation."""
        if self._adopted_s is None or self._entered_s is not None or number < self._number:
            return []
        self._entered_s = now_s
        return [(Phase.REGROUP, max(0.0, now_s - self._adopted_s))]

    def committed(self, at_s: float, *, number: int) -> Phases:
        """A global round was committed in a generation."""
        if self._entered_s is None or number < self._number or at_s < self._entered_s:
            return []
        told = [(Phase.FIRST_ROUND, at_s - self._entered_s)]
        self.forget()
        return told

    def forget(self) -> None:
        """This node's own workers are gone: what follows is no survivor's way."""
        self._adopted_s = self._entered_s = None
