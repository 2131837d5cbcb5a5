"""Whether a worker hangs: it makes no step for much longer than its own steps take. Pure.

Liveness is progress: a worker whose threads answer and whose loop stands still hangs. Time in which it waits
for others, or said that it makes no steps, does not count.
"""

from collections import deque
from dataclasses import dataclass, field

# However fast its steps are, a worker may stand still for so long.
FLOOR_S = 30.0
FIRST_STEP_S = 1800.0
# So many times its slowest step of late.
STEPS = 10.0
REMEMBERED = 64
# The agent looks at its workers far more often than this, unless it does not run itself.
LOOK_S = 2.0


@dataclass(slots=True)
class AwakeClock:
    """Seconds in which this process ran. A node that was frozen as a whole blames no worker for it.

    >>> clock = AwakeClock()
    >>> [clock.read(now_s) for now_s in (100.0, 100.5, 160.5)]
    [0.0, 0.5, 2.5]
    """

    _awake_s: float = 0.0
    _seen_s: float | None = None

    def read(self, now_s: float) -> float:
        if self._seen_s is not None:
            self._awake_s += min(now_s - self._seen_s, LOOK_S)
        self._seen_s = now_s
        return self._awake_s


@dataclass(slots=True)
class Pulse:
    """What one worker's reports say. `timeout_s`: what somebody asked for, None for its own measure."""

    timeout_s: float | None = None
    _step: int = -1
    _since_s: float | None = None
    _heard_s: float | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def report(self, now_s: float, *, step: int, is_excused: bool) -> None:
        """Several steps may lie between two reports: then each took its part of the time."""
        self._heard_s = now_s
        if is_excused:
            self._since_s = None
        elif step != self._step or self._since_s is None:
            if self._since_s is not None and step > self._step >= 0:
                self._seconds.append((now_s - self._since_s) / (step - self._step))
            self._since_s = now_s
        self._step = step

    def limit_s(self) -> float:
        if self.timeout_s is not None:
            return self.timeout_s
        # How long its steps take is not known before the first: it may compile, or load its data.
        return max(FLOOR_S, STEPS * max(self._seconds)) if self._seconds else FIRST_STEP_S

    def stands_still_s(self, now_s: float) -> float:
        """For how long it has stood still without excuse, or said nothing at all: it may be frozen."""
        first_s = self._since_s if self._since_s is not None else self._heard_s
        return 0.0 if first_s is None else now_s - first_s

    def hangs(self, now_s: float) -> bool:
        return self.stands_still_s(now_s) > self.limit_s()
