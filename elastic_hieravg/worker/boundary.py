"""The boundary between two steps: where the training thread waits for others, and what ends its waiting.

Invariant: a boundary that this rank has named to the others as the one where it enters is not left before all
have said theirs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_hieravg.membership.local import Stop
from elastic_hieravg.metrics.catalogue import Cause
from elastic_hieravg.metrics.tally import Tally
from elastic_hieravg.worker.generations import OPENING_TIMEOUT_S, Generations

# How long a rank whose round failed waits for the next generation before it goes on without the round.
RETRY_WAIT_S = 5.0
# How long the last round may take to come, from the end of a training loop on.
END_WAIT_S = 600.0
# How long a rank that is in doubt about the last round of all waits for the end of the job.
END_DOUBT_S = 60.0
# How long a rank waits for the others' openings at the step it named: until the way there has failed.
FENCE_WAIT_S = 1.1 * OPENING_TIMEOUT_S
POLL_S = 0.5


class Boundary:
    """`has_news`: there is something to look at. `is_waiting`: the training thread stands at a boundary where a
    generation may be entered. `is_fenced`: the node is out. `stopped`: the job is over. `is_busy`: it stands at
    a boundary, for whatever reason. `step` tells which boundary that is.
    """

    def __init__(self, tally: Tally, *, step: Callable[[], int]) -> None:
        self._tally = tally
        self._step = step
        self.has_news = False
        self.is_waiting = False
        self.is_fenced = False
        self.is_busy = False
        self.stopped: Stop | None = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """What is done here is no hang, however long it takes."""
        self.is_busy = True
        try:
            # What rounds and waits do not explain is what averaging costs beside.
            with self._tally.spending(Cause.AVERAGING):
                yield
        finally:
            self.is_busy = False

    def wait(
        self,
        generations: Generations,
        until: Callable[[], bool],
        *,
        timeout_s: float,
        can_enter: bool = False,
        cause: Cause = Cause.RECOVERY,
    ) -> bool:
        """Until something is as wanted, the job is over, this node is out, or time is up.

        `can_enter`: a generation may be entered here, and `until` does so. If that was said, everybody's word
        is waited for, even if something is as wanted before. A wait within another one leaves that to it.
        """
        deadline_s = time.monotonic() + timeout_s
        was_waiting, self.is_waiting = self.is_waiting, can_enter
        with self._tally.spending(cause):
            try:
                while True:
                    is_as_wanted = until()
                    if generations.error is not None and not is_as_wanted:
                        raise generations.error
                    with generations.changed:
                        is_said = generations.posted_step is not None or generations.entering is not None
                        is_bound = can_enter and not was_waiting and self._is_bound(generations)
                        left_s = deadline_s - time.monotonic()
                        if left_s <= 0 and can_enter and is_said:
                            left_s = deadline_s + FENCE_WAIT_S - time.monotonic()
                        is_over = self.stopped is not None or self.is_fenced or left_s <= 0
                        if is_over or (is_as_wanted and not is_bound):
                            # Under the lock: nobody names this boundary from here on.
                            self.is_waiting = was_waiting
                            # What was seen here is looked at again at the next boundary.
                            self.has_news = True
                            return is_as_wanted
                        if not self.has_news:
                            generations.changed.wait(min(left_s, POLL_S))
                        self.has_news = False
            finally:
                self.is_waiting = was_waiting

    def _is_bound(self, generations: Generations) -> bool:
        """Whether this boundary was named as the one to enter at, or all enter here."""
        posted, entering = generations.posted_step, generations.entering
        named = entering.entry.step if entering is not None else posted
        return named is not None and named <= self._step()
