"""What a worker counts while it trains: steps, rounds, and where its time goes.

The training thread counts, another one reads now and then. A step costs it a few additions; whatever costs
more is done by the reader. Every second belongs to one thing: to steps that were made, to one of the causes, or
to the step that is being made. Invariant: what is counted only grows.
"""

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from elastic_hieravg.events import Outcome, RoundDone
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.catalogue import BY_NAME, Cause
from elastic_hieravg.metrics.samples import Distribution, Key, LastRound, Samples

_STEP_BOUNDS = BY_NAME[names.STEP_SECONDS].buckets
_ROUND_BOUNDS = BY_NAME[names.ROUND_SECONDS].buckets


class Tally:
    """`link_of` says which link a level's rounds cross; `wall` is the time since the epoch."""

    def __init__(
        self,
        *,
        link_of: Callable[[str, str], str] = lambda _level, link: link,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._link_of = link_of
        self._clock = clock
        self._wall = wall
        # For what happens at boundaries; a step takes no lock.
        self._lock = threading.Lock()
        self._num_steps = 0
        self._num_samples = 0.0
        self._step_counts = [0] * (len(_STEP_BOUNDS) + 1)
        self._productive_s = 0.0
        self._counters: defaultdict[Key, float] = defaultdict(float)
        self._gauges: dict[Key, float] = {}
        self._round_counts: dict[str, list[int]] = {}
        self._round_totals: defaultdict[str, float] = defaultdict(float)
        self._last: dict[str, LastRound] = {}
        self._spent_s = 0.0
        self._resumed_s = clock()

    # --- in the training thread -------------------------------------------------------------------------------

    def step(self, num_samples: float) -> None:
        """A step of the training loop is made: from the end of the boundary before it until now."""
        now_s = self._clock()
        seconds = now_s - self._resumed_s
        self._resumed_s = now_s
        self._productive_s += seconds
        self._step_counts[bisect_left(_STEP_BOUNDS, seconds)] += 1
        self._num_samples += num_samples
        self._num_steps += 1

    @contextmanager
    def spending(self, cause: Cause) -> Iterator[None]:
        """Time that belongs to no step. What happens inside and is counted by itself is taken off the cause."""
        before_s, counted_s, began_s = self._resumed_s, self._spent_s, self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began_s
            self._spend(cause, seconds - (self._spent_s - counted_s))
            # The step that is being made goes on where it was.
            self._resumed_s = before_s + seconds

    def begin(self) -> None:
        """Time counts from here on. What was before is counted by whoever started this worker."""
        self._resumed_s = self._clock()

    def resume(self, cause: Cause) -> None:
        """The time since the last step, or since the beginning, went into this; the next step begins now."""
        now_s = self._clock()
        self._spend(cause, now_s - self._resumed_s)
        self._resumed_s = now_s

    def round_done(self, done: RoundDone) -> None:
        """A round was committed, failed or skipped."""
        level, link = done.level, self._link_of(done.level, done.link)
        with self._lock:
            counters = self._counters
            # Every outcome is there from a level's first round on: the increase to a first failure needs a 0.
            for outcome in Outcome:
                counters[names.ROUNDS, (level, outcome)] += outcome is done.outcome
            counters[names.EXPOSED_SECONDS, (level,)] += done.seconds
            counters[names.STRAGGLER_SECONDS, (level,)] += done.wait_seconds
            counters[names.NONFINITE, ()] += done.num_nonfinite
            if done.sent_bytes:
                counters[names.COMM_BYTES, (level, link)] += done.sent_bytes
            if done.outcome is Outcome.COMMITTED:
                counts = self._round_counts.setdefault(level, [0] * (len(_ROUND_BOUNDS) + 1))
                counts[bisect_left(_ROUND_BOUNDS, done.seconds)] += 1
                self._round_totals[level] += done.seconds
                if done.divergence_ratio is not None:
                    self._gauges[names.DIVERGENCE, (level,)] = done.divergence_ratio
            self._last[level] = LastRound(
                done.step, done.seconds, done.sent_bytes, link, done.outcome, self._wall()
            )
        self._spend(Cause.AVERAGING, done.seconds - done.wait_seconds)
        self._spend(Cause.STRAGGLER, done.wait_seconds)

    def _spend(self, cause: Cause, seconds: float) -> None:
        with self._lock:
            self._spent_s += max(0.0, seconds)
            self._counters[names.BADPUT_SECONDS, (cause,)] += max(0.0, seconds)

    # --- in another thread ------------------------------------------------------------------------------------

    def samples(
        self,
        *,
        rank: int,
        generation: int,
        step: int,
        state: str,
        values: Mapping[str, float],
        num_local_gradients: int = 0,
        num_dropped: int = 0,
    ) -> Samples:
        """Everything so far. `values`: what the script reported. `num_dropped` reports did not get through."""
        with self._lock:
            counters, gauges = dict(self._counters), dict(self._gauges)
            distributions: dict[Key, Distribution] = {
                (names.ROUND_SECONDS, (level,)): Distribution(tuple(counts), self._round_totals[level])
                for level, counts in self._round_counts.items()
            }
            last = dict(self._last)
        counters[names.STEPS, ()] = self._num_steps
        counters[names.SAMPLES, ()] = self._num_samples
        counters[names.PRODUCTIVE_SECONDS, ()] = self._productive_s
        counters[names.LOCAL_GRADIENTS, ()] = num_local_gradients
        counters[names.REPORTS_DROPPED, ()] = num_dropped
        distributions[names.STEP_SECONDS, ()] = Distribution(tuple(self._step_counts), self._productive_s)
        gauges |= {(names.USER_VALUE, (name,)): value for name, value in values.items()}
        return Samples(step, rank, generation, state, counters, gauges, distributions, last)
