"""Three ways to combine a group's copies, behind one small seam.

- `NodeReducer`: all ranks are on one node, on the CPU: through shared memory.
- `ExchangeReducer`: over a process group, one copy per rank on the wire.
- `NodesReducer`: several nodes with several ranks each: inside each node through shared memory, between
  nodes with one copy per node on the wire, split over the node's ranks.

A reducer leaves the result beside the parameters; `rounds` decides whether it counts.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from elastic_hieravg.averaging.exchange import Exchange
from elastic_hieravg.averaging.flat import FlatModel, Kind
from elastic_hieravg.averaging.groups import Group
from elastic_hieravg.averaging.kernels import Divergence, divergence, share_out
from elastic_hieravg.averaging.mesh import Mesh, Peer, lost
from elastic_hieravg.averaging.shared import NodeMemory

_OK = b"ok"


class Reducer(Protocol):
    """`results` hold what `reduce` made, one for each bank of the model. `link` says how it travels."""

    results: list[Tensor]
    link: str

    def reduce(self, shares: Sequence[float]) -> bool:
        """Combine the copies; no parameter changes. False if something this rank combined is not finite."""

    def divergence(self, shares: Sequence[float]) -> Divergence:
        """This rank's part of how far the copies were from the result. Added up over ranks it is whole."""

    def decide(self, round_index: int, *, commit: bool) -> bool:
        """Whether the result counts, as far as this rank can tell: as wished, or as its node decided."""

    def sent_bytes(self) -> int:
        """What this rank sends over the network in one `reduce`."""

    def cut(self) -> None:
        """End every wait. Any thread may call it."""

    def close(self) -> None: ...


class NodeReducer:
    link = "shm"

    def __init__(self, flat: FlatModel, mesh: Mesh, *, timeout_s: float) -> None:
        self._memory = NodeMemory(flat, mesh, timeout_s=timeout_s)
        self.results = self._memory.results

    def reduce(self, shares: Sequence[float]) -> bool:
        return self._memory.combine(shares)

    def divergence(self, shares: Sequence[float]) -> Divergence:
        # The others' parts of the result may not be there yet.
        return self._memory.divergence(shares)

    def decide(self, round_index: int, *, commit: bool) -> bool:
        return self._memory.decide(round_index, commit=commit)

    def sent_bytes(self) -> int:
        return 0

    def cut(self) -> None:
        """The mesh of the group is all there is to wait for."""

    def close(self) -> None:
        self.results = []
        self._memory.close()


class ExchangeReducer:
    link = "network"

    def __init__(self, flat: FlatModel, group: Group) -> None:
        self._flat = flat
        self._group = group
        self.results: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._exchanges: list[Exchange] = []
        for bank in flat.banks:
            num_values = bank.values.numel()
            (_, length), *_ = share_out(num_values, len(group.peers))
            # Rounded up to whole parts, so that a part's contributions find room where its result will be.
            stage = torch.empty(length * len(group.peers), dtype=bank.values.dtype)
            out, landing = stage[:num_values], stage.view(len(group.peers), length).unbind()
            self.results.append(out)
            # The process group moves memory of the CPU; values of another device go through a copy there.
            on_cpu = bank.values.device.type == "cpu"
            source = bank.values if on_cpu else torch.empty_like(bank.values, device="cpu")
            self._sources.append(source)
            self._exchanges.append(Exchange(group, source=source, out=out, landing=landing, kind=bank.kind))

    def reduce(self, shares: Sequence[float]) -> bool:
        for bank, source in zip(self._flat.banks, self._sources, strict=True):
            if source is not bank.values:
                source.copy_(bank.values)
        is_finite = True
        for exchange in self._exchanges:
            is_finite &= exchange.run(shares)
        return is_finite

    def divergence(self, shares: Sequence[float]) -> Divergence:
        return _own_divergence(self._flat, self.results, shares[self._group.index])

    def decide(self, round_index: int, *, commit: bool) -> bool:
        return commit

    def sent_bytes(self) -> int:
        num_ranks = len(self._group.peers)
        copy_bytes = sum(result.numel() * result.element_size() for result in self.results)
        return 2 * copy_bytes * (num_ranks - 1) // num_ranks

    def cut(self) -> None:
        self._group.cut()

    def close(self) -> None:
        self.results, self._exchanges = [], []
        self._group.close()


class NodesReducer:
    """`members` are this node's places in the group, in order; the first of them carry a slice each."""

    link = "network"

    def __init__(
        self,
        flat: FlatModel,
        node: Mesh,
        carriers: Group | None,
        *,
        members: Sequence[int],
        num_slices: int,
        timeout_s: float,
    ) -> None:
        self._flat = flat
        self._node = node
        self._carriers = carriers
        self._members = members
        self._timeout_s = timeout_s
        self._memory = NodeMemory(flat, node, timeout_s=timeout_s)
        self.results = self._memory.results
        self._exchanges: list[Exchange] = []
        self._carried_bytes = 0
        if carriers is not None:
            for bank, result in zip(flat.banks, self.results, strict=True):
                start, end = share_out(result.numel(), num_slices)[node.index]
                carried = result[start:end]
                (_, length), *_ = share_out(end - start, len(carriers.peers))
                landing = [torch.empty(length, dtype=result.dtype) for _ in carriers.peers]
                self._exchanges.append(
                    Exchange(carriers, source=carried, out=carried, landing=landing, kind=bank.kind)
                )
                self._carried_bytes += carried.numel() * carried.element_size()

    def reduce(self, shares: Sequence[float]) -> bool:
        is_finite = self._memory.combine([shares[member] for member in self._members])
        self._meet()
        if self._carriers is not None:
            # What arrives is already weighted, so every node counts 1.
            whole = [1.0] * len(self._carriers.peers)
            for exchange in self._exchanges:
                is_finite &= exchange.run(whole)
        self._meet()
        return is_finite

    def divergence(self, shares: Sequence[float]) -> Divergence:
        return _own_divergence(self._flat, self.results, shares[self._members[self._node.index]])

    def decide(self, round_index: int, *, commit: bool) -> bool:
        return self._memory.decide(round_index, commit=commit)

    def sent_bytes(self) -> int:
        if self._carriers is None:
            return 0
        num_nodes = len(self._carriers.peers)
        return 2 * self._carried_bytes * (num_nodes - 1) // num_nodes

    def cut(self) -> None:
        self._node.cut()
        if self._carriers is not None:
            self._carriers.cut()

    def close(self) -> None:
        self.results, self._exchanges = [], []
        if self._carriers is not None:
            # Before the memory that it sends from and receives into.
            self._carriers.close()
        self._memory.close()
        self._node.close()

    def _meet(self) -> None:
        for member, record in enumerate(self._node.gather(_OK, timeout_s=self._timeout_s)):
            if not record.startswith(_OK):
                raise lost(self._node.peers[member].name, "it sent something else than it should")


def _own_divergence(flat: FlatModel, results: Sequence[Tensor], share: float) -> Divergence:
    """How far this rank's copy was from a result that is whole."""
    found = Divergence()
    for bank, result in zip(flat.banks, results, strict=True):
        if bank.kind is Kind.MEAN:
            found = found.plus(divergence([bank.values], [share], result))
    return found


def build_reducer(
    flat: FlatModel, mesh: Mesh, store: Store, *, shared: bool, timeout_s: float, meet_s: float
) -> Reducer:
    """The reducer for this group. `shared`: every rank of the group can share its node's memory.

    `meet_s`: how long the ranks of a node may take to connect; `timeout_s`: for everything after that.
    """
    me = mesh.peers[mesh.index]
    nodes = list(dict.fromkeys(peer.node_id for peer in mesh.peers))
    members = [index for index, peer in enumerate(mesh.peers) if peer.node_id == me.node_id]
    if len(nodes) == 1 and shared:
        return NodeReducer(flat, mesh, timeout_s=timeout_s)
    if len(nodes) == len(mesh.peers) or not shared:
        everybody = range(len(mesh.peers))
        group = _build_group("exchange", store, mesh, everybody, timeout_s=timeout_s, meet_s=meet_s)
        return ExchangeReducer(flat, group)
    places = {node: [i for i, peer in enumerate(mesh.peers) if peer.node_id == node] for node in nodes}
    num_slices = min(map(len, places.values()))
    local_index = members.index(mesh.index)
    node = Mesh(
        PrefixStore(f"node/{me.node_id}", store),
        index=local_index,
        peers=tuple(mesh.peers[member] for member in members),
        timeout_s=meet_s,
    )
    carriers = None
    if local_index < num_slices:
        carrying = [places[node][local_index] for node in nodes]
        try:
            carriers = _build_group(
                f"slice/{local_index}", store, mesh, carrying, timeout_s=timeout_s, meet_s=meet_s
            )
        except BaseException:
            node.close()
            raise
    return NodesReducer(flat, node, carriers, members=members, num_slices=num_slices, timeout_s=timeout_s)


def _build_group(
    prefix: str, store: Store, mesh: Mesh, members: Sequence[int], *, timeout_s: float, meet_s: float
) -> Group:
    peers: tuple[Peer, ...] = tuple(mesh.peers[member] for member in members)
    index = list(members).index(mesh.index)
    return Group(
        PrefixStore(prefix, store),
        index=index,
        peers=peers,
        timeout_s=timeout_s,
        build_timeout_s=meet_s,
        # The mesh is connected already, and knows of a death at once.
        is_over=mesh.has_hung_up,
    )
