"""One round of one group: header, payload, verdict, commit.

Parameters change only in the commit, and only after the whole result is there and everybody said so.
A failure before that leaves them as they were. Invariant: a group that failed once is never used again.
"""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store

from elastic_hieravg.averaging.flat import FlatModel, first_difference
from elastic_hieravg.averaging.header import Agreement, Header, Verdict, agree
from elastic_hieravg.averaging.kernels import Divergence
from elastic_hieravg.averaging.mesh import Mesh, Peer, lost, read_key
from elastic_hieravg.averaging.reducers import Reducer, build_reducer
from elastic_hieravg.errors import DifferentTensorsError, InDoubtError, PeerLostError, Problem
from elastic_hieravg.events import Outcome, RoundDone

TIMEOUT_S = 30.0
_YES, _NO = b"\1", b"\0"


@dataclass(frozen=True, slots=True)
class Contribution:
    """What this rank says of itself in a round's header. `samples` as in `Header`."""

    step: int
    samples: tuple[float, ...]
    holds_model: bool = True
    generation: int = 0
    trained: int = 0
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class _Payload:
    """How the payload ended: whether there is a result to commit, and what was found on the way."""

    agreement: Agreement
    has_result: bool
    verdicts: tuple[Verdict, ...]
    num_nonfinite: int


class AveragingGroup:
    """One rank's part in a group that averages. Building it is collective over the group's ranks."""

    def __init__(
        self,
        flat: FlatModel,
        store: Store,
        *,
        level: str,
        index: int,
        peers: tuple[Peer, ...],
        timeout_s: float = TIMEOUT_S,
        build_timeout_s: float | None = None,
    ) -> None:
        """`store`: a prefix that no other group uses, now or ever. `index`: this rank's place in `peers`.

        `timeout_s`: how long this rank waits for the others in a round; `build_timeout_s`: until they are
        connected, as long if not given.
        """
        self.level = level
        self._flat = flat
        self._store = store
        self._timeout_s = timeout_s
        self._round_index = 0
        self._is_over = False
        # The last round whose result this rank took.
        self.committed_index = 0
        # What the others may have taken without this rank's knowing; set while that is so.
        self._in_doubt: Agreement | None = None
        meet_s = timeout_s if build_timeout_s is None else build_timeout_s
        self._mesh = Mesh(store, index=index, peers=peers, timeout_s=meet_s)
        try:
            self._reducer: Reducer = build_reducer(
                flat, self._mesh, store, shared=self._can_share(), timeout_s=timeout_s, meet_s=meet_s
            )
        except BaseException:
            self._mesh.close()
            raise

    def run(
        self, contribution: Contribution, *, selected: Sequence[int] | None = None
    ) -> tuple[RoundDone, Agreement]:
        """Average once. `selected`: the slots that take the result, all of them if not given.

        `PeerLostError` if a rank is lost, `ParametersError` if the tensors cannot be averaged; no parameter
        changed then. After an `InDoubtError` the result is kept for `take_result`.
        """
        if self._is_over:
            raise lost("this group", "it failed or was cut before")
        started_s = time.perf_counter()
        self._round_index += 1
        try:
            repaired = self._flat.refresh()
            headers = self._exchange_headers(contribution)
            waited_s = time.perf_counter() - started_s
            self._compare_tensors(headers)
            payload = self._run_payload(headers)
        except DifferentTensorsError:
            # Everybody sees it and nobody is in the middle of anything: the group can go on.
            raise
        except PeerLostError as exc:
            self.cut()
            if self._in_doubt is None:
                raise
            raise InDoubtError(*exc.problems) from exc
        except BaseException:
            self.cut()
            raise
        if payload.has_result:
            self._flat.take(self._reducer.results, selected=selected)
            self.committed_index = self._round_index
        done = RoundDone(
            level=self.level,
            step=contribution.step,
            outcome=Outcome.COMMITTED if payload.has_result else Outcome.SKIPPED,
            seconds=time.perf_counter() - started_s,
            wait_seconds=waited_s,
            sent_bytes=self._reducer.sent_bytes(),
            link=self._reducer.link,
            divergence_ratio=_divergence_ratio(payload.verdicts),
            num_nonfinite=payload.num_nonfinite,
            repaired=repaired,
        )
        return done, payload.agreement

    @property
    def round_index(self) -> int:
        """The rounds begun here so far; the same on every rank of the group."""
        return self._round_index

    @property
    def is_over(self) -> bool:
        return self._is_over

    def take_result(self) -> Agreement:
        """Take the result that was in doubt: somebody else has. Before `close`, and only then."""
        agreement, self._in_doubt = self._in_doubt, None
        assert agreement is not None, "nothing is in doubt"
        self._flat.take(self._reducer.results)
        self.committed_index = self._round_index
        return agreement

    def gather(self, record: bytes) -> list[bytes]:
        """Everybody's record, outside of a round."""
        return self._mesh.gather(record, timeout_s=self._timeout_s)

    def cut(self) -> None:
        """End a round in flight, here and at the peers; the group is over. Any thread may call it."""
        self._is_over = True
        self._mesh.cut()
        self._reducer.cut()

    def close(self) -> None:
        self.cut()
        self._reducer.close()
        self._mesh.close()

    def _exchange_headers(self, contribution: Contribution) -> list[Header]:
        header = Header(
            signature=self._flat.signature,
            round_index=self._round_index,
            step=contribution.step,
            generation=contribution.generation,
            holds_model=contribution.holds_model,
            samples=contribution.samples,
            trained=contribution.trained,
            is_ending=contribution.is_ending,
        )
        headers = [Header.decode(record) for record in self.gather(header.encode())]
        assert all(other.round_index == self._round_index for other in headers)
        return headers

    def _compare_tensors(self, headers: Sequence[Header]) -> None:
        """Raise the error that names the first tensor in which two ranks differ, if any do."""
        if all(header.signature == self._flat.signature for header in headers):
            return
        self._store.set(f"tensors/{self._mesh.index}", "\n".join(self._flat.lines))
        other = next(
            (index for index, header in enumerate(headers) if header.signature != self._flat.signature)
        )
        name = self._mesh.peers[other].name
        deadline_s = time.monotonic() + self._timeout_s
        written = read_key(self._store, f"tensors/{other}", of=name, deadline_s=deadline_s).decode()
        differing = first_difference(self._flat.lines, written.split("\n"))
        assert differing is not None, "signatures differ where tensors do"
        here, there = differing
        raise DifferentTensorsError(
            Problem(
                f"ranks bring different tensors to a round of level {self.level}: "
                f"the first difference is {here} on this rank and {there} on {name}",
                "build the same model on every rank; nothing was averaged",
            )
        )

    def _run_payload(self, headers: Sequence[Header]) -> _Payload:
        try:
            payload = self._combine(headers)
            if not payload.has_result or self._reducer.decide(self._round_index, commit=True):
                return payload
        except PeerLostError:
            # Somebody of this node may have heard everybody's verdict before the loss, and taken the result.
            if not self._reducer.decide(self._round_index, commit=False):
                raise
            self._in_doubt = None
            self.cut()
            return _Payload(agree(headers), has_result=True, verdicts=(), num_nonfinite=0)
        raise lost("a rank of this node", "it gave the round up")

    def _combine(self, headers: Sequence[Header]) -> _Payload:
        """Have the result beside the parameters. Twice if it turns out that some rank's values spoil it."""
        nonfinite: frozenset[int] = frozenset()
        for is_last in (False, True):
            agreement = agree(headers, nonfinite=nonfinite)
            if not any(agreement.shares):
                break
            is_finite = self._reducer.reduce(agreement.shares)
            verdicts = self._exchange_verdicts(agreement, is_finite=is_finite)
            if all(verdict.is_finite for verdict in verdicts):
                return _Payload(agreement, True, verdicts, len(nonfinite))
            if is_last:
                break
            answers = self.gather(_YES if self._flat.is_finite() else _NO)
            nonfinite = frozenset(index for index, answer in enumerate(answers) if answer[:1] == _NO)
            if not nonfinite:
                # Every copy is finite and their sum is not: there is no average to be had.
                break
        return _Payload(agreement, False, (), len(nonfinite))

    def _exchange_verdicts(self, agreement: Agreement, *, is_finite: bool) -> tuple[Verdict, ...]:
        found = self._reducer.divergence(agreement.shares) if is_finite else Divergence()
        verdict = Verdict(is_finite, found.difference_squares, found.result_squares)
        # Once this rank's verdict is out, others may have everybody's and take the result.
        self._in_doubt = agreement if is_finite else None
        records = self.gather(verdict.encode())
        self._in_doubt = None
        return tuple(Verdict.decode(record) for record in records)

    def _can_share(self) -> bool:
        """Whether every rank of the group has its tensors in memory that its node can see."""
        flat = self._flat
        node_ids = [peer.node_id for peer in self._mesh.peers]
        has_neighbours = node_ids.count(node_ids[self._mesh.index]) > 1
        if flat.shared_error and has_neighbours and not flat.has_warned:
            flat.has_warned = True
            warnings.warn(
                f"{flat.shared_error}; ranks of one node average over sockets instead, which is slower",
                RuntimeWarning,
                stacklevel=2,
            )
        mine = flat.signature + (_YES if flat.file is not None else _NO)
        return all(record[: len(mine)] == mine for record in self.gather(mine)) and flat.file is not None


def _divergence_ratio(verdicts: Sequence[Verdict]) -> float | None:
    if not verdicts:
        return None
    result_squares = sum(verdict.result_squares for verdict in verdicts)
    difference_squares = sum(verdict.difference_squares for verdict in verdicts)
    return math.sqrt(difference_squares / result_squares) if result_squares else 0.0
