"""Gradient averaging for DDP: over the world during warm-up, over the innermost group afterwards.

It goes by the averager's own step, so that the two can never drift apart. A backward pass never raises: after
a bucket that failed, the rest of that pass keeps this rank's own gradients, and that is counted. Invariant:
a bucket's gradients change only when their mean is whole.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket

from elastic_hieravg.averaging.groups import Group
from elastic_hieravg.errors import PeerLostError
from elastic_hieravg.plan import GroupKey, Plan, PlannedLevel


@dataclass(frozen=True, slots=True)
class Company:
    """Whom this rank averages gradients with. Company without a group: it could not be built."""

    num_ranks: int = 1
    group: Group | None = None


class GradientHook:
    """The state of the hook. `on_lost` is told a group that failed, and why, from whatever thread finds out."""

    def __init__(self, *, is_warmup: Callable[[], bool], on_lost: Callable[[Group, str], None]) -> None:
        self._world = self._innermost = Company()
        self._is_warmup = is_warmup
        self._on_lost = on_lost
        self._means: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        self._lost: Group | None = None
        self._is_local = False
        # Backward passes that used this rank's own gradients, in part at least, though it has company.
        self.num_local = 0

    def replace(self, world: Company, innermost: Company) -> None:
        """Use other groups from the next backward pass on."""
        self._world, self._innermost = world, innermost

    def reduce(self, gradients: Tensor, *, bucket_index: int = 0) -> torch.futures.Future[Tensor]:
        """The mean over the group of the step that is being computed; without one, what this rank has."""
        if bucket_index == 0:
            self._is_local = False
        company = self._world if self._is_warmup() else self._innermost
        group = company.group
        if company.num_ranks == 1:
            return _done(gradients)
        if group is None or group.is_over or self._is_local:
            self._stay_local()
            return _done(gradients)
        mean = self._room(gradients, bucket_index)
        # Divided first, as DDP does: the sum stays in range.
        torch.div(gradients, company.num_ranks, out=mean)

        def take(future: torch.futures.Future[Any]) -> Tensor:
            try:
                future.value()
            except RuntimeError as exc:
                self._lose(group, exc)
            else:
                gradients.copy_(mean)
            return gradients

        try:
            return group.all_reduce(mean).get_future().then(take)
        except PeerLostError as exc:
            self._lose(group, exc)
            return _done(gradients)

    def _lose(self, group: Group, error: Exception) -> None:
        self._stay_local()
        # Peers that wait in the same bucket are woken.
        group.cut()
        with self._lock:
            is_told, self._lost = group is self._lost, group
        if not is_told:
            self._on_lost(group, str(error).splitlines()[0])

    def _stay_local(self) -> None:
        with self._lock:
            if not self._is_local:
                self._is_local = True
                self.num_local += 1

    def _room(self, gradients: Tensor, bucket_index: int) -> Tensor:
        """Where a bucket's mean is made; kept, as new memory takes longer than the sum."""
        room = self._means.get(bucket_index)
        if room is None or (room.shape, room.dtype, room.device) != (
            gradients.shape,
            gradients.dtype,
            gradients.device,
        ):
            room = self._means[bucket_index] = torch.empty_like(gradients)
        return room


def average_gradients(hook: GradientHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The function that DDP calls, bucket by bucket, the first one first."""
    return hook.reduce(bucket.buffer(), bucket_index=bucket.index())


def gradient_levels(
    plan: Plan, wanted: Mapping[str, GroupKey], *, is_warmup: bool
) -> dict[GroupKey, PlannedLevel]:
    """The groups over which gradients are averaged, innermost first; the world's only for the warm-up."""
    levels = (plan.levels[:1] + plan.levels[-1:]) if is_warmup else plan.levels[:1]
    return {wanted[level.name]: level for level in levels if level.name in wanted}


def _done(gradients: Tensor) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done
