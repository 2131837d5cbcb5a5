"""torch's functions that average parameters, on our rounds.

The caller's list is what is averaged; it is the same list on every rank, or all ranks get an error that
names the first difference. Nothing but the parameters' values changes: not their memory, not their layout.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.model_averaging.utils import get_params_to_average

from elastic_hieravg.compat.engine import engine_of
from elastic_hieravg.compat.torch_internals import is_outside
from elastic_hieravg.errors import ParametersError

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]


def average_parameters(params: Iterator[torch.nn.Parameter], process_group: ProcessGroup | None) -> None:
    """Average all the given parameters over the group; ranks outside it return at once."""
    parameters = list(params)
    _average(parameters, process_group, has_gradient=[True] * len(parameters))


def average_parameters_or_parameter_groups(
    params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]], process_group: ProcessGroup | None
) -> None:
    """Average the parameters of a model, or of an optimizer's parameter groups, that have a gradient.

    If ranks differ in which have one, or none has, all are averaged.
    """
    parameters = list(_flatten(params))
    _average(parameters, process_group, has_gradient=[tensor.grad is not None for tensor in parameters])


def _average(tensors: Sequence[Tensor], group: ProcessGroup | None, *, has_gradient: Sequence[bool]) -> None:
    if is_outside(group) or dist.get_world_size(group) == 1:
        return
    # Without a group there is the default one: asking for the size has made sure of it.
    used = group if group is not None else dist.group.WORLD
    assert used is not None
    try:
        engine_of(used).average(tensors, has_gradient=has_gradient)
    except ParametersError as exc:
        if not tensors:
            # What torch raises for an empty list.
            raise ValueError(str(exc)) from exc
        raise


def _flatten(params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]) -> Iterator[Tensor]:
    for param in params:
        if isinstance(param, torch.nn.Parameter):
            yield param
        elif isinstance(param, dict):
            yield from param["params"]
        else:
            raise NotImplementedError(f"Parameter input of type {type(param)} is not supported")
