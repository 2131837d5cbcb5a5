"""Which ranks of a torch process group share a node, and how to reach the others.

torch does not know. Every rank writes what it knows of itself under the group's store, and reads the rest.
Invariant: ranks count as one node only if they can reach each other's sockets and memory.
"""

import ipaddress
import socket
import time
from pathlib import Path

from torch.distributed import PrefixStore, ProcessGroup, Store

from elastic_hieravg.averaging.mesh import Peer, read_key
from elastic_hieravg.compat.torch_internals import group_store
from elastic_hieravg.errors import AveragingError, Problem

LOOPBACK = "127.0.0.1"


def node_identity() -> str:
    """The running kernel and the network namespace: sockets without a file name are reached inside both."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return f"{boot_id}-{namespace}"


def own_address() -> str:
    """What this host's name resolves to."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as exc:
        raise AveragingError(
            Problem(
                f"this host's name, {socket.gethostname()}, cannot be resolved: {exc}",
                "give the host a name that the other hosts of the group resolve too",
            )
        ) from exc


def fresh_store(group: ProcessGroup, purpose: str) -> Store:
    """Keys of the group's store that nobody used before. Collective: every rank of the group asks once.

    Counted in the store itself, so that a group made anew over an old store does not meet its old keys.
    """
    store = PrefixStore(f"hieravg/{purpose}", group_store(group))
    num_arrived = store.add("arrived", 1)
    return PrefixStore(str((num_arrived - 1) // group.size()), store)


def find_node_ids(store: Store, *, names: list[str], index: int, timeout_s: float) -> list[str]:
    """Every rank's node. Collective over the ranks named; `index` is this rank's place among them."""
    return _exchange(store, "node", node_identity(), names=names, index=index, timeout_s=timeout_s)


def find_peers(store: Store, *, names: list[str], index: int, timeout_s: float) -> tuple[Peer, ...]:
    """Every rank with its node and its address. Collective, as `find_node_ids`."""
    node_ids = find_node_ids(store, names=names, index=index, timeout_s=timeout_s)
    if len(set(node_ids)) == 1:
        return tuple(Peer(name, node_ids[0], LOOPBACK) for name in names)
    found = _exchange(store, "address", own_address(), names=names, index=index, timeout_s=timeout_s)
    for name, address in zip(names, found, strict=True):
        if ipaddress.ip_address(address).is_loopback:
            raise AveragingError(
                Problem(
                    f"{name} gives its address as {address}, where ranks of other nodes cannot reach it",
                    "make each host's name resolve to an address that the other hosts reach, "
                    "in /etc/hosts for example",
                )
            )
    return tuple(map(Peer, names, node_ids, found))


def _exchange(
    store: Store, key: str, mine: str, *, names: list[str], index: int, timeout_s: float
) -> list[str]:
    deadline_s = time.monotonic() + timeout_s
    store.set(f"{key}/{index}", mine)
    return [
        read_key(store, f"{key}/{other}", of=name, deadline_s=deadline_s).decode()
        for other, name in enumerate(names)
    ]


def rank_names(ranks: list[int]) -> list[str]:
    return [f"rank {rank}" for rank in ranks]
