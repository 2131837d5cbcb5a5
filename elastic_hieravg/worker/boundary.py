"""The boundary between two steps: where the training thread waits for others, and what ends its waiting."""

import time
from collections.abc import Callable

from elastic_hieravg.membership.local import Stop
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
    generation may be entered. `is_fenced`: the node is out. `stopped`: the job is over.
    """

    def __init__(self) -> None:
        self.has_news = False
        self.is_waiting = False
        self.is_fenced = False
        self.stopped: Stop | None = None

    def wait(
        self, until: Callable[[], bool], generations: Generations, *, timeout_s: float, can_enter: bool
    ) -> bool:
        """Until something is as wanted, the job is over, this node is out, or time is up.

        `can_enter`: a generation may be entered here. If that was said, everybody's word is waited for.
        """
        deadline_s = time.monotonic() + timeout_s
        was_waiting, self.is_waiting = self.is_waiting, can_enter
        try:
            while not until():
                if generations.error is not None:
                    raise generations.error
                with generations.changed:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0 and can_enter and generations.posted_step is not None:
                        left_s = deadline_s + FENCE_WAIT_S - time.monotonic()
                    if self.stopped is not None or self.is_fenced or left_s <= 0:
                        self.is_waiting = was_waiting
                        return False
                    if not self.has_news:
                        generations.changed.wait(min(left_s, POLL_S))
                    self.has_news = False
            return True
        finally:
            self.is_waiting = was_waiting
