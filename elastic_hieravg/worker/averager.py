"""The averager of a job whose nodes come and go: a round that fails is a skipped round.

The engine counts and averages; `Generations` builds groups in the background. Here is what happens at a step
boundary: post an opening, enter a generation, run what is due, and deal with a round that failed. The training
loop never sees an exception for a lost peer. Invariant: a rank's step counter never jumps, unless it joins.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn
from torch.optim import Optimizer

from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.averaging.rounds import AveragingGroup
from elastic_hieravg.errors import InDoubtError, MembershipError, ParametersError, PeerLostError, Problem
from elastic_hieravg.events import Observe, Outcome, RoundDone, ignore
from elastic_hieravg.membership.local import Broken, Drained, Entered, FromWorker, Stop
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.opening import Entry, Opening
from elastic_hieravg.membership.records import Kind
from elastic_hieravg.metrics.catalogue import Cause
from elastic_hieravg.metrics.tally import Tally
from elastic_hieravg.plan import GroupKey, PlannedLevel
from elastic_hieravg.worker.boundary import END_DOUBT_S, END_WAIT_S, FENCE_WAIT_S, RETRY_WAIT_S, Boundary
from elastic_hieravg.worker.doubt import Doubt, Results
from elastic_hieravg.worker.generations import Generations
from elastic_hieravg.worker.hooked_gradients import HookedGradients
from elastic_hieravg.worker.keeping import Keeper
from elastic_hieravg.worker.optimizer_state import copy_state, parameters_of, take_state
from elastic_hieravg.worker.roles import Role
from elastic_hieravg.worker.ways import Entering

# A round that fails in every generation is given up after so many.
TRIES_MAX = 10

_log = logging.getLogger(__name__)


class ElasticAverager:
    def __init__(
        self,
        engine: HierarchicalAverager,
        *,
        local_rank: int,
        optimizer: Optimizer | None = None,
        tell: Callable[[FromWorker], None],
        on_change: Callable[[Adopted], None],
        tally: Tally | None = None,
        observe: Observe = ignore,
        keeper: Keeper | None = None,
    ) -> None:
        self._engine, self._keeper = engine, keeper
        self._tally = tally or Tally()
        self._observe = observe
        self._optimizer = optimizer
        self._tell = tell
        self._on_change = on_change
        self._boundary = Boundary(self._tally, step=lambda: engine.step_count)
        self._holds_model = False
        self._lost_round = False
        self._owes_round = self._is_paying = False
        self._worked = 0
        self._is_ending = self._is_ended = False
        self._is_draining = False
        self._running: PlannedLevel | None = None
        self._doubt: Doubt | None = None
        self._results = Results()
        # Steps are counted under it: nobody names a step as the next one while it is being made.
        self._counting = threading.Lock()
        self._current: Adopted | None = None
        self._dead_since: int | None = None
        self.num_committed = self.num_retried = self.num_skipped = 0
        self.generations = Generations(
            engine,
            local_rank=local_rank,
            role=self._role,
            open_way=self._opening,
            parameters=parameters_of(optimizer) if optimizer is not None else [],
            on_news=self.wake,
            on_broken=lambda key: tell(Broken(key.name)),
        )
        self._wait = partial(self._boundary.wait, self.generations)
        self._gradients = HookedGradients(engine, self.generations, tell=tell, on_lost=self._lose_gradients)

    # --- for the training loop --------------------------------------------------------------------------------

    def step(self, num_samples: float = 1) -> None:
        """Count one optimizer step over so many samples; average if that is due."""
        num_samples = float(num_samples)
        if not 0 <= num_samples < math.inf:
            raise ParametersError(
                Problem(f"averager.step(num_samples={num_samples})", "give a number of samples, 0 or more")
            )
        self._tally.step(num_samples)
        self._advance(num_samples)

    def _advance(self, num_samples: float = 0.0, *, is_empty: bool = False) -> None:
        with self._counting:
            self._engine.count(num_samples, is_empty=is_empty)
        if self._boundary.has_news or self._engine.is_due:
            with self._boundary.busy():
                self._at_boundary()
        if self._keeper is not None and self._engine.step_count >= self._keeper.next_step:
            self._keep()

    def register_hook(self, ddp_model: nn.parallel.DistributedDataParallel) -> None:
        """Average the gradients of a DDP model too: over the world during warm-up, then over the innermost
        group. On every rank, before its first step. A backward pass never raises for a lost peer.
        """
        with self._boundary.busy():
            self._gradients.register(ddp_model)

    @property
    def num_local_gradients(self) -> int:
        """Backward passes that used this rank's own gradients because a peer was lost."""
        return self._engine.num_local_gradients

    @property
    def step_count(self) -> int:
        """The job's steps; behind the loop, once the end is agreed, the last one that anybody trained."""
        engine, is_over = self._engine, self._is_ending and self.is_ended
        return engine.trained_at_end if is_over else engine.step_count

    @property
    def is_ended(self) -> bool:
        """The end was agreed by all in a global round, or the job was ended from outside."""
        return self._is_ended or self._boundary.stopped is not None

    @property
    def is_busy(self) -> bool:
        """Whether it is in a round, or waits for others: then no step can be made."""
        return self._boundary.is_busy or self._engine.is_waiting

    @property
    def doing(self) -> str:
        """What it does at the moment, a word for people."""
        if not self._holds_model:
            return "joining"
        if self._running is not None:
            return "averaging"
        return "waiting" if self.is_busy else "training"

    @property
    def rank(self) -> int:
        return self._engine.rank

    def hold_alone(self) -> None:
        """There is no agent: this rank is the whole job."""
        self._holds_model = True

    def join(self) -> None:
        """Wait until this rank is in the job and has the model. `SystemExit` if the job is over before."""
        self._tally.resume(Cause.START)
        with self._boundary.busy():
            self._await_model()

    def finish(self) -> None:
        """The training loop has ended: have the last global round with everybody."""
        self._is_ending = True
        self._tally.resume(Cause.QUIET)
        self._gradients.end()
        deadline_s, num_committed = time.monotonic() + END_WAIT_S, self.num_committed
        while not self._is_ended and self._boundary.stopped is None:
            if num_committed != self.num_committed:
                deadline_s, num_committed = time.monotonic() + END_WAIT_S, self.num_committed
            if time.monotonic() > deadline_s:
                raise MembershipError(
                    Problem(f"the last round did not come within {END_WAIT_S:.0f} s", "read the others' logs")
                )
            if not self._engine.plan.levels and self.generations.newest_number <= self._number:
                # Alone: nobody else has to agree.
                self._is_ended = True
                return
            if self._must_wait():
                # Not by empty steps: whoever still trains would have to make them all.
                with self._boundary.busy():
                    self._wait(lambda: not self._must_wait(), timeout_s=RETRY_WAIT_S, can_enter=True)
            else:
                # An empty step, no part of what is measured: who still trains is on the way to the same round.
                self._tally.resume(Cause.AVERAGING)
                self._advance(is_empty=True)

    def close(self) -> None:
        self.generations.close()
        self._engine.close()
        if self._keeper is not None:
            self._keeper.close()

    # --- from other threads -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the training thread look at the next boundary, or now if it waits at one."""
        self._boundary.has_news = True
        with self.generations.changed:
            self.generations.changed.notify_all()

    def _opening(self, kind: Kind) -> Opening | None:
        """Where this rank stands, said by the thread that makes the way; None if that is not known now.

        A rank that waits at a boundary can enter there; one that goes on, after its next step. In a round that
        is about to fail, whether its result was taken is known in a moment.
        """
        level = self._running
        if level is not None and self._engine.is_over(level):
            return None
        with self._counting:
            self._boundary.has_news = True
            is_out = self._holds_model and self._boundary.is_fenced
            # Without the model it makes no steps, even if it does not wait yet.
            is_still = level is None and (self._boundary.is_waiting or not self._holds_model)
            return Opening(
                self._engine.step_count + (0 if is_still else 1),
                holds_model=self._holds_model and not is_out,
                wants_round=self._lost_round or kind is Kind.ROUND,
                committed=self._results.known(self._engine.rounds_committed()),
                worked=(is_out and self._number) or self._worked,
            )

    def _lose_gradients(self) -> None:
        self._lost_round = True  # Replicas may differ where they should not: a round mends that.
        self.wake()

    def fence(self) -> None:
        self._boundary.is_fenced = True
        self.generations.fenced()
        self.wake()

    def drain(self) -> None:
        """The node leaves after the round that is made for it."""
        self._is_draining = True

    def stop(self, stop: Stop) -> None:
        self._boundary.stopped = stop
        self.generations.give_up()
        self._engine.cut(self._engine.keys)
        self.wake()

    # --- a step boundary --------------------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        return self._current.generation.number if self._current else 0

    def _at_boundary(self) -> None:
        self._boundary.has_news = False
        if self._boundary.stopped is not None:
            return
        if self._boundary.is_fenced:
            self._rejoin()
        # A held rank waits where it stands, and says so; one that goes on says where it will be.
        self._hold()
        self._enter_if_time(can_wait=False)
        for _ in range(TRIES_MAX):
            if not self._engine.is_due or self._boundary.stopped is not None:
                break
            if not self._run(self._engine.due_level()):
                break
        self._hold()
        if self._boundary.is_fenced:
            self._rejoin()
        # While a generation is on its way, every boundary is looked at.
        self._boundary.has_news |= self.generations.newest_number > self._number

    def _enter_if_time(self, *, can_wait: bool) -> bool:
        """Hand optimizer state over if it is wanted, and enter a generation whose step has come."""
        generations, step = self.generations, self._engine.step_count
        if generations.is_state_wanted:
            generations.post_state(copy_state(self._optimizer, step=step))
        posted = generations.posted_step
        if posted is not None and posted <= step and not can_wait:
            self._wait(lambda: generations.posted_step is None, timeout_s=FENCE_WAIT_S)
        entering = generations.entering
        if entering is not None and 0 < self._worked == entering.entry.owners:
            self._regain(entering.entry)
        if entering is None or (self._holds_model and step < entering.entry.step):
            return False
        taken = generations.take(entering)
        if taken is None:
            # A newer generation came in between.
            return False
        self._enter(entering, taken)
        self._run_owed()
        return True

    def _regain(self, entry: Entry) -> None:
        """All were taken out at once while they lived, and nobody went on: what this rank has counts."""
        self._holds_model = True
        self._settle(entry)

    def _run_owed(self) -> None:
        """Run the round with which a generation begins; after one that failed, the next generation's."""
        if not self._is_paying:
            self._is_paying = True
            try:
                while self._owes_round:
                    self._owes_round = False
                    self._run(self._engine.plan.levels[-1])
            finally:
                self._is_paying = False

    def _set_running(self, level: PlannedLevel | None) -> None:
        with self.generations.changed:
            self._running = level
            self.generations.changed.notify_all()

    def _enter(self, entering: Entering, built: Mapping[GroupKey, AveragingGroup]) -> None:
        engine, entry = self._engine, entering.entry
        self._settle(entry)
        if entering.state is not None and not self._holds_model:
            take_state(self._optimizer, entering.state, step=entry.step)
        self._results.leave(engine.rounds_committed())
        engine.switch(
            entering.adopted.plan,
            rank=entering.rank,
            wanted=entering.wanted,
            built=built,
            gradients=entering.gradients,
            # Everybody is at this boundary, and nobody has run what is due here.
            after_step=engine.step_count - 1,
        )
        self._current = entering.adopted
        self._dead_since, self._worked = None, 0
        if entry.is_ownerless and not entry.owners:
            # Snapshots count, of those who have come the farthest.
            self._holds_model = 0 < entry.step == engine.step_count
        self._tell(Entered(entering.adopted.generation.number))
        self._on_change(entering.adopted)
        self._owes_round = entry.is_round_wanted and bool(engine.plan.levels)
        if not engine.plan.levels:
            self._holds_model, self._lost_round = True, False
        if self._keeper is not None:
            self._keeper.next_step = math.inf if engine.plan.levels else engine.step_count

    def _keep(self) -> None:
        if self._keeper is not None:
            plan, step = self._engine.plan, self.step_count
            self._keeper.keep_if_only(plan, step=step, generation=self._number)

    def _role(self) -> Role:
        engine = self._engine
        return Role(
            engine.step_count,
            holds_model=self._holds_model and not self._boundary.is_fenced,
            is_hooked=engine.is_hooked,
            gradients=tuple(key.name for key in engine.gradient_keys),
            is_ending=self._is_ending,
        )

    def _run(self, level: PlannedLevel) -> bool:
        """Run a round; if it fails wait for the next generation. False if the round is given up."""
        engine = self._engine
        if engine.is_over(level):
            return self._failed(level)
        began_s = time.perf_counter()
        try:
            self._set_running(level)
            try:
                done = engine.run(level, holds_model=self._holds_model, is_ending=self._is_ending)
            finally:
                self._set_running(None)
        except PeerLostError as exc:
            seconds, why = time.perf_counter() - began_s, exc.problems[0].message
            _log.info("a round of level %s failed at step %s: %s", level.name, engine.step_count, why)
            failed = RoundDone(level.name, engine.step_count, Outcome.FAILED, seconds=seconds)
            if isinstance(exc, InDoubtError):
                self._doubt = Doubt(level, failed)
                return self._failed(level, doubt=self._doubt)
            self._observe(failed)
            return self._failed(level)
        if done is not None and done.outcome is Outcome.SKIPPED:
            # Nobody had anything to give; who has no model yet cannot go on without.
            self.num_skipped += 1
            return self._holds_model or self._failed(level)
        is_global = level is engine.plan.levels[-1]
        self._holds_model |= is_global
        self._committed(level)
        if is_global:
            self._leave_if_drained()
        return True

    def _committed(self, level: PlannedLevel) -> None:
        engine = self._engine
        self._lost_round = False
        self.num_committed += 1
        if level is engine.plan.levels[-1]:
            assert engine.agreed is not None
            self._is_ended |= engine.agreed.is_ending
            if self._holds_model:
                self._keep()

    def _settle(self, entry: Entry | None) -> None:
        """Take the result that is in doubt, if any is and somebody took it: only now the round is told."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            self._observe(doubt.settle(self._engine, entry, stopped=self._boundary.stopped))
            if doubt.is_taken:
                self._committed(doubt.level)

    def _failed(self, level: PlannedLevel, *, doubt: Doubt | None = None) -> bool:
        """A round failed: try once more in the next generation, or go on without it."""
        engine = self._engine
        key = engine.key_of(level)
        if key is not None:
            engine.cut([key])
            self._tell(Broken(key.name))
        self._lost_round = True
        number = self._number
        if doubt is not None:
            # What was said before the doubt does not tell what became of this round.
            self.generations.withdraw()
        self._wait(
            lambda: self._enter_if_time(can_wait=True) or self._number != number or self._has_passed(),
            timeout_s=self._retry_s(in_doubt=doubt is not None),
            can_enter=True,
        )
        if self._number != number:
            self.num_retried += doubt is None or not doubt.is_taken
            return True
        self._dead_since = number
        if doubt is not None:
            if self._boundary.is_fenced:
                # What became of it is known when this rank is back.
                return False
            entering = self.generations.entering
            self._settle(entering.entry if entering is not None else None)
            if doubt.is_taken:
                return True
        self.num_skipped += 1
        self._observe(RoundDone(level.name, engine.step_count, Outcome.SKIPPED))
        if level in engine.plan.levels:
            engine.skip(level, after_step=engine.step_count)
        return False

    def _retry_s(self, *, in_doubt: bool) -> float:
        """How long to wait for the next generation."""
        if not self._holds_model:
            return math.inf
        if in_doubt:
            # The others may have had the last round, and be gone: then only the end of the job tells.
            return END_DOUBT_S if self._is_ending else RETRY_WAIT_S
        # Waited for in vain already: the store may be away for long.
        return 0.0 if self._dead_since == self._number else RETRY_WAIT_S

    def _must_wait(self) -> bool:
        """Whether a rank whose loop has ended waits where it stands, for the next generation."""
        if self._enter_if_time(can_wait=True) or self._boundary.stopped is not None or self._boundary.is_fenced:
            return False
        levels = self._engine.plan.levels
        is_dead = bool(levels) and self._engine.is_over(levels[-1])
        return (is_dead or self.generations.newest_number > self._number) and not self._has_passed()

    def _has_passed(self) -> bool:
        """Whether the others are at a later step already: then this rank goes on to meet them there."""
        entering = self.generations.entering
        return entering is not None and self._holds_model and entering.entry.step > self._engine.step_count

    def _leave_if_drained(self) -> None:
        """What this rank did is in the others' models now; a further step would be lost."""
        if self._is_draining and self._current is not None and self._current.generation.kind is Kind.ROUND:
            self._tell(Drained())
            self._wait(lambda: False, timeout_s=math.inf)

    def _hold(self) -> None:
        """Wait while the job has too few nodes, or does not fit its hierarchy."""
        while self._boundary.stopped is None and self._current is not None and self._current.generation.hold:
            self._wait(
                lambda: self._enter_if_time(can_wait=True) or self._has_passed(),
                timeout_s=math.inf,
                can_enter=True,
            )
            if self._has_passed() or self._boundary.is_fenced:
                # The others went on in a generation that this rank has missed.
                return

    def _rejoin(self) -> None:
        """This node was out while it lived: its model is as good as none, unless nobody else has any."""
        if self._holds_model:
            self._worked = self._number or self._worked
        self._holds_model, self._current = False, None
        self._await_model()

    def _await_model(self) -> None:
        while not self._holds_model and self._boundary.stopped is None:
            # Out once more while it waits: then it waits for a generation with its next incarnation.
            self._boundary.is_fenced = False
            self._wait(
                lambda: (self._enter_if_time(can_wait=True), self._holds_model)[1],
                timeout_s=math.inf,
                can_enter=True,
                cause=Cause.RENDEZVOUS,
            )
        if not self._holds_model:
            # The job is over, and this rank has no model: nothing it would do with it is right.
            raise SystemExit(int(not (self._boundary.stopped and self._boundary.stopped.is_success)))
        self._hold()
