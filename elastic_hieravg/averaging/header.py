"""What ranks tell each other in a round, and what follows from it. Pure: no tensors, no sockets.

Every rank sees the same headers, so every rank comes to the same agreement.
"""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic_hieravg.plan.hierarchy import LEVELS_MAX

_HEADER = struct.Struct(f"<16sqqqqBB{LEVELS_MAX}d")
_HOLDS_MODEL, _IS_ENDING = 1, 2
_VERDICT = struct.Struct("<B2d")


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank brings to a round.

    `samples`: how many samples its model stands for at this level, then at each wider one. The first is
    its weight. `trained`: the last of its steps that was not empty. `is_ending`: its training loop has ended.
    """

    signature: bytes
    round_index: int
    step: int
    generation: int
    holds_model: bool
    samples: tuple[float, ...]
    trained: int = 0
    is_ending: bool = False

    def encode(self) -> bytes:
        assert len(self.samples) <= LEVELS_MAX
        padded = (*self.samples, *(0.0,) * (LEVELS_MAX - len(self.samples)))
        flags = (self.holds_model * _HOLDS_MODEL | self.is_ending * _IS_ENDING, len(self.samples))
        numbers = (self.round_index, self.step, self.generation, self.trained)
        return _HEADER.pack(self.signature, *numbers, *flags, *padded)

    @classmethod
    def decode(cls, record: bytes) -> "Header":
        signature, round_index, step, generation, trained, flags, count, *samples = _HEADER.unpack_from(record)
        holds_model, is_ending = bool(flags & _HOLDS_MODEL), bool(flags & _IS_ENDING)
        known = tuple(samples[:count])
        return cls(signature, round_index, step, generation, holds_model, known, trained, is_ending)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rank found in its part of the result: whether all is finite, and how far its copy was away."""

    is_finite: bool
    difference_squares: float
    result_squares: float

    def encode(self) -> bytes:
        return _VERDICT.pack(self.is_finite, self.difference_squares, self.result_squares)

    @classmethod
    def decode(cls, record: bytes) -> "Verdict":
        is_finite, difference_squares, result_squares = _VERDICT.unpack_from(record)
        return cls(bool(is_finite), difference_squares, result_squares)


@dataclass(frozen=True, slots=True)
class Agreement:
    """`shares` add up to 1, or are all 0 if nobody can contribute. `mean_samples` is per wider level.

    `trained`: the last step that anybody made. `is_ending`: somebody's training loop has ended.
    """

    shares: tuple[float, ...]
    step: int
    mean_samples: tuple[float, ...]
    trained: int = 0
    is_ending: bool = False


def agree(headers: Sequence[Header], *, nonfinite: Collection[int] = ()) -> Agreement:
    """How much each rank counts. A rank whose values are not finite counts 0 and is healed by the result."""
    weights = [0.0 if index in nonfinite else header.samples[0] for index, header in enumerate(headers)]
    if not sum(weights):
        holders = [index for index, header in enumerate(headers) if header.holds_model]
        # Nobody holds the model when a job starts: then the lowest rank's is taken.
        sources = [index for index in holders or [0] if index not in nonfinite]
        weights = [float(index in sources) for index in range(len(headers))]
    total = sum(weights)
    # Who has no model follows the others' steps; it may have made more, with a model that counts for nothing.
    leading = [header for header in headers if header.holds_model] or headers
    return Agreement(
        shares=tuple(weight / total if total else 0.0 for weight in weights),
        step=max(header.step for header in leading),
        mean_samples=tuple(
            sum(column) / len(headers)
            for column in zip(*(header.samples[1:] for header in headers), strict=True)
        ),
        trained=max(header.trained for header in leading),
        is_ending=any(header.is_ending for header in headers),
    )
