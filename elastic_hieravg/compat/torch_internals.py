"""What compat needs of torch and torch does not publish. All of it is here, and nothing else is.

Checked against torch 2.13. A torch that moves one of these fails here, at import or at the first call.
"""

import warnings

from torch import device, distributed
from torch.distributed import ProcessGroup, Store
from torch.distributed.distributed_c10d import (
    _get_process_group_store,
    _rank_not_in_group,
)

with warnings.catch_warnings():
    # torch's package compiles things with its own deprecated functions when it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocalSGDOptimizer

__all__ = ["TorchPostLocalSGDOptimizer", "group_store", "group_timeout_s", "is_outside"]


def group_store(group: ProcessGroup) -> Store:
    """The store a process group was built on, under the group's own prefix."""
    return _get_process_group_store(group)


def is_outside(group: ProcessGroup | None) -> bool:
    """Whether this rank is no member: torch hands outsiders a number instead of a group."""
    return bool(_rank_not_in_group(group))


def group_timeout_s(group: ProcessGroup) -> float:
    """How long an operation of the group may take; torch's default if its backend does not say."""
    try:
        options = group._get_backend(device("cpu")).options  # noqa: SLF001
        return float(options._timeout.total_seconds())  # noqa: SLF001
    except (AttributeError, RuntimeError):
        # A backend without a CPU part, or one that keeps its options to itself.
        return float(distributed.distributed_c10d.default_pg_timeout.total_seconds())
