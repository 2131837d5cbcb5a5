"""Ranks of several nodes combine a run of values over a process group, each bringing one copy.

Every member owns one part. It receives the others' values of its part, combines them, and sends the
result to all. Values leave from where they lie, shares are applied where they arrive, and both travel in
their own type: half-precision values cost half the bytes. Invariant: a contribution of share 0 is not sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elastic_hieravg.averaging.flat import WIDE_TYPES, Kind
from elastic_hieravg.averaging.groups import MESSAGE_TIMEOUT_S, Group
from elastic_hieravg.averaging.kernels import chunks, combine, is_finite, share_out

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
        # Everybody begins with another peer, so that not all send to the same one.
        distances = range(1, len(group.peers))
        self._others = [(group.index + distance) % len(group.peers) for distance in distances]

    def run(self, shares: Sequence[float]) -> bool:
        """Combine, and have the result everywhere. False if something in this member's part is not finite."""
        group, start = self._group, self._start
        sent = [
            group.send(self._source[first:last], to=peer, tag=_CONTRIBUTION)
            for peer in self._others
            for first, last in chunks(*self._parts[peer], size=MESSAGE_VALUES)
            if shares[group.index] > 0
        ]
        contributors = [peer for peer in self._others if shares[peer] > 0]
        messages = chunks(self._start, self._end, size=MESSAGE_VALUES)
        arriving = [
            [
                group.receive(self._landing[peer][first - start : last - start], of=peer, tag=_CONTRIBUTION)
                for peer in contributors
            ]
            for first, last in messages
        ]
        all_finite = True
        for works, (first, last) in zip(arriving, messages, strict=True):
            group.wait(works, timeout_s=MESSAGE_TIMEOUT_S)
            all_finite &= self._combine(first, last, contributors=contributors, shares=shares)
        group.wait(sent, timeout_s=MESSAGE_TIMEOUT_S)
        self._spread(messages)
        group.finish()
        return all_finite

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

    def _spread(self, messages: Sequence[tuple[int, int]]) -> None:
        for peer in self._others:
            for first, last in messages:
                self._group.send(self._out[first:last], to=peer, tag=_RESULT)
            for first, last in chunks(*self._parts[peer], size=MESSAGE_VALUES):
                self._group.receive(self._out[first:last], of=peer, tag=_RESULT)
