"""What a job of one node keeps of itself: nobody else has its model when its workers start anew.

One worker of the node keeps a snapshot after global rounds, in memory that outlives it. With a second node the
others' models are worth more, and nothing is kept. Invariant: training never fails or waits for long because of
it.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_hieravg.errors import HierAvgError
from elastic_hieravg.plan import Plan
from elastic_hieravg.worker.snapshots import Kept, Moment, SnapshotFile, read_snapshots

# So much of the time may go into keeping: after a slow one there is a pause.
TIME_SHARE_MAX = 0.1

_log = logging.getLogger(__name__)


class Keeper:
    """`period_steps`: how often a rank that is alone keeps; it has no rounds to go by. `next_step`: when it is
    to keep the next time.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[Tensor],
        optimizer: Optimizer | None,
        *,
        path: Path,
        period_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept = Kept(model, optimizer)
        self._path = path
        self._file = SnapshotFile(path)
        self._clock = clock
        self._again_s = clock()
        self._has_warned = self._has_given_up = False
        self.period_steps = period_steps
        self.next_step: float = math.inf

    def restore(self, *, after_step: int = 0) -> int | None:
        """Have the newest snapshot of this model, if there is one; the step it was taken after.

        One that is not newer than `after_step` is left.
        """
        fitting = [each for each in read_snapshots(self._path) if each.state.signature == self._kept.signature]
        newer = [each for each in fitting if each.state.moment.step > after_step]
        found = next((each for each in newer if each.is_whole()), None)
        if found is None:
            return None
        try:
            self._kept.restore(found)
        except (HierAvgError, RuntimeError, ValueError, KeyError, TypeError) as exc:
            _log.warning("the snapshot of step %s cannot be taken: %s", found.state.moment.step, exc)
            return None
        _log.info("found the snapshot of step %s; it counts if nobody has the model", found.state.moment.step)
        return found.state.moment.step

    def keep_if_only(self, plan: Plan, *, step: int, generation: int) -> None:
        """Keep a snapshot while no other node has the model."""
        self.next_step = math.inf
        if len(plan.topology.nodes) == 1:
            self.keep(step=step, generation=generation)
            self.next_step = math.inf if plan.levels else step + self.period_steps

    def keep(self, *, step: int, generation: int) -> None:
        began_s = self._clock()
        if began_s < self._again_s or self._has_given_up:
            return
        try:
            self._file.write(*self._kept.state(Moment(step, generation, "")))
        except OSError as exc:
            self._warn(
                f"no snapshot of step {step} can be kept in /dev/shm: {exc}. If this node's workers start anew "
                "while it is alone, they begin again. Give /dev/shm twice the size of model and optimizer"
            )
        except (HierAvgError, RuntimeError) as exc:
            # It will not be another time either.
            self._has_given_up = True
            self._warn(f"no snapshots are kept of this model: {exc}")
        else:
            if self._kept.left_out:
                self._warn(f"snapshots are kept without the optimizer's state: {self._kept.left_out}")
        now_s = self._clock()
        self._again_s = now_s + (now_s - began_s) * (1 / TIME_SHARE_MAX - 1)

    def close(self) -> None:
        self._file.close()

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s", text)
