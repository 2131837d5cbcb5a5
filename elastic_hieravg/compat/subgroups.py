"""torch's `new_subgroups`, and one group for each node where torch can only raise."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from elastic_hieravg.compat.nodes import find_node_ids, fresh_store, rank_names
from elastic_hieravg.compat.torch_internals import group_timeout_s

Subgroups = tuple[ProcessGroup | None, list[ProcessGroup]]

# torch's functions have no types.
_by_size: Callable[..., Subgroups] = dist.new_subgroups
_by_enumeration: Callable[..., Subgroups] = dist.new_subgroups_by_enumeration


def new_subgroups(  # noqa: PLR0917 - torch's signature
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Subgroups:
    """This rank's subgroup, and all of them. Collective over all ranks, as torch's.

    Without a size and without CUDA: one subgroup for each node, whatever the nodes' sizes.
    """
    options = {"timeout": timeout, "backend": backend, "pg_options": pg_options, "group_desc": group_desc}
    if group_size is None and not torch.cuda.is_available():
        return _by_enumeration(_ranks_of_nodes(group), **options)
    return _by_size(group_size=group_size, group=group, **options)


def _ranks_of_nodes(group: ProcessGroup | None) -> list[list[int]]:
    """The ranks of each node, nodes in the order of their lowest rank in the group."""
    ranks = dist.get_process_group_ranks(group)
    used = group if group is not None else dist.group.WORLD
    assert used is not None
    node_ids = find_node_ids(
        fresh_store(used, "nodes"),
        names=rank_names(ranks),
        index=used.rank(),
        timeout_s=group_timeout_s(used),
    )
    by_node: dict[str, list[int]] = {}
    for rank, node_id in zip(ranks, node_ids, strict=True):
        by_node.setdefault(node_id, []).append(rank)
    return list(by_node.values())
