"""Gradient averaging for DDP: over the world during warm-up, over the innermost group afterwards.

It goes by the averager's own step, so that the two can never drift apart. What travels are chunks of our own,
in the order of the model's parameters: DDP lays its buckets out anew after a process's first backward pass, so
those of a rank that has just joined are not like the others'. A backward pass never raises: after a chunk that
failed, the rest of that pass keeps this rank's own gradients, and that is counted. Invariant: gradients change
only when their mean is whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import GradBucket, Work

from elastic_hieravg.averaging.groups import Group
from elastic_hieravg.errors import PeerLostError
from elastic_hieravg.plan import GroupKey, Plan, PlannedLevel

# As DDP's own buckets: large enough for the network, small enough to travel beside the rest of the pass.
CHUNK_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Company:
    """Whom this rank averages gradients with. Company without a group: it could not be built."""

    num_ranks: int = 1
    group: Group | None = None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Parameters whose gradients travel together; `places` are theirs in `mean`."""

    parameters: tuple[int, ...]
    places: tuple[Tensor, ...]
    mean: Tensor


@dataclass(slots=True)
class _Pass:
    """A backward pass: the gradients that are there, by parameter, and what is on its way."""

    company: Company
    is_local: bool = False
    gradients: dict[int, Tensor] = field(default_factory=dict)
    waiting: list[tuple[torch.futures.Future[Tensor], Tensor]] = field(default_factory=list)
    started: list[Work] = field(default_factory=list)


class GradientHook:
    """The state of the hook. `parameters` are the model's, in its own order, the same on every rank.

    `on_lost` is told a group that failed, and why.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        is_warmup: Callable[[], bool],
        on_lost: Callable[[Group, str], None],
    ) -> None:
        self._world = self._innermost = Company()
        # The last ones first: that is about the order in which gradients come.
        self._order = {id(parameter): index for index, parameter in enumerate(reversed(list(parameters)))}
        self._is_warmup = is_warmup
        self._on_lost = on_lost
        self._chunks: tuple[_Chunk, ...] = ()
        self._pass: _Pass | None = None
        # Backward passes that used this rank's own gradients, in part at least, though it has company.
        self.num_local = 0
        # Whether the backward pass waits for others' gradients at the moment.
        self.is_waiting = False

    def replace(self, world: Company, innermost: Company) -> None:
        """Use other groups from the next backward pass on."""
        self._world, self._innermost = world, innermost

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket's gradients along; with the last one wait until all are averaged, or are not."""
        if self._pass is None or bucket.index() == 0:
            self._pass = _Pass(self._world if self._is_warmup() else self._innermost)
        now = self._pass
        if now.company.num_ranks == 1:
            return _done(bucket.buffer())
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            now.gradients[self._order[id(parameter)]] = gradient
        future: torch.futures.Future[Tensor] = _future(bucket.buffer())
        now.waiting.append((future, bucket.buffer()))
        if bucket.is_last() and not self._fits(now.gradients):
            self._chunks = tuple(_chunks(now.gradients))
        self._start(now)
        if bucket.is_last():
            self._finish(now)
            self._pass = None
        return future

    def _fits(self, gradients: Mapping[int, Tensor]) -> bool:
        """Whether the chunks are those of these gradients. They are not in a process's first pass."""
        found = [parameter for chunk in self._chunks for parameter in chunk.parameters]
        return found == sorted(gradients)

    def _start(self, now: _Pass) -> None:
        """Send the chunks that are whole, in the order that is the same everywhere."""
        group = now.company.group
        if group is None or group.is_over or now.is_local:
            now.is_local = True
            return
        for chunk in self._chunks[len(now.started) :]:
            if not all(parameter in now.gradients for parameter in chunk.parameters):
                return
            # Divided first, as DDP does: the sum stays in range.
            for parameter, place in zip(chunk.parameters, chunk.places, strict=True):
                torch.div(now.gradients[parameter], now.company.num_ranks, out=place)
            try:
                now.started.append(group.all_reduce(chunk.mean))
            except PeerLostError as exc:
                self._lose(now, group, exc)
                return

    def _finish(self, now: _Pass) -> None:
        """Take the means, up to the first that failed, and let DDP go on."""
        group = now.company.group
        # Once a chunk could not be sent, those before it were ended too.
        works = [] if now.is_local else now.started
        for chunk, work in zip(self._chunks, works, strict=False):
            assert group is not None
            try:
                self.is_waiting = True
                group.wait([work])
            except PeerLostError as exc:
                self._lose(now, group, exc)
                break
            finally:
                self.is_waiting = False
            for parameter, place in zip(chunk.parameters, chunk.places, strict=True):
                now.gradients[parameter].copy_(place)
        self.num_local += now.is_local
        for future, gradients in now.waiting:
            future.set_result(gradients)

    def _lose(self, now: _Pass, group: Group, error: PeerLostError) -> None:
        now.is_local = True
        self._on_lost(group, error.problems[0].message)


def average_gradients(hook: GradientHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The function that DDP calls, bucket by bucket, the first one first."""
    return hook.reduce(bucket)


def gradient_levels(
    plan: Plan, wanted: Mapping[str, GroupKey], *, is_warmup: bool
) -> dict[GroupKey, PlannedLevel]:
    """The groups over which gradients are averaged, innermost first; the world's only for the warm-up."""
    levels = (plan.levels[:1] + plan.levels[-1:]) if is_warmup else plan.levels[:1]
    return {wanted[level.name]: level for level in levels if level.name in wanted}


def _chunks(gradients: Mapping[int, Tensor]) -> Iterable[_Chunk]:
    """Gradients of one type and device, in order, as many as a chunk holds."""
    members: list[int] = []
    num_bytes = 0
    for parameter in sorted(gradients):
        gradient = gradients[parameter]
        if members:
            last = gradients[members[-1]]
            is_alike = (last.dtype, last.device) == (gradient.dtype, gradient.device)
            if not is_alike or num_bytes + gradient.nbytes > CHUNK_BYTES:
                yield _chunk([(member, gradients[member]) for member in members])
                members, num_bytes = [], 0
        members.append(parameter)
        num_bytes += gradient.nbytes
    if members:
        yield _chunk([(member, gradients[member]) for member in members])


def _chunk(members: Sequence[tuple[int, Tensor]]) -> _Chunk:
    first = members[0][1]
    mean = torch.empty(sum(each.numel() for _, each in members), dtype=first.dtype, device=first.device)
    places = torch.split(mean, [each.numel() for _, each in members])
    return _Chunk(
        tuple(parameter for parameter, _ in members),
        tuple(place.view(each.shape) for place, (_, each) in zip(places, members, strict=True)),
        mean,
    )


def _future(gradients: Tensor) -> torch.futures.Future[Tensor]:
    devices: list[int | str | torch.device] = [gradients.device]
    return torch.futures.Future(devices=devices if gradients.device.type != "cpu" else None)


def _done(gradients: Tensor) -> torch.futures.Future[Tensor]:
    done = _future(gradients)
    done.set_result(gradients)
    return done
