"""Ranks of several nodes combine a run of values over a process group, each bringing one copy.

Every member owns one part. It receives the others' values of its part, combines them, and sends the
result to all. Values leave from where they lie, shares are applied where they arrive, and both travel in
their own type: half-precision values cost half the bytes. Invariant: a contribution of share 0 is not sent.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from elastic_hieravg.averaging.flat import WIDE_TYPES, Kind
from elastic_hieravg.averaging.groups import Group
from elastic_hieravg.averaging.kernels import chunks, combine, is_finite, share_out
from elastic_hieravg.errors import PeerLostError

# What is sent in one message; several are in flight.
MESSAGE_VALUES = 1024 * 1024
_CONTRIBUTION, _RESULT = 0, 1


class Exchange:
    """One run of values: `source` is combined over the group into `out`, which may be the same memory."""

    def __init__(
        self, group: Group, *, source: Tensor, out: Tensor, landing: Sequence[Tensor], kind: Kind
    ) -> None:
        """`landing`: for each member memory for what it contributes to this member's part.

        It may lie in `out`, where that member's result will be: contributions are used before results come.
        """
        self._group = group
        self._source = source
        self._out = out
        self._kind = kind
        self._parts = share_out(source.numel(), len(group.peers))
        self._start, self._end = self._parts[group.index]
        self._landing = [memory[: self._end - self._start] for memory in landing]
        longest = max(end - start for start, end in self._parts)
        self._num_messages = len(chunks(0, longest, size=MESSAGE_VALUES))
        # Everybody begins with another peer, so that not all send to the same one.
        distances = range(1, len(group.peers))
        self._others = [(group.index + distance) % len(group.peers) for distance in distances]

    def run(self, shares: Sequence[float]) -> bool:
        """Combine, and have the result everywhere. False if something in this member's part is not finite."""
        contributors = [peer for peer in self._others if shares[peer] > 0]
        messages = chunks(self._start, self._end, size=MESSAGE_VALUES)
        waiting: deque[list[Work]] = deque()
        flying: list[Work] = []
        all_finite = True
        try:
            waiting.extend(self._expect(messages, contributors=contributors))
            waiting.append(flying)
            if shares[self._group.index] > 0:
                self._contribute(flying)
            for index, (first, last) in enumerate(messages):
                self._group.wait(waiting.popleft())
                all_finite &= self._combine(first, last, contributors=contributors, shares=shares)
                # While later contributions still arrive. What a peer sends back overwrites at most what it
                # contributed to this message, which is used, or what it was sent, which has arrived.
                self._spread(index, flying)
            for index in range(len(messages), self._num_messages):
                self._spread(index, flying)
        except PeerLostError:
            self._group.cut()
            for works in waiting:
                # Their memory is in use until they end.
                with contextlib.suppress(PeerLostError):
                    self._group.wait(works)
            raise
        self._group.wait(flying)
        return all_finite

    def _expect(
        self, messages: Sequence[tuple[int, int]], *, contributors: Sequence[int]
    ) -> Iterator[list[Work]]:
        """Receive all contributions to this member's part: for each message one from every contributor."""
        start = self._start
        for first, last in messages:
            yield [
                self._group.receive(
                    self._landing[peer][first - start : last - start], of=peer, tag=_CONTRIBUTION
                )
                for peer in contributors
            ]

    def _contribute(self, flying: list[Work]) -> None:
        """Send every peer this member's values of its part, the first message of each before the second."""
        for index in range(self._num_messages):
            for peer in self._others:
                for first, last in self._message(peer, index):
                    flying.append(self._group.send(self._source[first:last], to=peer, tag=_CONTRIBUTION))

    def _spread(self, index: int, flying: list[Work]) -> None:
        """Send one message's worth of this member's result to all, and take the same of theirs."""
        for peer in self._others:
            for first, last in self._message(peer, index):
                flying.append(self._group.receive(self._out[first:last], of=peer, tag=_RESULT))
        for first, last in self._message(self._group.index, index):
            flying += [self._group.send(self._out[first:last], to=peer, tag=_RESULT) for peer in self._others]

    def _message(self, member: int, index: int) -> list[tuple[int, int]]:
        """Where a member's part has its message of this index: one run, or none if the part is shorter."""
        start, end = self._parts[member]
        first = start + index * MESSAGE_VALUES
        return [(first, min(end, first + MESSAGE_VALUES))] if first < end else []

    def _combine(self, first: int, last: int, *, contributors: Sequence[int], shares: Sequence[float]) -> bool:
        """Combine one message's worth of values, in pieces that fit the cache."""
        all_finite = True
        used = [shares[self._group.index], *(shares[peer] for peer in contributors)]
        for here, there in chunks(first, last):
            rows = [self._source[here:there]]
            rows += [self._landing[peer][here - self._start : there - self._start] for peer in contributors]
            out = self._out[here:there]
            wide_type = WIDE_TYPES[out.dtype]
            wide = out if out.dtype == wide_type else torch.empty_like(out, dtype=wide_type)
            combine(wide, rows, used, kind=self._kind)
            all_finite &= is_finite(wide)
            if wide is not out:
                out.copy_(wide)
        return all_finite
