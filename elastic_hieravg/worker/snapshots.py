"""A worker's model and optimizer as they were after the last global round, in memory that outlives it.

One file holds two buffers, each with a header. A snapshot is written into the buffer that does not hold the
newest one: its header is taken away, the content is written, and a header with the content's checksum is put
back. So whenever the writer is killed, the other buffer is whole. Nothing in a file is ever executed: tensors
are bytes, everything else is JSON. Invariant: what is read is a snapshot that was written to its end.
"""

import contextlib
import hashlib
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_hieravg.averaging.flat import WIDE_TYPES, local_tensor, tensors_of
from elastic_hieravg.averaging.memory import page_aligned, require_memory
from elastic_hieravg.errors import DocumentError, ParametersError, Problem
from elastic_hieravg.membership.snapshot_files import UNFINISHED
from elastic_hieravg.plan.document import Fields, canonical_json, parse_json
from elastic_hieravg.worker.trees import decode_tree, encode_tree

MAGIC = b"elastic_hieravg/snapshot/1\n"
FORMAT = "elastic_hieravg/snapshot"
VERSION = 1
NUM_BUFFERS = 2
ALIGNMENT_BYTES = 64
OWNER_ONLY = 0o600

_TYPES = {str(kind): kind for kind in WIDE_TYPES}
# The snapshot's number, the bytes of its JSON, of all of it, and their checksum; then that of the header.
_HEADER = struct.Struct("<QQQI")
_CHECK = struct.Struct("<I")
_CAPACITY = struct.Struct("<Q")


# --- what a snapshot is -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """When a snapshot was taken: the global round after a step, in a generation that has this name.

    Two snapshots of one moment hold the same model.
    """

    step: int
    generation: int
    name: str


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor without its values."""

    kind: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * _TYPES[self.kind].itemsize

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=_TYPES[self.kind])

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        if str(tensor.dtype) not in _TYPES or tensor.is_sparse:
            raise ParametersError(
                Problem(
                    f"a tensor of type {tensor.dtype} cannot be kept", "convert it to one that can be averaged"
                )
            )
        return cls(str(tensor.dtype), tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class State:
    """Everything a snapshot says beside the tensors' values.

    `signature` tells one model and optimizer from another. The first `num_model` tensors are the model's.
    `optimizer`: its state as a tree, None if it was not kept.
    """

    moment: Moment
    signature: str
    specs: tuple[Spec, ...]
    num_model: int
    optimizer: object

    def to_json(self) -> str:
        return canonical_json(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.moment.step,
                "generation": self.moment.generation,
                "name": self.moment.name,
                "signature": self.signature,
                "tensors": [[spec.kind, list(spec.shape)] for spec in self.specs],
                "num_model": self.num_model,
                "optimizer": {"state": self.optimizer},
            }
        )

    def offsets(self) -> tuple[list[int], int]:
        """Where each tensor begins behind the JSON, and how long they all are."""
        ends = list(accumulate((_aligned(spec.num_bytes) for spec in self.specs), initial=0))
        return ends[:-1], ends[-1]


def read_state(text: str) -> State:
    """What `to_json` wrote; anything else is a `DocumentError`."""
    where = "a snapshot"
    fields = Fields(parse_json(text, where=where), where=where)
    if (fields.text("format"), fields.number("version")) != (FORMAT, VERSION):
        raise DocumentError(
            Problem("a snapshot has another version", "run the version of elastic_hieravg that wrote it")
        )
    moment = Moment(fields.number("step"), fields.number("generation"), fields.text("name"))
    signature, num_model = fields.text("signature"), fields.number("num_model")
    specs = tuple(_read_spec(value, where=place) for place, value in fields.items("tensors"))
    _, optimizer = fields.value("optimizer")
    fields.close()
    return State(moment, signature, specs, num_model, dict(optimizer).get("state"))  # type: ignore[call-overload]


def _read_spec(value: object, *, where: str) -> Spec:
    match value:
        case [str(kind), list(shape)] if kind in _TYPES and all(
            type(size) is int and size >= 0 for size in shape
        ):
            return Spec(kind, tuple(shape))
    raise DocumentError(
        Problem(f"{where} is no tensor: {value!r}", "run the version of elastic_hieravg that wrote it")
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# --- what is kept of a training process ---------------------------------------------------------------------


class Kept:
    """A model and its optimizer, as snapshots see them. `left_out`: why the optimizer's state is not kept."""

    def __init__(self, model: nn.Module | Sequence[Tensor], optimizer: Optimizer | None) -> None:
        names, self._list_tensors = tensors_of(model, average_buffers=True)
        self._optimizer = optimizer
        self.left_out = ""
        lines = [
            f"{name} {tuple(tensor.shape)} {tensor.dtype}"
            for name, tensor in zip(names, map(local_tensor, self._list_tensors()), strict=True)
        ]
        if optimizer is not None:
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            lines.append(f"{type(optimizer).__qualname__} {sizes}")
        self.signature = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]

    def state(self, moment: Moment) -> tuple[State, list[Tensor]]:
        """What is to be written now, and the tensors it is about."""
        tensors = [local_tensor(tensor) for tensor in self._list_tensors()]
        num_model, optimizer = len(tensors), None
        if self._optimizer is not None and not self.left_out:
            beside: list[Tensor] = []
            try:
                optimizer = encode_tree(self._optimizer.state_dict(), beside, where="the optimizer's state")
                for tensor in beside:
                    Spec.of(tensor)
            except ParametersError as exc:
                optimizer, self.left_out = None, exc.problems[0].message
            else:
                tensors += beside
        return State(moment, self.signature, tuple(map(Spec.of, tensors)), num_model, optimizer), tensors

    def restore(self, found: "Snapshot") -> None:
        """Make model and optimizer what they were. Only for a snapshot with this signature."""
        assert found.state.signature == self.signature, "the caller has compared"
        values = found.tensors()
        with torch.no_grad():
            for tensor, value in zip(self._list_tensors(), values[: found.state.num_model], strict=True):
                local_tensor(tensor).copy_(value)
        self.restore_optimizer(found.state.optimizer, values[found.state.num_model :])

    def restore_optimizer(self, tree: object, tensors: Sequence[Tensor]) -> None:
        if self._optimizer is not None and tree is not None:
            # Copies: an optimizer keeps the tensors it is given.
            self._optimizer.load_state_dict(decode_tree(tree, [tensor.clone() for tensor in tensors]))


# --- the file -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Written:
    """A buffer with a header: the snapshot's number, and where it lies. The content may have been spoilt."""

    pages: mmap.mmap
    number: int
    begin: int
    text_bytes: int
    num_bytes: int
    checksum: int

    def is_whole(self) -> bool:
        return _checksum(self.pages, self.begin, self.num_bytes) == self.checksum


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a file holds. Not to be used before `is_whole` said so."""

    state: State
    _written: _Written

    def is_whole(self) -> bool:
        return self._written.is_whole()

    def tensors(self) -> list[Tensor]:
        """The tensors' values as they lie in the file: to be copied, not kept."""
        memory = torch.frombuffer(self._written.pages, dtype=torch.uint8)
        return _views(memory, self.state, start=self._written.begin + _aligned(self._written.text_bytes))


class SnapshotFile:
    """The file of one worker. The one before, if it is there, is written on: what is in it stays until then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pages: mmap.mmap | None = None
        self._capacity = 0
        self._number = 0

    def write(self, state: State, tensors: Sequence[Tensor]) -> None:
        """Keep this. `OSError` if there is no room; what was kept before is still there then."""
        text = state.to_json().encode()
        _, num_bytes = state.offsets()
        needed = page_aligned(_aligned(len(text)) + num_bytes)
        if self._pages is None:
            self._open()
        if self._pages is None or needed > self._capacity:
            self._replace(needed, state, text, tensors)
        else:
            # The newest one is in the buffer that its number says; the other one is free.
            self._put(self._pages, self._capacity, state, text, tensors)
        os.utime(self._path)

    def close(self) -> None:
        self._pages = None

    def _open(self) -> None:
        with contextlib.suppress(OSError, ValueError, struct.error):
            pages = _map(self._path, writable=True)
            self._capacity = _capacity(pages)
            whole = [each.number for each in _written(pages, self._capacity) if each.is_whole()]
            self._pages, self._number = pages, max(whole, default=0)

    def _replace(self, capacity: int, state: State, text: bytes, tensors: Sequence[Tensor]) -> None:
        """A larger file in the place of the one before, with the snapshot in it already."""
        unfinished = self._path.with_name(self._path.name + UNFINISHED)
        num_bytes = _buffer_start(NUM_BUFFERS, capacity)
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
        require_memory(num_bytes)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, OWNER_ONLY)
        try:
            # Reserved now: an error here can be handled, a SIGBUS at the first touch cannot.
            os.posix_fallocate(descriptor, 0, num_bytes)
            pages = mmap.mmap(descriptor, num_bytes)
            pages[: len(MAGIC)] = MAGIC
            _CAPACITY.pack_into(pages, len(MAGIC), capacity)
            self._put(pages, capacity, state, text, tensors)
            unfinished.replace(self._path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._pages, self._capacity = pages, capacity

    def _put(
        self, pages: mmap.mmap, capacity: int, state: State, text: bytes, tensors: Sequence[Tensor]
    ) -> None:
        number = self._number + 1
        at = _header_start(number % NUM_BUFFERS)
        pages[at : at + _HEADER.size + _CHECK.size] = bytes(_HEADER.size + _CHECK.size)
        begin = _buffer_start(number % NUM_BUFFERS, capacity)
        pages[begin : begin + len(text)] = text
        start = begin + _aligned(len(text))
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        for view, tensor in zip(_views(memory, state, start=start), tensors, strict=True):
            view.copy_(tensor)
        num_bytes = start - begin + state.offsets()[1]
        checksum = _checksum(pages, begin, num_bytes)
        header = _HEADER.pack(number, len(text), num_bytes, checksum)
        pages[at : at + _HEADER.size + _CHECK.size] = header + _CHECK.pack(zlib.crc32(header))
        self._number = number


def read_snapshots(path: Path) -> list[Snapshot]:
    """The snapshots in a file of this user, newest first; none if it is no such file."""
    try:
        pages = _map(path, writable=False)
        capacity = _capacity(pages)
    except (OSError, ValueError, struct.error):
        return []
    found = []
    for each in _written(pages, capacity):
        with contextlib.suppress(DocumentError, UnicodeDecodeError):
            state = read_state(pages[each.begin : each.begin + each.text_bytes].decode())
            if _aligned(each.text_bytes) + state.offsets()[1] == each.num_bytes:
                found.append(Snapshot(state, each))
    return found


def read_newest(path: Path) -> Snapshot | None:
    """The newest snapshot in a file that is whole; None if there is none."""
    return next((found for found in read_snapshots(path) if found.is_whole()), None)


def _written(pages: mmap.mmap, capacity: int) -> list[_Written]:
    """The buffers that have a header, newest first."""
    found = []
    for index in range(NUM_BUFFERS):
        at, begin = _header_start(index), _buffer_start(index, capacity)
        header = pages[at : at + _HEADER.size]
        (check,) = _CHECK.unpack_from(pages, at + _HEADER.size)
        number, text_bytes, num_bytes, checksum = _HEADER.unpack(header)
        is_own = number % NUM_BUFFERS == index and text_bytes <= num_bytes <= capacity
        if number and is_own and check == zlib.crc32(header):
            found.append(_Written(pages, number, begin, text_bytes, num_bytes, checksum))
    return sorted(found, key=lambda each: each.number, reverse=True)


def _map(path: Path, *, writable: bool) -> mmap.mmap:
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is somebody else's")
        # Private, so that tensors can be made of it; nothing is ever written through it.
        access: dict[str, Any] = {} if writable else {"flags": mmap.MAP_PRIVATE}
        return mmap.mmap(descriptor, status.st_size, **access)
    finally:
        os.close(descriptor)


def _capacity(pages: mmap.mmap) -> int:
    if pages[: len(MAGIC)] != MAGIC:
        raise ValueError("this is no snapshot")
    capacity: int = _CAPACITY.unpack_from(pages, len(MAGIC))[0]
    if _buffer_start(NUM_BUFFERS, capacity) != len(pages):
        raise ValueError("this is no whole file")
    return capacity


def _header_start(index: int) -> int:
    return mmap.PAGESIZE * (1 + index)


def _buffer_start(index: int, capacity: int) -> int:
    return mmap.PAGESIZE * (1 + NUM_BUFFERS) + index * capacity


def _checksum(pages: mmap.mmap, begin: int, num_bytes: int) -> int:
    with memoryview(pages) as view:
        return zlib.crc32(view[begin : begin + num_bytes])


def _views(memory: Tensor, state: State, *, start: int) -> list[Tensor]:
    offsets, _ = state.offsets()
    return [
        memory[start + offset : start + offset + spec.num_bytes].view(_TYPES[spec.kind]).view(spec.shape)
        for spec, offset in zip(state.specs, offsets, strict=True)
    ]
