"""How fast a node's workers step, of late. Pure: the time comes in as an argument.

Points are made now and then of what the workers have told until then, and a few of them are kept.
"""

import math
from collections import deque
from collections.abc import Mapping

from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.samples import Samples

POINT_EVERY_S = 2.0
POINTS_MAX = 60
# Of these last points a node's speed is made.
POINTS_OF_LATE = 5

Worker = tuple[int, int]


class Pace:
    def __init__(self) -> None:
        self._seen: dict[Worker, tuple[float, float, float]] = {}
        self.step_seconds_of: dict[Worker, float] = {}
        self.points: deque[float] = deque(maxlen=POINTS_MAX)
        self.steps_per_s = 0.0

    def point(self, now_s: float, workers: Mapping[Worker, Samples]) -> None:
        """Compare what the workers tell with what they told at the point before."""
        speeds: list[float] = []
        seen: dict[Worker, tuple[float, float, float]] = {}
        for worker, samples in workers.items():
            steps = samples.counters.get((names.STEPS, ()), 0.0)
            productive_s = samples.counters.get((names.PRODUCTIVE_SECONDS, ()), 0.0)
            before = self._seen.get(worker)
            seen[worker] = now_s, steps, productive_s
            if before is None:
                continue
            passed_s, made = now_s - before[0], steps - before[1]
            speeds.append(made / passed_s if passed_s > 0 else 0.0)
            if made > 0:
                self.step_seconds_of[worker] = (productive_s - before[2]) / made
        self._seen = seen
        self.step_seconds_of = {
            worker: seconds for worker, seconds in self.step_seconds_of.items() if worker in workers
        }
        self.steps_per_s = sum(speeds) / len(speeds) if speeds else 0.0
        if self.step_seconds_of:
            mean = sum(self.step_seconds_of.values()) / len(self.step_seconds_of)
            self.points.append(float(f"{mean:.4g}"))


def of_late(points: "deque[float] | list[float]") -> float | None:
    """The mean of the last points; None if there are none."""
    last = [each for each in list(points)[-POINTS_OF_LATE:] if math.isfinite(each)]
    return sum(last) / len(last) if last else None
