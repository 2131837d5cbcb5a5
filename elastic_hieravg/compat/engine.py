"""Rounds for the ranks of a torch process group.

The first call for a process group connects its ranks once more, for our own rounds; torch's group is used
for its store only. Each list of parameters that is averaged gets an averaging group of its own, kept for
the next call. It does not keep the parameters alive: when one is gone, or too many lists are known, the
group is closed. Invariant: ranks that fail together never use the process group's rounds again.
"""

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from elastic_hieravg.averaging.flat import FlatModel
from elastic_hieravg.averaging.mesh import Mesh, lost
from elastic_hieravg.averaging.rounds import AveragingGroup, Contribution
from elastic_hieravg.compat.nodes import find_peers, fresh_store, rank_names
from elastic_hieravg.compat.selection import Ballot, choose, group_in_common
from elastic_hieravg.compat.torch_internals import group_timeout_s
from elastic_hieravg.errors import ParametersError, Problem

# Each holds a few descriptors for every other rank. A list beyond that is connected anew at its next call.
LISTS_KEPT_MAX = 16
# A rank may be late by the process group's own timeout. Once all have met, what is left is the transfer.
ROUND_TIMEOUT_S = 300.0

_READY, _NOT_READY = b"\1", b"\0"
_ENGINES: "weakref.WeakKeyDictionary[ProcessGroup, GroupEngine]" = weakref.WeakKeyDictionary()

Key = tuple[int, ...]
Shape = tuple[torch.Size, torch.dtype, torch.device]


def engine_of(group: ProcessGroup) -> "GroupEngine":
    """The rounds of a process group. Collective over its ranks when it is asked first."""
    engine = _ENGINES.get(group)
    if engine is None:
        engine = _ENGINES[group] = GroupEngine(group)
        weakref.finalize(group, engine.close).atexit = False
    return engine


@dataclass(frozen=True, slots=True)
class _KnownList:
    """A list of parameters that was averaged before.

    `places` are those of the list that its averaging group holds: all that ever took part.
    """

    number: int
    references: tuple["weakref.ref[Tensor]", ...]
    shapes: tuple[Shape, ...]
    places: tuple[int, ...]
    group: AveragingGroup

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are its tensors still, and none was converted or moved to another device."""
        is_same = all(ref() is tensor for ref, tensor in zip(self.references, tensors, strict=True))
        return is_same and self.shapes == _shapes(tensors)


class GroupEngine:
    """One rank's part in the rounds of one process group. It does not keep the process group alive."""

    def __init__(self, group: ProcessGroup) -> None:
        self._timeout_s = group_timeout_s(group)
        self._index = group.rank()
        self._names = rank_names(dist.get_process_group_ranks(group))
        self._store: Store = fresh_store(group, "rounds")
        self._known: OrderedDict[Key, _KnownList] = OrderedDict()
        self._num_built = 0
        self._is_over = False
        self._peers = find_peers(self._store, names=self._names, index=self._index, timeout_s=self._timeout_s)
        self._mesh = Mesh(
            PrefixStore("ballots", self._store),
            index=self._index,
            peers=self._peers,
            timeout_s=self._timeout_s,
        )

    def average(self, tensors: Sequence[Tensor], *, has_gradient: Sequence[bool]) -> None:
        """Average the tensors that have a gradient on all ranks, or all of them; see `choose`. Collective.

        `ParametersError` if they cannot be averaged, `PeerLostError` if a rank is lost; no tensor changed.
        """
        if self._is_over:
            raise lost("this process group", "an averaging in it failed before")
        try:
            self._average(tensors, has_gradient)
        except ParametersError:
            # All ranks heard of it in the same place, and go on together.
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._is_over = True
        for key in list(self._known):
            self._forget(key)
        self._mesh.close()

    def _average(self, tensors: Sequence[Tensor], has_gradient: Sequence[bool]) -> None:
        key = tuple(map(id, tensors))
        known = self._known.get(key)
        if known is not None and not known.fits(tensors):
            self._forget(key)
            known = None
        ballot = Ballot.of(has_gradient, group_number=known.number if known else 0)
        records = self._mesh.gather(ballot.encode(), timeout_s=self._timeout_s)
        ballots = [Ballot.decode(record) for record in records]
        places = choose(has_gradient, ballots)
        held = known.places if known is not None and group_in_common(ballots) else ()
        if known is None or not set(places) <= set(held):
            self._forget(key)
            known = self._build(key, tensors, places=tuple(sorted({*places, *held})))
        self._known.move_to_end(key)
        at = {place: slot for slot, place in enumerate(known.places)}
        selected = None if places == known.places else [at[place] for place in places]
        known.group.run(Contribution(step=0, samples=(1.0,)), selected=selected)

    def _build(self, key: Key, tensors: Sequence[Tensor], *, places: tuple[int, ...]) -> _KnownList:
        self._num_built += 1
        forget = partial(_forget_in, weakref.ref(self), key, self._num_built)
        references = tuple(weakref.ref(tensor, forget) for tensor in tensors)
        flat = self._lay_out(references, places)
        known = _KnownList(
            number=self._num_built,
            references=references,
            shapes=_shapes(tensors),
            places=places,
            group=AveragingGroup(
                flat,
                PrefixStore(f"group-{self._num_built}", self._store),
                level="process group",
                index=self._index,
                peers=self._peers,
                timeout_s=min(ROUND_TIMEOUT_S, self._timeout_s),
            ),
        )
        self._known[key] = known
        while len(self._known) > LISTS_KEPT_MAX:
            self._forget(next(iter(self._known)))
        return known

    def _lay_out(self, references: Sequence["weakref.ref[Tensor]"], places: Sequence[int]) -> FlatModel:
        """The tensors in place for a round; an error on all ranks if it cannot be done on one."""

        def list_tensors() -> Sequence[Tensor]:
            # Whoever averages holds the tensors, so they are there.
            return [tensor for place in places if (tensor := references[place]()) is not None]

        try:
            flat = FlatModel([f"parameter {place}" for place in places], list_tensors)
        except ParametersError:
            self._mesh.gather(_NOT_READY, timeout_s=self._timeout_s)
            raise
        answers = self._mesh.gather(_READY, timeout_s=self._timeout_s)
        failed = [name for name, record in zip(self._names, answers, strict=True) if record[:1] != _READY]
        if failed:
            raise ParametersError(
                Problem(
                    f"the parameters of {', '.join(failed)} cannot be averaged, so nothing was averaged",
                    "read what these ranks printed",
                )
            )
        return flat

    def _forget(self, key: Key) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            known.group.close()

    def forget_if(self, key: Key, number: int) -> None:
        """Close the averaging group of that number, one of whose parameters is gone."""
        known = self._known.get(key)
        if known is not None and known.number == number:
            self._forget(key)


def _forget_in(engine: "weakref.ref[GroupEngine]", key: Key, number: int, _: object) -> None:
    found = engine()
    if found is not None:
        found.forget_if(key, number)


def _shapes(tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
