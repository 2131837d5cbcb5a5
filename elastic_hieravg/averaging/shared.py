"""The ranks of one node average through memory they all see.

Every rank reads all copies, each makes its part of the one result, and when the result is whole each
copies it out into its own parameters. Nobody writes anybody else's parameters. Whether the result counts
is decided once, in a word of the shared memory: the first to decide wins and the others follow, so that a
death at any moment leaves every survivor with all of the old or all of the new.
"""

import ctypes
import fcntl
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from elastic_hieravg.averaging.flat import Bank, FlatModel, Kind
from elastic_hieravg.averaging.kernels import (
    Divergence,
    chunks,
    combine,
    divergence,
    is_finite,
    share_out,
)
from elastic_hieravg.averaging.memory import Mapping, create_file, page_aligned
from elastic_hieravg.averaging.mesh import Mesh, lost

_COMMIT, _ABORT = 1, 2
_LOCK_NAP_S = 0.001


class NodeMemory:
    """All copies of one node's members of a group, and their result, side by side in this process."""

    def __init__(self, flat: FlatModel, mesh: Mesh, *, timeout_s: float) -> None:
        assert flat.file is not None
        self._mesh = mesh
        self._timeout_s = timeout_s
        layout, result_bytes = _result_layout(flat.banks)
        copies = mesh.share_file(flat.file, timeout_s=timeout_s)
        # A fresh file for every group: a frozen member that thaws later may still write its part.
        own = create_file(result_bytes) if mesh.index == 0 else flat.file
        results = mesh.share_file(own, timeout_s=timeout_s)
        self._file = results[0]
        num_copies = len(mesh.peers)
        self._mapping = Mapping(
            [(file, flat.file_bytes, False) for file in copies] + [(self._file, result_bytes, True)]
        )
        for file in (*copies, *results[1:]):
            if file not in (flat.file, self._file):
                os.close(file)
        memory = self._mapping.memory
        result_start = num_copies * flat.file_bytes
        self.results = [
            memory[result_start + offset :].view(bank.wide_type)[: bank.values.numel()]
            for bank, offset in zip(flat.banks, layout, strict=True)
        ]
        word_address = self._mapping.address + self._mapping.num_bytes - page_aligned(1)
        self._word = ctypes.c_uint64.from_address(word_address)
        self._parts = [
            _BankPart(bank, _rows(memory, flat, bank, num_copies), result, part=mesh.index)
            for bank, result in zip(flat.banks, self.results, strict=True)
        ]

    def combine(self, shares: Sequence[float]) -> bool:
        """Make this rank's part of the result. False if something in it is not finite."""
        all_finite = True
        for part in self._parts:
            all_finite &= part.combine(shares)
        return all_finite

    def divergence(self, shares: Sequence[float]) -> Divergence:
        """How far all copies were from this rank's part of the result."""
        found = Divergence()
        for part in self._parts:
            found = found.plus(part.divergence(shares))
        return found

    def decide(self, round_index: int, *, commit: bool) -> bool:
        """Whether the round counts for this node: as wished, or as somebody decided before."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                # The kernel releases the lock if its holder dies.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() > deadline_s:
                    raise lost("a rank of this node", "it is frozen while deciding") from exc
                time.sleep(_LOCK_NAP_S)
        try:
            if self._word.value >> 2 != round_index:
                # One aligned store of eight bytes: seen whole or not at all.
                self._word.value = round_index << 2 | (_COMMIT if commit else _ABORT)
            return self._word.value & 3 == _COMMIT
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._parts, self.results = [], []
        del self._word
        self._mapping.close()
        os.close(self._file)


class _BankPart:
    """This rank's part of one bank's result. The views are made once, not in every round."""

    def __init__(self, bank: Bank, rows: Sequence[Tensor], result: Tensor, *, part: int) -> None:
        self._kind = bank.kind
        start, end = share_out(result.numel(), len(rows))[part]
        self._whole = [row[start:end] for row in rows], result[start:end]
        spans = chunks(start, end)
        self._out = [result[first:last] for first, last in spans]
        self._rows = [[row[first:last] for row in rows] for first, last in spans]
        # One kernel reads all copies at once if they have the result's type: they are rows of a matrix.
        self._columns: list[Tensor] | None = None
        if bank.kind is Kind.MEAN and bank.buffer.dtype == bank.wide_type and len(rows) > 1:
            stride = (rows[1].data_ptr() - rows[0].data_ptr()) // rows[0].element_size()
            matrix = rows[0].as_strided((len(rows), rows[0].numel()), (stride, 1))
            self._columns = [matrix[:, first:last].t() for first, last in spans]

    def combine(self, shares: Sequence[float]) -> bool:
        all_finite = True
        use_matrix = self._columns is not None and all(share > 0 for share in shares)
        weights = torch.tensor(shares, dtype=self._out[0].dtype) if use_matrix and self._out else None
        for index, out in enumerate(self._out):
            if weights is not None and self._columns is not None:
                torch.mv(self._columns[index], weights, out=out)
            else:
                combine(out, self._rows[index], shares, kind=self._kind)
            all_finite &= is_finite(out)
        return all_finite

    def divergence(self, shares: Sequence[float]) -> Divergence:
        rows, result = self._whole
        return divergence(rows, shares, result) if self._kind is Kind.MEAN else Divergence()


def _rows(memory: Tensor, flat: FlatModel, bank: Bank, num_copies: int) -> list[Tensor]:
    """Every copy of a bank, as it is seen from here."""
    offset = bank.values.data_ptr() - flat.file_address
    num_bytes = bank.values.numel() * bank.values.element_size()
    starts = [copy * flat.file_bytes + offset for copy in range(num_copies)]
    return [memory[start : start + num_bytes].view(bank.values.dtype) for start in starts]


def _result_layout(banks: Sequence[Bank]) -> tuple[list[int], int]:
    """Where each bank's result begins, and the size of the file; its last page is for the decision."""
    offsets, end = [], 0
    for bank in banks:
        offsets.append(end)
        end = page_aligned(end + bank.values.numel() * bank.wide_type.itemsize)
    return offsets, end + page_aligned(1)
