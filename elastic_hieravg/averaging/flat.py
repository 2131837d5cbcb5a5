"""A model's tensors in few long buffers.

All tensors of one device and type lie one behind the other in a `Bank`, and each tensor is a view into it:
a round works on long runs of memory and copies nothing in. On the CPU the banks lie in shared memory if
there is any, so that the other ranks of the node can read them. Invariant: only this rank writes here.

A tensor that somebody pointed elsewhere is brought back before the next round (`refresh`). Tensors that
belong to somebody else, such as the shards of FSDP, are not moved: they are copied in and out.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from elastic_hieravg.averaging.memory import create_file, map_file, page_aligned
from elastic_hieravg.errors import ParametersError, Problem, raise_if_any
from elastic_hieravg.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SLOT_ALIGNMENT_BYTES = 64
SIGNATURE_BYTES = 16


class Kind(Enum):
    """How values of a bank become one: the weighted mean, or for whole numbers and flags the maximum."""

    MEAN = "mean"
    MAXIMUM = "maximum"


# The type in which values of a type are summed or compared, and travel. Not listed: cannot be averaged.
WIDE_TYPES: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.bool: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}


@dataclass(slots=True)
class Slot:
    """A tensor's place in its bank."""

    name: str
    bank: "Bank"
    view: Tensor
    start: int
    is_moved: bool

    @property
    def num_values(self) -> int:
        return self.view.numel()


class Bank:
    """All tensors of one device and type. `values` is the whole bank as real numbers, in one dimension."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.values = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        self.wide_type = WIDE_TYPES[buffer.dtype]
        is_mean = buffer.is_floating_point() or buffer.is_complex()
        self.kind = Kind.MEAN if is_mean else Kind.MAXIMUM

    def is_finite(self) -> bool:
        return self.kind is Kind.MAXIMUM or bool(torch.isfinite(self.values).all())


class FlatModel:
    """The tensors to average, laid out in banks.

    `list_tensors` is asked again before every round, so that a tensor that replaced another is noticed. It
    alone decides how long the tensors live: here they are not kept.
    """

    def __init__(
        self, names: Sequence[str], list_tensors: Callable[[], Sequence[Tensor]], *, shared: bool = True
    ) -> None:
        tensors = list_tensors()
        assert len(names) == len(tensors)
        raise_if_any(ParametersError, list(_problems(names, tensors)))
        self._list_tensors = list_tensors
        self.is_sharded = any(is_sharded(tensor) for tensor in tensors)
        self.lines = tuple(map(_describe, names, tensors))
        self.signature = hashlib.sha256("\n".join(self.lines).encode()).digest()[:SIGNATURE_BYTES]
        self.file: int | None = None
        self.file_bytes = 0
        self.file_address = 0
        self.shared_error = ""
        self.has_warned = False
        layout = _lay_out([local_tensor(tensor) for tensor in tensors])
        buffers = self._allocate(layout, shared=shared)
        self.slots, self.banks = _fill(names, tensors, layout, buffers)

    def refresh(self) -> tuple[str, ...]:
        """Bring the tensors back into their places; the names of those that had to be brought."""
        tensors = self._list_tensors()
        if len(tensors) != len(self.slots):
            raise ParametersError(
                Problem(
                    f"the model has {len(tensors)} tensors to average and had {len(self.slots)} before",
                    "make a new averager when tensors are added or removed",
                )
            )
        strayed = []
        for slot, tensor in zip(self.slots, tensors, strict=True):
            if not slot.is_moved:
                slot.view.copy_(local_tensor(tensor))
            elif tensor.data_ptr() != slot.view.data_ptr() and slot.num_values:
                _bring_back(slot, tensor)
                strayed.append(slot.name)
        return tuple(strayed)

    def take(self, results: Sequence[Tensor], *, selected: Sequence[int] | None = None) -> None:
        """Take the results as the tensors' values: of all of them, or of the selected slots only."""
        if selected is None:
            for bank, result in zip(self.banks, results, strict=True):
                bank.values.copy_(result)
        else:
            result_of = dict(zip(map(id, self.banks), results, strict=True))
            for slot in (self.slots[index] for index in selected):
                width = 2 if slot.bank.buffer.is_complex() else 1
                span = slice(slot.start * width, (slot.start + slot.num_values) * width)
                slot.bank.values[span].copy_(result_of[id(slot.bank)][span])
        if self.is_sharded:
            for slot, tensor in zip(self.slots, self._list_tensors(), strict=True):
                if not slot.is_moved:
                    local_tensor(tensor).copy_(slot.view)

    def is_finite(self) -> bool:
        return all(bank.is_finite() for bank in self.banks)

    @property
    def num_bytes(self) -> int:
        return sum(bank.values.numel() * bank.wide_type.itemsize for bank in self.banks)

    def _allocate(self, layout: "Layout", *, shared: bool) -> dict["BankKey", Tensor]:
        on_cpu = all(device.type == "cpu" for device, _ in layout.sizes)
        if shared and on_cpu:
            offsets, num_bytes = layout.file_offsets()
            try:
                self.file, self.file_bytes = create_file(num_bytes), num_bytes
                memory = map_file(self.file, num_bytes)
            except (OSError, AttributeError) as exc:
                self.shared_error = f"{num_bytes} bytes of shared memory cannot be had: {exc}"
            else:
                self.file_address = memory.data_ptr()
                return {
                    key: memory[offsets[key] : offsets[key] + size * key[1].itemsize].view(key[1])
                    for key, size in layout.sizes.items()
                }
        return {
            (device, dtype): torch.zeros(size, dtype=dtype, device=device)
            for (device, dtype), size in layout.sizes.items()
        }

    def __del__(self) -> None:
        # The tensors live on in the mapping; only the descriptor is ours to close.
        if getattr(self, "file", None) is not None:
            assert self.file is not None
            with contextlib.suppress(OSError):
                os.close(self.file)


def tensors_of(
    model: nn.Module | Iterable[Tensor], *, average_buffers: bool
) -> tuple[Sequence[str], Callable[[], Sequence[Tensor]]]:
    """Names of what is averaged of a model, and how to find the tensors again and again."""
    if not isinstance(model, nn.Module):
        tensors = list(model)
        return [f"parameter {index}" for index in range(len(tensors))], lambda: tensors
    # Buffers that are not saved with the model are not part of it: caches, masks, tables.
    saved = model.state_dict(keep_vars=True).keys() if average_buffers else ()
    names = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers() if name in saved]

    def list_tensors() -> Sequence[Tensor]:
        found: list[Tensor] = list(model.parameters())
        if buffers:
            named = dict(model.named_buffers())
            found += [named[name] for name in buffers]
        return found

    return [*names, *buffers], list_tensors


BankKey = tuple[torch.device, torch.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor goes: its bank, its first element there, and the strides it keeps."""

    places: tuple[tuple[BankKey, int, tuple[int, ...]], ...]
    sizes: dict[BankKey, int]

    def file_offsets(self) -> tuple[dict[BankKey, int], int]:
        """Where each bank begins in a file that holds them all, and the file's size."""
        offsets, end = {}, 0
        for key, size in self.sizes.items():
            offsets[key] = end
            end = page_aligned(end + size * key[1].itemsize)
        return offsets, max(end, page_aligned(1))


def _lay_out(tensors: Sequence[Tensor]) -> Layout:
    places: list[tuple[BankKey, int, tuple[int, ...]]] = []
    ends: dict[BankKey, int] = {}
    seen: dict[tuple[object, ...], int] = {}
    for tensor in tensors:
        key = tensor.device, tensor.dtype
        # Strides are kept where the tensor is dense (channels_last stays), and made dense where it is not.
        strides = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
        identity = (key, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and identity in seen:
            places.append(places[seen[identity]])
            continue
        seen[identity] = len(places)
        start = ends.get(key, 0)
        places.append((key, start, strides))
        alignment = SLOT_ALIGNMENT_BYTES // tensor.element_size()
        ends[key] = start + -(-tensor.numel() // alignment) * alignment
    sizes = {key: ends[key] for key in sorted(ends, key=lambda key: (str(key[0]), str(key[1])))}
    return Layout(tuple(places), sizes)


def _fill(
    names: Sequence[str], tensors: Sequence[Tensor], layout: Layout, buffers: dict[BankKey, Tensor]
) -> tuple[tuple[Slot, ...], tuple[Bank, ...]]:
    banks = {key: Bank(buffer) for key, buffer in buffers.items()}
    slots: list[Slot] = []
    for name, tensor, (key, start, strides) in zip(names, tensors, layout.places, strict=True):
        local, bank = local_tensor(tensor), banks[key]
        view = bank.buffer.as_strided(local.shape, strides, bank.buffer.storage_offset() + start)
        view.copy_(local)
        is_moved = not is_sharded(tensor)
        if is_moved:
            tensor.data = view
        slots.append(Slot(name, bank, view, start, is_moved))
    return tuple(slots), tuple(banks.values())


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, free of autograd."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local.detach()


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    # Importing the module takes a second; if nobody has, there are no such tensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _bring_back(slot: Slot, tensor: Tensor) -> None:
    if (tensor.shape, tensor.dtype, tensor.device) != (slot.view.shape, slot.view.dtype, slot.view.device):
        now = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        before = f"{tuple(slot.view.shape)} {slot.view.dtype} on {slot.view.device}"
        raise ParametersError(
            Problem(
                f"{slot.name} is {now} now and was {before}",
                "convert and move the model first, then make the averager",
            )
        )
    slot.view.copy_(tensor.detach())
    tensor.data = slot.view


def _describe(name: str, tensor: Tensor) -> str:
    text = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
    if is_sharded(tensor):
        text += f" {tensor.placements} shard {tensor.device_mesh.get_coordinate()}"
    return text


def _problems(names: Sequence[str], tensors: Sequence[Tensor]) -> Iterator[Problem]:
    if not tensors:
        yield Problem("there is nothing to average", "give a model, or parameters, with at least one tensor")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.is_meta:
            yield Problem(f"{name} has no values yet: it is on the meta device", "load the model first")
        elif tensor.dtype not in WIDE_TYPES:
            yield Problem(
                f"{name} has the type {tensor.dtype}, which cannot be averaged",
                "leave it out, or convert it to a floating-point, complex, integer or bool type",
            )
        elif tensor.is_sparse:
            yield Problem(f"{name} is sparse, and cannot be averaged", "leave it out, or make it dense")
    yield from _overlap_problems(names, [local_tensor(tensor) for tensor in tensors])


def _overlap_problems(names: Sequence[str], tensors: Sequence[Tensor]) -> Iterator[Problem]:
    """Two tensors over the same memory are fine if they are the same; parts of each other cannot be moved."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor), index)
        for index, tensor in enumerate(tensors)
        if tensor.numel() and not tensor.is_meta and not tensor.is_sparse
    )
    reach, owner = 0, 0
    for first, end, index in spans:
        here, there = tensors[index], tensors[owner]
        is_same = here.shape == there.shape and here.stride() == there.stride() and here.dtype == there.dtype
        if first < reach and not (first == there.data_ptr() and is_same):
            yield Problem(
                f"{names[index]} and {names[owner]} share a part of their memory",
                "tie whole tensors, or give each its own memory",
            )
        if end > reach:
            reach, owner = end, index


def _extent_bytes(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def first_difference(here: Sequence[str], there: Sequence[str]) -> tuple[str, str] | None:
    """The first tensor in which two models differ, as each describes it; None if they do not."""
    pairs = zip_longest(here, there, fillvalue="nothing more")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def check_slots(flat: FlatModel, plan: Plan) -> None:
    """Refuse a sharded model on nodes with different numbers of slots."""
    slots = {node.slots for node in plan.topology.nodes}
    if flat.is_sharded and len(slots) > 1:
        raise ParametersError(
            Problem(
                "the model is sharded over the ranks of each node, and the nodes have different numbers of "
                f"slots ({plan.topology.listing()}), so their shards are not the same",
                "run the same number of ranks on every node, or do not shard the model",
            )
        )
