"""Gradient averaging for DDP: over the world during warm-up, over the innermost group afterwards.

It goes by the averager's own step, so that the two can never drift apart.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket

from elastic_hieravg.averaging.groups import Group


class GradientHook:
    """The state of the hook. A group is None for a rank that is alone in it."""

    def __init__(self, world: Group | None, innermost: Group | None, *, is_warmup: Callable[[], bool]) -> None:
        self._world = world
        self._innermost = innermost
        self._is_warmup = is_warmup

    def replace(self, world: Group | None, innermost: Group | None) -> None:
        """Use other groups from the next backward pass on."""
        self.close()
        self._world, self._innermost = world, innermost

    def reduce(self, gradients: Tensor) -> torch.futures.Future[Tensor]:
        """The mean of gradients over the group of the step that is being computed."""
        group = self._world if self._is_warmup() else self._innermost
        if group is None:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(gradients)
            return done

        def take(future: torch.futures.Future[Any]) -> Tensor:
            value: Tensor = future.value()[0]
            return value

        # Divided first, as DDP does: the sum stays in range.
        return group.all_reduce(gradients.div_(len(group.peers))).get_future().then(take)

    def close(self) -> None:
        for group in {self._world, self._innermost} - {None}:
            assert group is not None
            group.close()


def average_gradients(hook: GradientHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The function that DDP calls."""
    return hook.reduce(bucket.buffer())
