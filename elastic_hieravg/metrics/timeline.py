"""Where the time of a node's workers goes, second by second. Pure: the time comes in as an argument.

A worker accounts for its own time from its first word on. What no worker can tell is the agent's to add: before
the first step of a slot it is `start`, after that `recovery`. Goodput is the part of all slots' time since the
node began that went into steps. Invariant: a second of a slot is counted once, or not yet: the step that is
being made is counted when it is made.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_hieravg.metrics.catalogue import Cause


@dataclass(slots=True)
class _Slot:
    """One worker's place. `since_s`: from when on nobody has accounted for it yet.

    `is_there`: a worker accounts for it. `told_s` and `productive_s` are of that worker alone. `done_s`:
    when its loop ended.
    """

    began_s: float
    since_s: float
    is_there: bool = False
    told_s: float = 0.0
    productive_s: float = 0.0
    earlier_productive_s: float = 0.0
    has_stepped: bool = False
    done_s: float | None = None
    own: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def cause(self) -> Cause:
        return Cause.RECOVERY if self.has_stepped else Cause.START

    def add(self, until_s: float) -> None:
        self.own[self.cause] += max(0.0, until_s - self.since_s)
        self.since_s = until_s


class Timeline:
    def __init__(self, now_s: float, *, slots: int) -> None:
        self._slots = [_Slot(now_s, now_s) for _ in range(slots)]

    def came(self, now_s: float, *, slot: int) -> None:
        """A worker has said its first word: from here on it accounts for its time."""
        self.gone(now_s, slot=slot)
        place = self._slots[slot]
        place.add(now_s)
        place.is_there, place.done_s = True, None

    def told(
        self, now_s: float, *, slot: int, productive_s: float, badput_s: Mapping[Cause, float], num_steps: float
    ) -> None:
        """What the worker has accounted for since it came."""
        place = self._slots[slot]
        if place.is_there:
            place.productive_s = productive_s
            place.told_s = min(productive_s + sum(badput_s.values()), max(0.0, now_s - place.since_s))
            place.has_stepped |= num_steps > 0

    def done(self, now_s: float, *, slot: int) -> None:
        """Its training loop has ended: time after that is no part of the training."""
        place = self._slots[slot]
        if place.is_there:
            place.done_s = now_s

    def gone(self, now_s: float, *, slot: int) -> None:
        """It is not there any more. What it had not told went with it."""
        place = self._slots[slot]
        if not place.is_there:
            return
        place.is_there = False
        place.earlier_productive_s += place.productive_s
        place.since_s += place.told_s
        place.productive_s = place.told_s = 0.0
        place.add(now_s if place.done_s is None else max(place.since_s, place.done_s))

    def own(self, now_s: float) -> dict[Cause, float]:
        """What the agent adds to what its workers tell, by cause."""
        found: defaultdict[Cause, float] = defaultdict(float)
        for place in self._slots:
            for cause, seconds in place.own.items():
                found[cause] += seconds
            if not place.is_there and place.done_s is None:
                found[place.cause] += max(0.0, now_s - place.since_s)
        return dict(found)

    def productive_s(self) -> float:
        return sum(place.earlier_productive_s + place.productive_s for place in self._slots)

    def wall_s(self, now_s: float) -> float:
        """All slots' time since the node began, each up to the end of its training loop."""
        ends_s = ((now_s if place.done_s is None else place.done_s) - place.began_s for place in self._slots)
        return sum(max(0.0, seconds) for seconds in ends_s)

    def goodput(self, now_s: float) -> float:
        """From 0 to 1; 0 at the beginning."""
        wall_s = self.wall_s(now_s)
        return min(1.0, self.productive_s() / wall_s) if wall_s > 0 else 0.0
