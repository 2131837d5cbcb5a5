"""torch's PostLocalSGDOptimizer: an optimizer that averages after its step.

It holds nothing of its own but its hooks. Groups of parameters, state and defaults are the inner
optimizer's, read there every time. Invariant: a change through either of the two is seen through both.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from elastic_hieravg.compat.averagers import share_process_groups
from elastic_hieravg.compat.torch_internals import TorchPostLocalSGDOptimizer


class PostLocalSGDOptimizer(TorchPostLocalSGDOptimizer):
    """Wraps any optimizer; takes torch's averagers too."""

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        # Optimizer.__init__ would add the parameters a second time. This is what it does for an optimizer
        # that is loaded: hooks, and the step function that runs them.
        self.__setstate__({"optim": optim, "averager": averager})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the inner optimizer, then the averager's; what the inner step returned."""
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(params=self.param_groups)  # type: ignore[no-untyped-call]
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the averager's step under "step"."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self.optim.state_dict()
        state["step"] = self.averager.step
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Without a "step" the averager starts at 0, with a warning."""
        state = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else changed
        self.optim.load_state_dict(state)
        if "step" not in state:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state.get("step", 0)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, "averager": self.averager}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        share_process_groups(self.averager, memo)
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin
