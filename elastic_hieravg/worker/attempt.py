"""The averager of one attempt: a world that does not change, and a snapshot after every global round.

A lost peer ends the attempt: it is an exception in the training loop, and torchrun starts all workers anew.
They find the newest snapshot among them and all go on from there. Invariant: what a rank has kept is a model
that every rank had after the same global round.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.distributed import PrefixStore

from elastic_hieravg.averaging.averager import STATE_VERSION, HierarchicalAverager
from elastic_hieravg.errors import MembershipError, PeerLostError, Problem
from elastic_hieravg.events import Outcome
from elastic_hieravg.metrics.catalogue import Cause
from elastic_hieravg.metrics.tally import Tally
from elastic_hieravg.plan import PlannedLevel
from elastic_hieravg.worker.snapshots import Kept, Moment, Snapshot, SnapshotFile, read_state

# How long a rank that lost a peer waits for its own agent, which knows of the loss too and starts all workers
# anew without counting a failure. Only if the agent is one of ours.
AGENT_WAIT_S = 10.0
# How long the last round may take to come, from the end of a training loop on.
END_WAIT_S = 600.0
# A peer that is lost is noticed by its connection; this is for one that is busy.
ROUND_TIMEOUT_S = 3600.0
# All ranks of an attempt have met before they connect to each other.
BUILD_TIMEOUT_S = 120.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank says it has: the moment of its node's newest snapshot of this model, None if it has none."""

    moment: Moment | None

    def to_json(self) -> str:
        moment = self.moment
        return json.dumps(None if moment is None else [moment.step, moment.generation, moment.name])


def read_holding(text: str) -> Holding:
    found = json.loads(text)
    return Holding(None if found is None else Moment(*found))


def newest(holdings: Sequence[Holding]) -> Moment | None:
    """The moment that all take: the largest step. Two worlds that went on apart may both have come to it:
    then what more ranks have.

    >>> newest([Holding(Moment(8, 1, "a")), Holding(None), Holding(Moment(16, 1, "a"))]).step
    16
    """
    moments = [holding.moment for holding in holdings if holding.moment is not None]
    return max(
        moments, key=lambda each: (each.step, moments.count(each), each.generation, each.name), default=None
    )


class RestartedAverager:
    """`period_steps`: how often a rank that is alone keeps a snapshot."""

    def __init__(
        self,
        engine: HierarchicalAverager,
        *,
        kept: Kept,
        file: SnapshotFile,
        name: str,
        addresses: Mapping[str, str],
        period_steps: int,
        agent_wait_s: float,
        tally: Tally,
    ) -> None:
        self._engine = engine
        self._tally = tally
        self._kept = kept
        self._file = file
        self._name = name
        self._addresses = addresses
        self._period_steps = period_steps
        self._agent_wait_s = agent_wait_s
        self._kept_step = 0
        self._has_warned = False
        self._is_ending = False
        self._is_ended = False
        self._is_busy = False
        self._is_alone = not engine.plan.levels
        self.num_committed = self.num_retried = self.num_skipped = 0

    # --- for the training loop --------------------------------------------------------------------------------

    def step(self, num_samples: float = 1) -> None:
        """Count one optimizer step over so many samples; average if that is due.

        `PeerLostError` if a rank is lost: let it end this process.
        """
        num_samples = float(num_samples)
        if not 0 <= num_samples < math.inf:
            raise MembershipError(
                Problem(f"averager.step(num_samples={num_samples})", "give a number of samples, 0 or more")
            )
        self._tally.step(num_samples)
        self._advance(num_samples)

    def _advance(self, num_samples: float = 0.0, *, is_empty: bool = False) -> None:
        engine = self._engine
        engine.count(num_samples, is_empty=is_empty)
        if engine.is_due:
            self._run(engine.due_level())
        elif self._is_alone and engine.step_count % self._period_steps == 0:
            self._keep()

    def register_hook(self, ddp_model: nn.parallel.DistributedDataParallel) -> None:
        """Average the gradients of a DDP model too. Collective over all ranks."""
        self._engine.register_hook(ddp_model)

    @property
    def num_local_gradients(self) -> int:
        """Backward passes that used this rank's own gradients because a peer was lost."""
        return self._engine.num_local_gradients

    @property
    def step_count(self) -> int:
        """The job's steps; behind the loop, once the end is agreed, the last one that anybody trained."""
        is_over = self._is_ending and self._is_ended
        return self._engine.trained_at_end if is_over else self._engine.step_count

    @property
    def is_ended(self) -> bool:
        """The end was agreed by all in a global round."""
        return self._is_ended

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    @property
    def doing(self) -> str:
        """What it does at the moment, a word for people."""
        return "averaging" if self._is_busy else "training"

    @property
    def rank(self) -> int:
        return self._engine.rank

    def finish(self) -> None:
        """The training loop has ended: have the last global round with everybody."""
        self._is_ending = True
        self._tally.resume(Cause.QUIET)
        deadline_s = time.monotonic() + END_WAIT_S
        while not self._is_ended:
            if time.monotonic() > deadline_s:
                raise MembershipError(
                    Problem(f"the last round did not come within {END_WAIT_S:.0f} s", "read the others' logs")
                )
            if self._is_alone:
                self._is_ended = True
                self._keep()
                return
            # An empty step, no part of what is measured: who still trains is on the way to the same round.
            self._tally.resume(Cause.AVERAGING)
            self._advance(is_empty=True)

    def close(self) -> None:
        self._engine.close()
        self._file.close()

    # --- the beginning ----------------------------------------------------------------------------------------

    def begin(self, found: Snapshot | None, holdings: Sequence[Holding], store: PrefixStore) -> None:
        """Have the newest snapshot's model on all ranks, and go on from its step. Collective.

        `holdings` are everybody's, by rank; `found` is what this rank said it has.
        """
        self._tally.resume(Cause.START)
        moment = newest(holdings)
        holders = [rank for rank, each in enumerate(holdings) if moment is not None and each.moment == moment]
        engine = self._engine
        if engine.rank in holders:
            assert found is not None
            self._kept.restore(found)
            engine.load_state_dict({"version": STATE_VERSION, "step": found.state.moment.step, "samples": {}})
        if len(holders) < len(holdings) and engine.plan.levels:
            # One rank brings it, so that what comes out is the snapshot to the last bit.
            is_source = engine.rank == min(holders, default=-1)
            with self._among_peers():
                engine.run(engine.plan.levels[-1], holds_model=is_source)
                if holders:
                    self._share_optimizer(found if is_source else None, store, is_holder=engine.rank in holders)
        self._kept_step = engine.step_count
        if moment is not None:
            _log.warning(
                "training goes on from the snapshot of step %s (generation %s), which %s of %s ranks had",
                moment.step,
                moment.generation,
                len(holders),
                len(holdings),
            )

    def _share_optimizer(self, source: Snapshot | None, store: PrefixStore, *, is_holder: bool) -> None:
        """Ranks without a snapshot get the optimizer's state of the one whose model they got."""
        if source is not None:
            store.set("optimizer", source.state.to_json())
            state = source.state
            tensors = [tensor.clone() for tensor in source.tensors()[state.num_model :]]
        else:
            state = read_state(bytes(store.get("optimizer")).decode())
            tensors = [spec.zeros() for spec in state.specs[state.num_model :]]
        plan = self._engine.plan
        if tensors:
            with HierarchicalAverager(
                tensors,
                plan=plan,
                rank=self._engine.rank,
                store=PrefixStore("state", store),
                addresses=self._addresses,
                equalize=False,
                timeout_s=ROUND_TIMEOUT_S,
                build_timeout_s=BUILD_TIMEOUT_S,
            ) as averager:
                averager.run(plan.levels[-1], holds_model=source is not None)
        if not is_holder:
            self._kept.restore_optimizer(state.optimizer, tensors)

    # --- rounds -----------------------------------------------------------------------------------------------

    def _run(self, level: PlannedLevel) -> None:
        engine = self._engine
        with self._among_peers():
            done = engine.run(level, is_ending=self._is_ending)
        is_committed = done is None or done.outcome is Outcome.COMMITTED
        self.num_committed += is_committed
        self.num_skipped += not is_committed
        if level is engine.plan.levels[-1]:
            assert engine.agreed is not None
            self._is_ended |= engine.agreed.is_ending
            if is_committed:
                self._keep()

    def _keep(self) -> None:
        """Keep what everybody has now. A job trains on without snapshots if there is no room for them."""
        engine = self._engine
        if not engine.tensors:
            # A rank that starts anew may get another slot, and a part of the model is no model.
            step = engine.step_count
            self._warn(
                f"no snapshot of step {step} is kept, of a sharded model: workers that start anew begin again"
            )
            return
        moment = Moment(self.step_count, engine.plan.generation, self._name)
        try:
            self._file.write(*self._kept.state(moment))
        except OSError as exc:
            self._warn(
                f"no snapshot of step {engine.step_count} can be kept in /dev/shm: {exc}. Workers that "
                "start anew go on from an older one, or from the beginning. Give /dev/shm twice the room of "
                "model and optimizer for each worker"
            )
            return
        self._kept_step = engine.step_count
        if self._kept.left_out:
            self._warn(f"snapshots are kept without the optimizer's state: {self._kept.left_out}")

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s", text)

    @contextmanager
    def _among_peers(self) -> Iterator[None]:
        """For what needs all peers: that one is lost is told in the words of this mode."""
        self._is_busy = True
        try:
            with self._tally.spending(Cause.AVERAGING):
                yield
        except PeerLostError as exc:
            raise self._lost(exc) from exc
        finally:
            self._is_busy = False

    def _lost(self, error: PeerLostError) -> PeerLostError:
        """What the training loop is told, after its agent had the time to end this process itself."""
        _log.warning("a round failed at step %s: %s", self._engine.step_count, error.problems[0].message)
        time.sleep(self._agent_wait_s)
        return PeerLostError(
            Problem(
                f"a peer is lost at step {self._engine.step_count}: {error.problems[0].message}",
                "let this end the process: all workers are started anew, and go on from the snapshot of step "
                f"{self._kept_step}; `hieravg run --membership in-place` keeps them running instead",
            )
        )
