"""Gradient averaging in an elastic job: a lost peer costs its gradients, never the backward pass."""

import logging
from collections.abc import Callable

from torch import nn

from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.membership.local import Broken, FromWorker
from elastic_hieravg.plan import GroupKey
from elastic_hieravg.worker.generations import Generations

_log = logging.getLogger(__name__)


class HookedGradients:
    """`on_lost` is called, from any thread, when replicas may differ because gradients stayed local."""

    def __init__(
        self,
        engine: HierarchicalAverager,
        generations: Generations,
        *,
        tell: Callable[[FromWorker], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._generations = generations
        self._tell = tell
        self._on_lost = on_lost

    def register(self, ddp_model: nn.parallel.DistributedDataParallel) -> None:
        """Put the hook on a model. What groups for gradients cannot be built come with the next generation."""
        self._engine.hook(ddp_model, on_lost=self._lose)
        self._engine.use_gradients(self._generations.build_gradients())

    def end(self) -> None:
        """There are none of this rank any more: nobody is to wait for them."""
        engine = self._engine
        engine.cut_gradients()
        if engine.is_hooked and engine.is_warmup and engine.plan.levels:
            # No round is due for long, as gradients kept the ranks together: the next generation brings one.
            self._on_lost()
            key = engine.key_of(engine.plan.levels[-1])
            if key is not None:
                engine.cut([key])
                self._tell(Broken(key.name))

    def _lose(self, key: GroupKey, why: str) -> None:
        """A part of the gradients failed."""
        _log.warning(
            "gradients of step %s are not averaged with other ranks: %s", self._engine.step_count + 1, why
        )
        self._tell(Broken(key.name))
        self._on_lost()
