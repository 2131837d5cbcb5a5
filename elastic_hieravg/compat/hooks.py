"""torch's post-local SGD gradient hook, with a state that survives a restart.

The gradients travel as torch's do, over torch's process groups. What is ours: subgroups by node without
CUDA, a state that can be pickled, and a state that can go by an averager's step instead of its own count.
"""

import copy
from typing import Any, Self

import torch
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hooks
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from elastic_hieravg.compat.subgroups import new_subgroups
from elastic_hieravg.errors import Problem, UsageError

_GROUPS = ("process_group", "subgroup")
_VALUES = ("start_localSGD_iter", "post_local_gradient_allreduce", "iter")


class GroupDropped:
    """Stands where a process group was when the state was pickled."""

    def __repr__(self) -> str:
        return "<a process group, not pickled>"


class PostLocalSGDState(torch_hooks.PostLocalSGDState):
    """torch's state. Pickled, it keeps its count and drops its groups; set them again before the next step."""

    __slots__ = ("_averager", "_has_default_subgroup")

    def __init__(
        self,
        process_group: Any,
        subgroup: Any,
        start_localSGD_iter: int,  # noqa: N803 - torch's name
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        super().__init__(process_group, subgroup, start_localSGD_iter, post_local_gradient_allreduce)  # type: ignore[no-untyped-call]
        self._averager: ModelAverager | None = None
        self._has_default_subgroup = subgroup is None

    def follow(self, averager: ModelAverager) -> None:
        """Go by the averager's step from now on.

        torch counts gradient averagings here and calls there. The two drift apart when gradients are
        accumulated, and after a restart.
        """
        self._averager = averager
        self.iter = averager.step

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        if self._averager is None:
            super().maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]

    def prepare(self) -> None:
        """Before a bucket is averaged: the count, and the groups that it needs, are there."""
        if self._averager is not None:
            self.iter = self._averager.step
        is_local = self.iter >= self.start_localSGD_iter
        needed = "subgroup" if is_local else "process_group"
        if is_local and not self.post_local_gradient_allreduce:
            return
        if isinstance(getattr(self, needed), GroupDropped):
            raise UsageError(
                Problem(
                    f"the {needed} of this PostLocalSGDState was not pickled with it, and was not set again "
                    f"(iteration {self.iter}, local from {self.start_localSGD_iter})",
                    f"set state.{needed} to a process group of this job after loading",
                )
            )
        if is_local and self.subgroup is None:
            self._has_default_subgroup = True
            self.subgroup, _ = new_subgroups()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in _VALUES}
        for name in _GROUPS:
            is_default = name == "subgroup" and self._has_default_subgroup
            is_none = getattr(self, name) is None or is_default
            kept[name] = None if is_none else GroupDropped()
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in (*_VALUES, *_GROUPS):
            setattr(self, name, state[name])
        self._averager = None
        self._has_default_subgroup = self.subgroup is None

    def __copy__(self) -> Self:
        twin = self.__class__.__new__(self.__class__)
        for name in (*_VALUES, *_GROUPS, *PostLocalSGDState.__slots__):
            setattr(twin, name, getattr(self, name))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # In one process the groups are shared: they cannot be copied.
        twin = memo[id(self)] = copy.copy(self)
        return twin


def post_localSGD_hook(  # noqa: N802 - torch's name
    state: torch_hooks.PostLocalSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls for each bucket: the mean over all ranks at first, over the subgroup later, or none."""
    if isinstance(state, PostLocalSGDState):
        state.prepare()
    return torch_hooks.post_localSGD_hook(state, bucket)
