"""torch's model averagers, on our rounds.

Constructors, with their errors, warnings and process groups, are torch's own. When a level is due is
torch's rule too, and the two rules differ: `PeriodicModelAverager` counts its period from the end of the
warm-up, `HierarchicalModelAverager` from step 0.
"""

import copy
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torch_hierarchical

from elastic_hieravg.compat.parameters import average_parameters_or_parameter_groups

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


class ModelAverager(torch_averagers.ModelAverager):
    """The base of both. A copy counts its own steps over the same process groups."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        share_process_groups(self, memo)
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class PeriodicModelAverager(ModelAverager, torch_averagers.PeriodicModelAverager):
    """Averages at every `period`-th call, counted from the end of the warm-up."""

    def average_parameters(self, params: Parameters) -> None:
        """Count one step; average first if it is due. Collective over the process group when it is."""
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager, torch_hierarchical.HierarchicalModelAverager):
    """Averages over the group of the last period, in the order given, that divides the step."""

    def _find_process_group(self) -> ProcessGroup | None:
        for period in reversed(self._periods):
            # torch checks the first period only. A period of 0 is never due.
            if period and self.step % period == 0:
                group: ProcessGroup = self.period_process_group_dict[period]
                return group
        return None

    def average_parameters(self, params: Parameters) -> None:
        """Count one step; average first if a level is due. Collective over that level's group when one is."""
        if self.step >= self.warmup_steps:
            group = self._find_process_group()
            if group is not None:
                average_parameters_or_parameter_groups(params, group)
        self.step += 1


def share_process_groups(averager: torch_averagers.ModelAverager, memo: dict[int, Any]) -> None:
    """Let a deep copy of an averager, torch's or ours, use the same process groups: they cannot be copied."""
    for value in vars(averager).values():
        for found in value.values() if isinstance(value, dict) else (value,):
            if isinstance(found, ProcessGroup):
                memo[id(found)] = found
