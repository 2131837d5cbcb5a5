"""Ranks of several nodes combine a run of values over a process group, each bringing one copy.

Every member owns one part. It receives the others' values of its part, combines them, and sends the
result to all. Values leave from where they lie, shares are applied where they arrive, and both travel in
their own type: half-precision values cost half the bytes. On slow links members take turns: in a turn everybody
sends to one member and receives from one, so that nobody's link is flooded by all others at once. Invariant: a
contribution of share 0 is not sent.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor

from elastic_hieravg.averaging.flat import WIDE_TYPES, Kind
from elastic_hieravg.averaging.groups import MESSAGE_TIMEOUT_S, Group
from elastic_hieravg.averaging.kernels import chunks, combine, is_finite, share_out

# A part goes in about so many messages, of a size within these bounds: what has arrived is combined while the
# rest is on its way, and a message is worth the wait for it.
PART_MESSAGES = 4
MESSAGE_VALUES_MIN, MESSAGE_VALUES_MAX = 128 * 1024, 1024 * 1024
# What is sent may be so far ahead of what has arrived: links are not idle, and their queues do not overflow.
AHEAD_TURNS_MIN, AHEAD_VALUES = 3, 384 * 1024
# Of one member, both ways of a run. What is faster has room for everything at once, and turns only cost time.
SLOW_BYTES_PER_S = 100e6
_CONTRIBUTION, _RESULT = 0, 1

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a member sends to one other and receives from one; of no values where nothing is left."""

    to: int
    sends: Tensor
    of: int
    receives: Tensor


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
        num_members = len(group.peers)
        parts = share_out(source.numel(), num_members)
        self._start, end = parts[group.index]
        self._landing = [memory[: end - self._start] for memory in landing]
        first_start, first_end = parts[0]
        # Two members cannot flood each other, and fewer messages are faster.
        num_wanted = PART_MESSAGES if num_members > 2 else 1
        size = min(max((first_end - first_start) // num_wanted, MESSAGE_VALUES_MIN), MESSAGE_VALUES_MAX)
        self._ahead_turns = max(AHEAD_TURNS_MIN, AHEAD_VALUES // max(1, min(size, first_end - first_start)))
        # As it was in the last run. Each member goes by what it has seen: only the order of messages is agreed.
        self._is_slow = True
        # For each member the messages of its part; all have as many, and the last parts are shorter, or empty.
        messages = [chunks(*part, size=size) for part in parts]
        spans = [
            [*each, *[(last, last)] * (len(messages[0]) - len(each))]
            for each, (_, last) in zip(messages, parts, strict=True)
        ]
        self._own_spans = spans[group.index]
        pairs = [
            ((group.index + distance) % num_members, (group.index - distance) % num_members)
            for distance in range(1, num_members)
        ]
        self._contributions = [
            [_Turn(to, source[slice(*spans[to][index])], of, self._landed(of, own)) for to, of in pairs]
            for index, own in enumerate(self._own_spans)
        ]
        self._results = [
            [_Turn(to, out[slice(*own)], of, out[slice(*spans[of][index])]) for to, of in pairs]
            for index, own in enumerate(self._own_spans)
        ]

    def run(self, shares: Sequence[float]) -> bool:
        """Combine, and have the result everywhere. False if something in this member's part is not finite."""
        began_s = time.perf_counter()
        all_finite = True
        contributors = [peer for peer, share in enumerate(shares) if share > 0 and peer != self._group.index]
        counts = [share > 0 for share in shares]
        for index in self._take_turns(self._contributions, counts=counts, tag=_CONTRIBUTION):
            all_finite &= self._combine(self._own_spans[index], contributors=contributors, shares=shares)
        for _ in self._take_turns(self._results, counts=[True] * len(shares), tag=_RESULT):
            pass
        moved_bytes = 2 * self._source.numel() * self._source.element_size()
        self._is_slow = moved_bytes < SLOW_BYTES_PER_S * (time.perf_counter() - began_s)
        return all_finite

    def _take_turns(
        self, messages: Sequence[Sequence[_Turn]], *, counts: Sequence[bool], tag: int
    ) -> Iterator[int]:
        """Yields the number of each message once it is here of everybody who counts; ends when all is sent."""
        group = self._group
        arriving = [
            [
                group.receive(turn.receives, of=turn.of, tag=tag)
                if counts[turn.of] and turn.receives.numel()
                else None
                for turn in turns
            ]
            for turns in messages
        ]
        leaving = chain.from_iterable(messages) if counts[group.index] else iter(())
        for turn in islice(leaving, self._ahead_turns if self._is_slow else None):
            if turn.sends.numel():
                group.send(turn.sends, to=turn.to, tag=tag)

        def send_next() -> None:
            turn = next(leaving, None)
            if turn is not None and turn.sends.numel():
                group.post(turn.sends, to=turn.to, tag=tag)

        watched = group.watch(arriving, timeout_s=MESSAGE_TIMEOUT_S, after_each=send_next)
        for index, waiting in enumerate(watched):
            group.join(waiting)
            yield index
        group.finish()

    def _landed(self, peer: int, span: Span) -> Tensor:
        """Where this member finds what a peer contributes to a span of its part."""
        first, last = span
        return self._landing[peer][first - self._start : last - self._start]

    def _combine(self, span: Span, *, contributors: Sequence[int], shares: Sequence[float]) -> bool:
        """Combine one message's worth of values, in pieces that fit the cache."""
        all_finite = True
        used = [shares[self._group.index], *(shares[peer] for peer in contributors)]
        for here, there in chunks(*span):
            rows = [self._source[here:there], *(self._landed(peer, (here, there)) for peer in contributors)]
            out = self._out[here:there]
            wide_type = WIDE_TYPES[out.dtype]
            wide = out if out.dtype == wide_type else torch.empty_like(out, dtype=wide_type)
            combine(wide, rows, used, kind=self._kind)
            all_finite &= is_finite(wide)
            if wide is not out:
                out.copy_(wide)
        return all_finite
