"""Which parameters of a list take part in a round. Pure: no tensors, no sockets.

torch leaves parameters without a gradient out, each rank for itself, and averages different ones into each
other when ranks differ. Here ranks show each other which have one. Every rank sees the same ballots, so
every rank comes to the same choice.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_BALLOT = struct.Struct("<16sqq")


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a rank brings: how many parameters, a digest of which have a gradient, and the number of the
    averaging group it holds for them, 0 if it holds none.
    """

    digest: bytes
    num_parameters: int
    group_number: int

    @classmethod
    def of(cls, has_gradient: Sequence[bool], *, group_number: int) -> "Ballot":
        digest = hashlib.sha256(bytes(has_gradient)).digest()[:16]
        return cls(digest, len(has_gradient), group_number)

    def encode(self) -> bytes:
        return _BALLOT.pack(self.digest, self.num_parameters, self.group_number)

    @classmethod
    def decode(cls, record: bytes) -> "Ballot":
        return cls(*_BALLOT.unpack_from(record))


def choose(has_gradient: Sequence[bool], ballots: Sequence[Ballot]) -> tuple[int, ...]:
    """The parameters to average, by their places: those with a gradient if all ranks agree on which.

    Otherwise, and if none has one, all.

    >>> mine, other = [True, False], [False, True]
    >>> choose(mine, [Ballot.of(mine, group_number=1), Ballot.of(mine, group_number=1)])
    (0,)
    >>> choose(mine, [Ballot.of(mine, group_number=1), Ballot.of(other, group_number=1)])
    (0, 1)
    """
    places = range(len(has_gradient))
    is_agreed = len({(ballot.digest, ballot.num_parameters) for ballot in ballots}) == 1
    if is_agreed and any(has_gradient):
        return tuple(place for place in places if has_gradient[place])
    return tuple(places)


def group_in_common(ballots: Sequence[Ballot]) -> int:
    """The number of the averaging group that all ranks hold, or 0 if one must be built.

    Caches may differ: a rank's garbage collector may have been earlier than another's.
    """
    numbers = {ballot.group_number for ballot in ballots}
    return numbers.pop() if len(numbers) == 1 else 0
