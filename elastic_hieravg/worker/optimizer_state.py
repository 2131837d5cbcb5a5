"""An optimizer's state, on its way to the ranks that join a running job.

Ranks that hold the model copy their state at a step boundary (`copy_state`); their background threads and those
of the newcomers average the copies (`bring_state`); a newcomer takes the result when it enters (`take_state`).
Moments are averaged, step counters take the maximum, and numbers of parameter groups come from the lowest
holder. What is told through the store is JSON. Invariant: no rank but a newcomer changes its optimizer.
"""

import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_hieravg.averaging.flat import WIDE_TYPES, FlatModel, is_sharded, local_tensor
from elastic_hieravg.averaging.rounds import AveragingGroup, Contribution
from elastic_hieravg.errors import DifferentTensorsError, DocumentError, ParametersError, Problem
from elastic_hieravg.events import Outcome
from elastic_hieravg.rendezvous.group_store import GroupStore

# How long the holders may take to tell what state they have: they do so at their next step boundary.
TELL_TIMEOUT_S = 600.0
COUNTER_NAME = "step"
# A counter travels as a whole number: of these the maximum is taken, not the mean.
_COUNTER_TYPE = torch.int64
_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WIDE_TYPES}
_PLAIN = (bool, int, float, str, type(None))

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of a parameter's state, so that somebody who has none can make it.

    `dtype` is empty for what is no tensor: then a counter is a Python number, and anything else is `value`.
    `shape` is None for a tensor of the parameter's own shape. `is_near`: it lies where the parameter lies.
    """

    name: str
    is_counter: bool = False
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    is_near: bool = True
    value: Any = None

    @property
    def is_plain(self) -> bool:
        return not self.dtype and not self.is_counter

    def empty(self, parameter: Tensor) -> Tensor:
        """Room for what travels."""
        shape = local_tensor(parameter).shape if self.shape is None else self.shape
        dtype = _COUNTER_TYPE if self.is_counter else _TYPES[self.dtype]
        return torch.zeros(shape, dtype=dtype, device=parameter.device if self.is_near else "cpu")


Place = tuple[int, str]
"""A parameter's position in the optimizer, and the name of an entry of its state."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A holder's state at a step boundary: each parameter's pieces, and copies of those that travel."""

    step: int
    pieces: tuple[tuple[Piece, ...], ...]
    tensors: Mapping[Place, Tensor]
    groups: str

    def forms(self) -> str:
        """The pieces as JSON. Most parameters have the same ones, which are told once."""
        known = {form: index for index, form in enumerate(dict.fromkeys(self.pieces))}
        forms = [[asdict(piece) for piece in form] for form in known]
        return json.dumps({"forms": forms, "of": [known[form] for form in self.pieces]})


@dataclass(frozen=True, slots=True)
class StateTaken:
    """What a newcomer got: whole if `problem` is empty. `step` is the one its counters stand at."""

    step: int = 0
    pieces: tuple[tuple[Piece, ...], ...] = ()
    tensors: Mapping[Place, Tensor] = field(default_factory=dict)
    groups: str = "[]"
    problem: str = ""


# --- in the training threads ----------------------------------------------------------------------------------


def copy_state(optimizer: Optimizer | None, *, step: int) -> StateCopy:
    """A copy of the state, at a boundary of the training loop."""
    if optimizer is None:
        return StateCopy(step, (), {}, "[]")
    pieces: list[tuple[Piece, ...]] = []
    tensors: dict[Place, Tensor] = {}
    for index, parameter in enumerate(parameters_of(optimizer)):
        state = optimizer.state.get(parameter, {})
        found = [_describe(name, value, parameter) for name, value in state.items()]
        whole = [piece for piece in found if piece is not None]
        if len(whole) < len(found):
            _log.warning(
                "%s has state that cannot be sent to other ranks: workers that join begin without it",
                type(optimizer).__name__,
            )
            whole = []
        pieces.append(tuple(sorted(whole, key=lambda piece: piece.name)))
        for piece in whole:
            if not piece.is_plain:
                tensors[index, piece.name] = _copy(state[piece.name], piece)
    return StateCopy(step, tuple(pieces), tensors, json.dumps(_numbers(optimizer)))


def take_state(optimizer: Optimizer | None, taken: StateTaken, *, step: int) -> None:
    """Have what was brought, as it is at this step. The optimizer need not have made a step before."""
    if optimizer is None:
        return
    groups, problem = json.loads(taken.groups), taken.problem
    if groups and len(groups) != len(optimizer.param_groups):
        num_groups = len(optimizer.param_groups)
        problem = f"the optimizer has {num_groups} parameter groups here and {len(groups)} on other ranks"
    if problem:
        raise ParametersError(
            Problem(problem, "make the same optimizer over the same parameters on every rank")
        )
    # Steps that the others made since the copies.
    behind = max(0, step - taken.step)
    for index, parameter in enumerate(parameters_of(optimizer)):
        before = optimizer.state.pop(parameter, {})
        pieces = taken.pieces[index] if taken.pieces else ()
        # Half a state is worse than none.
        if pieces and all(piece.is_plain or (index, piece.name) in taken.tensors for piece in pieces):
            optimizer.state[parameter] = {
                piece.name: _make(piece, taken.tensors.get((index, piece.name)), parameter, before, behind)
                for piece in pieces
            }
    for group, numbers in zip(optimizer.param_groups, groups, strict=False):
        for name, value in numbers.items():
            group[name] = _like(group.get(name), value)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# --- in the background ----------------------------------------------------------------------------------------


class BuildGroup(Protocol):
    """Builds the group of all ranks that average these tensors; any thread may call it."""

    def __call__(self, flat: FlatModel) -> AveragingGroup: ...


def bring_state(
    copied: StateCopy | None,
    *,
    store: GroupStore,
    rank: int,
    sources: Sequence[int],
    partners: Sequence[int],
    parameters: Sequence[Tensor],
    build: BuildGroup,
    on_built: Callable[[AveragingGroup], None],
) -> StateTaken | None:
    """Average the sources' state, for whoever brings no copy: for them the result, None for the sources.

    `partners` are the ranks that average together, in order; all of them call this. `on_built` is told the
    group, so that it can be cut. `PeerLostError` or `RuntimeError` if somebody is lost on the way.
    """
    if copied is not None:
        forms = copied.forms()
        digest = hashlib.sha256(forms.encode()).hexdigest()
        # The same text from everybody, or another key.
        store.set(f"state/forms/{digest}", forms)
        if rank == sources[0]:
            store.set("state/groups", copied.groups)
        store.set(f"state/{rank}", f"{copied.step} {digest}")
    told = _read_sources(store, [source for source in sources if source in partners])
    step = max((at for at, _ in told.values()), default=0)
    union = _union([pieces for _, pieces in told.values()])
    tensors, problem = _lay_out(copied, union, parameters, catch_up=step - copied.step if copied else 0)
    if tensors:
        shares = _average(tensors, is_source=copied is not None, build=build, on_built=on_built)
        if copied is None and shares is None and not problem:
            _log.warning("the others' optimizer state could not be averaged: this rank begins without any")
            tensors = {}
        elif shares is not None:
            share_of = dict(zip(partners, shares, strict=True))
            tensors = _weigh(tensors, told, share_of) if copied is None else {}
    if copied is not None:
        return None
    return StateTaken(step, union, tensors, store.get("state/groups").decode(), problem)


def _read_sources(
    store: GroupStore, sources: Sequence[int]
) -> dict[int, tuple[int, tuple[tuple[Piece, ...], ...]]]:
    """Of each source the step of its copy, and each parameter's pieces."""
    texts = store.await_all([f"state/{source}" for source in sources], timeout_s=TELL_TIMEOUT_S)
    words = [text.decode().split() for text in texts]
    digests = list(dict.fromkeys(digest for _, digest in words))
    forms = store.await_all([f"state/forms/{digest}" for digest in digests], timeout_s=TELL_TIMEOUT_S)
    pieces = {digest: _read_forms(text) for digest, text in zip(digests, forms, strict=True)}
    return {source: (int(at), pieces[digest]) for source, (at, digest) in zip(sources, words, strict=True)}


def _read_forms(text: bytes) -> tuple[tuple[Piece, ...], ...]:
    try:
        document = json.loads(text)
        forms = [
            tuple(
                Piece(**{**piece, "shape": None if piece["shape"] is None else tuple(piece["shape"])})
                for piece in form
            )
            for form in document["forms"]
        ]
        return tuple(forms[index] for index in document["of"])
    except (ValueError, TypeError, KeyError, IndexError) as exc:
        problem = Problem(
            f"what a rank told of its optimizer cannot be read: {exc}",
            "run the same version of elastic_hieravg on every node",
        )
        raise DocumentError(problem) from exc


def _union(told: Sequence[tuple[tuple[Piece, ...], ...]]) -> tuple[tuple[Piece, ...], ...]:
    """What anybody has. A parameter may have state on some ranks only: on others it had no gradient yet."""
    found: defaultdict[int, dict[str, Piece]] = defaultdict(dict)
    for pieces in told:
        for index, parameter in enumerate(pieces):
            for piece in parameter:
                found[index].setdefault(piece.name, piece)
    length = max((len(pieces) for pieces in told), default=0)
    return tuple(tuple(found[index][name] for name in sorted(found[index])) for index in range(length))


def _lay_out(
    copied: StateCopy | None,
    union: tuple[tuple[Piece, ...], ...],
    parameters: Sequence[Tensor],
    *,
    catch_up: int,
) -> tuple[dict[Place, Tensor], str]:
    """What this rank brings to the round, and what is wrong with it if anything is."""
    places = {
        (index, piece.name): piece
        for index, pieces in enumerate(union)
        for piece in pieces
        if not piece.is_plain
    }
    if union and len(union) != len(parameters):
        # Something that nobody else has: then everybody sees the difference, and nobody waits.
        problem = f"the optimizer has {len(parameters)} parameters here and {len(union)} on other ranks"
        return ({(-1, problem): torch.zeros(1)} if places else {}), problem
    tensors = {place: piece.empty(parameters[place[0]]) for place, piece in places.items()}
    if copied is not None:
        for place, tensor in copied.tensors.items():
            tensors[place] = tensor + catch_up if places[place].is_counter else tensor
    return tensors, ""


def _average(
    tensors: dict[Place, Tensor],
    *,
    is_source: bool,
    build: BuildGroup,
    on_built: Callable[[AveragingGroup], None],
) -> tuple[float, ...] | None:
    """One round over the tensors: how much each rank counted in it, None if there is no result."""
    names = [f"{index}.{name}" for index, name in tensors]
    group = build(FlatModel(names, lambda: list(tensors.values())))
    try:
        on_built(group)
        contribution = Contribution(0, (1.0 if is_source else 0.0,), holds_model=is_source)
        done, agreement = group.run(contribution, selected=() if is_source else None)
    except DifferentTensorsError as exc:
        # Everybody sees it. The job can go on without the newcomers' having any state.
        _log.warning("%s", exc)
        return None
    finally:
        group.close()
    return agreement.shares if done.outcome is Outcome.COMMITTED else None


def _weigh(
    tensors: Mapping[Place, Tensor],
    told: Mapping[int, tuple[int, tuple[tuple[Piece, ...], ...]]],
    share_of: Mapping[int, float],
) -> dict[Place, Tensor]:
    """The mean over those that have a tensor, out of the mean over all sources."""
    having: defaultdict[Place, list[int]] = defaultdict(list)
    for source, (_, pieces) in told.items():
        for index, parameter in enumerate(pieces):
            for piece in parameter:
                having[index, piece.name].append(source)
    weighed = {}
    for place, tensor in tensors.items():
        share = sum(share_of[source] for source in having[place])
        is_mean = tensor.is_floating_point() or tensor.is_complex()
        if share:
            weighed[place] = tensor.div_(share) if is_mean and len(having[place]) < len(told) else tensor
    return weighed


# --- one entry ------------------------------------------------------------------------------------------------


def _describe(name: object, value: object, parameter: Tensor) -> Piece | None:
    """None if it cannot travel."""
    if not isinstance(name, str):
        return None
    is_counter = name == COUNTER_NAME
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_sparse or value.dtype not in WIDE_TYPES:
            return None
        local = local_tensor(value)
        has_same_shape = local.shape == local_tensor(parameter).shape and not is_counter
        return Piece(
            name,
            is_counter=is_counter and local.numel() == 1,
            dtype=dtype,
            shape=None if has_same_shape else tuple(local.shape),
            is_near=local.device == parameter.device,
        )
    if isinstance(value, (int, float)) and is_counter and math.isfinite(value):
        return Piece(name, is_counter=True, shape=(), is_near=False)
    return Piece(name, value=value) if isinstance(value, _PLAIN) else None


def _copy(value: Any, piece: Piece) -> Tensor:
    if not piece.dtype:
        return torch.tensor(int(value), dtype=_COUNTER_TYPE)
    # In plain order: strides need not be the same on every rank.
    copied = local_tensor(value).clone(memory_format=torch.contiguous_format)
    return copied.to(_COUNTER_TYPE) if piece.is_counter else copied


def _make(
    piece: Piece, tensor: Tensor | None, parameter: Tensor, before: Mapping[str, Any], behind: int
) -> Any:
    if tensor is None:
        return piece.value
    if piece.is_counter:
        tensor = tensor + behind
    if not piece.dtype:
        return int(tensor.item())
    value = tensor.to(_TYPES[piece.dtype])
    old = before.get(piece.name)
    if isinstance(old, Tensor) and not is_sharded(old) and (old.shape, old.dtype) == (value.shape, value.dtype):
        # Whoever holds on to the tensor sees the new values.
        return old.copy_(value)
    if is_sharded(parameter) and piece.shape is None:
        return parameter.from_local(
            value.clone(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    if piece.shape is None:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    # A tensor of its own, not a part of the memory in which it travelled.
    return value.clone()


def _numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What parameter groups hold beside parameters, as far as that is numbers, flags or names."""

    def plain(value: object) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.item()
        return value

    def is_plain(value: object) -> bool:
        is_row = isinstance(value, (tuple, list)) and all(isinstance(each, _PLAIN) for each in value)
        return is_row or isinstance(value, _PLAIN)

    return [
        {name: plain(value) for name, value in group.items() if name != "params" and is_plain(plain(value))}
        for group in optimizer.param_groups
    ]


def _like(before: object, value: Any) -> Any:
    if isinstance(before, Tensor):
        return before.fill_(value)
    # JSON knows no tuples.
    return tuple(value) if isinstance(value, list) and not isinstance(before, list) else value
