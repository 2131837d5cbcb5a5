"""The arithmetic of a round on one run of memory: weighted sums, maxima, and what they tell on the way.

Sums are made in the wide type. A contribution of share 0 is never read, so that 0 times NaN is not NaN.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_hieravg.averaging.flat import Kind

# Small enough for a core's cache, large enough that the calls cost nothing.
CHUNK_VALUES = 128 * 1024
# Divergence is measured exactly, on the first values of every fourth chunk.
SAMPLE_VALUES = 8 * 1024
SAMPLE_EVERY_CHUNKS = 4


def combine(out: Tensor, rows: Sequence[Tensor], shares: Sequence[float], *, kind: Kind) -> None:
    """The weighted sum, or the maximum, of the rows with a share, into `out`, which has the wide type."""
    live = [(row, share) for row, share in zip(rows, shares, strict=True) if share > 0]
    if not live:
        out.fill_(neutral(out.dtype, kind=kind))
        return
    (first, share), *rest = live
    if kind is Kind.MAXIMUM:
        out.copy_(first)
        for row, _ in rest:
            torch.maximum(out, row, out=out)
    else:
        # Widened first: a product in a narrow type would be rounded before it is summed.
        torch.mul(first, share, out=out) if first.dtype == out.dtype else out.copy_(first).mul_(share)
        for row, share in rest:
            out.add_(row, alpha=share)


def neutral(dtype: torch.dtype, *, kind: Kind) -> int:
    """What contributes nothing."""
    return 0 if kind is Kind.MEAN else torch.iinfo(dtype).min


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. Nearly free for values that were just written."""
    if not values.is_floating_point() or bool(torch.isfinite(torch.dot(values, values))):
        return True
    # A value is not finite, or only its square is not.
    return bool(torch.isfinite(values).all())


class Divergence(NamedTuple):
    """How far copies were from the result: sums of squares of the differences and of the result, sampled."""

    difference_squares: float = 0.0
    result_squares: float = 0.0

    def plus(self, other: "Divergence") -> "Divergence":
        return Divergence(
            self.difference_squares + other.difference_squares, self.result_squares + other.result_squares
        )


def divergence(rows: Sequence[Tensor], shares: Sequence[float], result: Tensor) -> Divergence:
    """The divergence of the rows with a share, each counting by its share."""
    difference_squares = result_squares = 0.0
    step = CHUNK_VALUES * SAMPLE_EVERY_CHUNKS
    for start in range(0, result.numel(), step):
        block = result[start : start + SAMPLE_VALUES].to("cpu", torch.float64)
        size = float(torch.dot(block, block))
        for row, share in zip(rows, shares, strict=True):
            if share > 0:
                difference = row[start : start + SAMPLE_VALUES].to("cpu", torch.float64) - block
                difference_squares += share * float(torch.dot(difference, difference))
                result_squares += share * size
    return Divergence(difference_squares, result_squares)


def chunks(start: int, end: int, *, size: int = CHUNK_VALUES) -> list[tuple[int, int]]:
    return [(first, min(first + size, end)) for first in range(start, end, size)]


def share_out(total: int, parts: int, *, alignment: int = 1024) -> list[tuple[int, int]]:
    """Cut `total` values into `parts` runs of equal length but for the last ones."""
    length = -(-total // parts // alignment) * alignment
    return [(min(total, index * length), min(total, (index + 1) * length)) for index in range(parts)]
