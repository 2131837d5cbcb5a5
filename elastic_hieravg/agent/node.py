"""A node between its membership and its workers, while these keep running: in-place membership.

The membership says which generation there is; the workers are told, and what they say goes back. A worker that
dies takes the node out; its agent starts all of them anew, and the node joins again. Invariant: the node counts
only while every one of its workers is connected and ready.
"""

import logging
import math
import os
import threading
import time

from elastic_hieravg.agent.channel import WorkerChannel
from elastic_hieravg.agent.hangs import AwakeClock, Pulse
from elastic_hieravg.agent.joins import Joins
from elastic_hieravg.agent.telemetry import Telemetry
from elastic_hieravg.config import HIERARCHY_VARIABLE, OWNER_VARIABLE
from elastic_hieravg.membership.decisions import Policy, View
from elastic_hieravg.membership.embedded import EmbeddedServer
from elastic_hieravg.membership.kv import KeyValue
from elastic_hieravg.membership.local import (
    Broken,
    Bye,
    Drain,
    Drained,
    Entered,
    Fence,
    Follow,
    FromWorker,
    Hello,
    Measured,
    Progress,
    Raised,
    Ready,
    Stop,
)
from elastic_hieravg.membership.messages import Adopted, Candidate, Ended, Failed, Fenced, Notice, Warned
from elastic_hieravg.membership.records import Bounds, Closing, Kind, StoreOffer
from elastic_hieravg.membership.service import Membership, Status, StoreAway, StoreBack
from elastic_hieravg.membership.snapshot_files import Owner, remove_of, remove_stale
from elastic_hieravg.plan import change_text, difference

POLL_S = 1.0
# What this node waits for is told once it has waited for so long.
WAITING_TOLD_S = 3.0
CLOSE_TIMEOUT_S = 10.0
# Nobody watches the store of the groups.
GROUPS_HISTORY_MAX = 100

_log = logging.getLogger(__name__)


class InPlaceNode:
    """`variables` is what the workers need in their environment. `telemetry` is told of everything."""

    def __init__(
        self,
        kv: KeyValue,
        candidate: Candidate,
        *,
        run_id: str,
        policy: Policy,
        lease_ttl_s: float,
        telemetry: Telemetry,
        hang_timeout_s: float | None = None,
    ) -> None:
        self.telemetry = telemetry
        self._hang_timeout_s = hang_timeout_s
        self._policy = policy
        self._address = candidate.address
        self._slots = candidate.slots
        self._lock = threading.RLock()
        self._ready: set[int] = set()
        self._entered: dict[int, int] = {}
        self._done: set[int] = set()
        self._pids: dict[int, int] = {}
        self._pulses: dict[int, Pulse] = {}
        self._clock = AwakeClock()
        self._drained: set[int] = set()
        self._is_draining = False
        self._raised = ""
        self._has_stepped = self._has_ever_stepped = False
        self._joins = Joins(candidate.slots)
        self._is_stopping = self._is_leaving = self._is_loss_told = False
        self._waiting = ("", 0.0)
        self._first_steps: dict[int, int] = {}
        self.done_s = 0.0
        self._told = 0
        self._adopted: Adopted | None = None
        self._closed = threading.Event()
        self._groups = EmbeddedServer(candidate.address, 0, run_id="groups", history_max=GROUPS_HISTORY_MAX)
        self._channel = WorkerChannel(on_message=self._heard, on_gone=self._gone)
        self._owner = Owner.of_process(os.getpid())
        self.variables = self._channel.variables | {
            HIERARCHY_VARIABLE: str(policy.job.hierarchy),
            OWNER_VARIABLE: str(self._owner),
        }
        remove_stale(time.time())
        self._membership = Membership(
            kv,
            candidate,
            run_id=run_id,
            policy=policy,
            lease_ttl_s=lease_ttl_s,
            observe=self._observe,
            on_view=self._viewed,
        )
        self._relay = threading.Thread(target=self._follow, name="hieravg-relay", daemon=True)
        self._relay.start()

    # --- for the agent ----------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        return self._membership.status

    def workers_start(self, *, is_first: bool) -> None:
        """All workers of the node are about to start, for the first time or anew."""
        self.telemetry.workers_start()
        with self._lock:
            self._ready.clear()
            self._entered.clear()
            self._done.clear()
            self._pids.clear()
            self._pulses.clear()
            self._raised, self._has_stepped = "", False
            self._is_stopping = self._is_loss_told = False
            self._joins.start(self._clock.read(time.monotonic()))
            self._first_steps.clear()
            if not is_first:
                self._renew()

    def workers_stop(self) -> None:
        """The workers are asked to end: that they do is no news."""
        self._is_stopping = True

    @property
    def has_joined(self) -> bool:
        """Whether any worker has ever called `eh.join()`, or `eh.attach()`."""
        return self._joins.has_any

    def late_to_join(self) -> tuple[int, ...]:
        """The local ranks that run for long and have not joined; once."""
        with self._lock:
            return self._joins.late(self._clock.read(time.monotonic()))

    @property
    def nodes_max(self) -> int:
        return (self.status.bounds or self._policy.job.bounds).nodes_max

    @property
    def is_done(self) -> bool:
        """Whether every worker's training loop has ended; `done_s` says when the last did."""
        return len(self._done) == self._slots

    @property
    def raised(self) -> str:
        """The traceback with which the training script ended, if it did."""
        return self._raised

    @property
    def has_stepped(self) -> bool:
        """Whether the workers have made a step since they started."""
        return self._has_stepped

    @property
    def is_newcomer(self) -> bool:
        """Whether there are others, in a job of which this node has never been a part."""
        return not self._has_ever_stepped and self.status.newest_number > 0 and self.status.num_others > 0

    def why_not_ready(self) -> str:
        """Why this node does not work in the newest generation; nothing if it does."""
        status = self._membership.status
        if status.ended is not None or status.error is not None:
            return "the job is over"
        if status.adopted is None or not status.is_listed:
            return f"this node is in no generation: {status.decision.reason}"
        number = status.newest_number
        with self._lock:
            behind = [rank for rank in range(self._slots) if self._entered.get(rank, 0) < number]
        return f"workers {behind} are not in generation {number} yet" if behind else ""

    def hung_worker(self) -> tuple[int, int, float] | None:
        """A worker that hangs: its local rank, its process id, and for how long it has stood still."""
        with self._lock:
            now_s = self._clock.read(time.monotonic())
            for local_rank, pulse in self._pulses.items():
                process_id = self._pids.get(local_rank)
                is_done = local_rank in self._done
                if process_id is not None and not is_done and pulse.hangs(now_s):
                    return local_rank, process_id, pulse.stands_still_s(now_s)
        return None

    def finish(self, closing: Closing) -> bool:
        """The job is over for everybody."""
        return self._membership.end_job(closing, timeout_s=CLOSE_TIMEOUT_S)

    def drain(self) -> None:
        """This node is about to leave: have everybody meet for one more round, with its work in it."""
        if self._membership.status.is_listed and self._entered:
            self._is_draining = True
            self._channel.tell(Drain())
            self._membership.ask_round()

    @property
    def is_draining(self) -> bool:
        """Whether there is something for the others to have, and they were asked for a round with it."""
        return self._is_draining

    @property
    def is_shared(self) -> bool:
        """Whether everything this node did is in the others' models."""
        return len(self._drained) == self._slots

    @property
    def is_drained(self) -> bool:
        """Whether everything this node did is in the others' models, or nothing can be."""
        status = self._membership.status
        is_in = status.is_listed and status.adopted is not None and bool(self._entered)
        is_alone = status.adopted is not None and len(status.adopted.generation.members) == 1
        return not is_in or is_alone or self.is_shared

    def change_bounds(self, bounds: Bounds) -> None:
        """Have the job run with other bounds from now on, for everybody."""
        self._membership.change_bounds(bounds)

    def leave(self, *, timeout_s: float) -> bool:
        """Go on purpose; True once a generation without this node is written, or nobody is left to."""
        # Its workers end next: it does not come back as another incarnation.
        self._is_leaving = True
        if self.status.num_others == 0:
            return True
        return self._membership.leave(timeout_s=timeout_s)

    def close(self) -> None:
        self._closed.set()
        self._relay.join()
        self._membership.close()
        self._channel.close()
        self._groups.close()
        if self._owner is not None:
            remove_of(self._owner)

    # --- from the workers -------------------------------------------------------------------------------------

    def _heard(self, local_rank: int, process_id: int, message: FromWorker) -> None:
        if isinstance(message, Measured):
            self.telemetry.measured(local_rank, process_id, message.samples)
            return
        with self._lock:
            match message:
                case Ready():
                    self._ready.add(local_rank)
                    if len(self._ready) == self._slots:
                        self._membership.ready()
                case Entered(number):
                    self._entered[local_rank] = number
                    if len(self._entered) == self._slots:
                        self._membership.enter(min(self._entered.values()))
                        self.telemetry.entered(min(self._entered.values()))
                case Broken(group):
                    self._membership.report_broken(group)
                case _:
                    self._note(local_rank, process_id, message)

    def _note(self, local_rank: int, process_id: int, message: FromWorker) -> None:
        """What a worker says of itself, that nobody else needs to know."""
        match message:
            case Hello():
                self._joins.join(local_rank)
                self._pids[local_rank] = process_id
                self.telemetry.worker_came(local_rank, process_id)
            case Progress(step, is_excused):
                pulse = self._pulses.setdefault(local_rank, Pulse(self._hang_timeout_s))
                pulse.report(self._clock.read(time.monotonic()), step=step, is_excused=is_excused)
                # A worker that joins begins at the job's step: that is no step of its own yet.
                if not is_excused and step > self._first_steps.setdefault(local_rank, step):
                    self._has_stepped = True
                self._has_ever_stepped |= self._has_stepped
            case Drained():
                self._drained.add(local_rank)
            case Raised(text):
                self._raised = text
            case Bye():
                self._done.add(local_rank)
                self.done_s = time.monotonic()
                self.telemetry.worker_done(local_rank)

    def _gone(self, local_rank: int, process_id: int) -> None:
        """A worker's connection ended. Known at once here; its exit code comes later."""
        self.telemetry.worker_gone(local_rank, process_id)
        with self._lock:
            if self._pids.get(local_rank) != process_id or local_rank in self._done:
                return
            if not self._is_stopping and not self._is_loss_told:
                # torch ends the others with the first; that is the news.
                self._is_loss_told = True
                _log.warning(
                    "worker %s (process %s) has ended before its training was done", local_rank, process_id
                )
            self._pids.pop(local_rank)
            if self._ready and not self._is_leaving:
                self._ready.clear()
                self._entered.clear()
                self._renew()

    def _renew(self) -> None:
        """The node is out until its workers are ready again."""
        self._told = 0
        self._membership.renew(is_ready=False)

    # --- from the membership ----------------------------------------------------------------------------------

    def _viewed(self, view: View) -> None:
        self.telemetry.viewed(view, self._ended_s)

    def _ended_s(self, incarnation: str) -> float | None:
        return self._membership.ended_s(incarnation)

    def _observe(self, notice: Notice | StoreAway | StoreBack) -> None:
        self.telemetry.noticed(notice)
        match notice:
            case Adopted(generation):
                self._log_change(notice)
                if self._is_draining and generation.kind is not Kind.ROUND:
                    # Somebody was lost before the round could be; it is asked for once more.
                    self._membership.ask_round()
                if generation.members[0].node_id == self._membership.status.node.node_id:
                    offer = StoreOffer(generation.number, self._address, self._groups.port)
                    self._membership.offer_store(offer)
            case Fenced():
                _log.warning(
                    "the others did not hear from this node in time and took it out of the job; it joins again"
                )
                with self._lock:
                    self._told = 0
                    self._entered.clear()
                self._channel.tell(Fence())
            case Ended(closing):
                self._channel.tell(Stop(closing.is_success, closing.reason))
            case Failed(error):
                self._channel.tell(Stop(False, str(error)))
            case StoreAway(why):
                _log.warning(
                    "the store does not answer; training goes on, "
                    "but no node can join or leave until it does: %s",
                    why,
                    extra={"reason": why},
                )
            case StoreBack():
                _log.warning("the store answers again")
            case Warned(text):
                _log.warning("%s", text)

    def _log_change(self, adopted: Adopted) -> None:
        """What differs from the generation before, and what the plan had to repair."""
        generation, before = adopted.generation, self._adopted
        self._adopted = adopted
        reason = {"reason": generation.reason}
        _log.info("generation %s, %s: %s", generation.number, generation.kind, generation.reason, extra=reason)
        if before is not None:
            change = difference(before.plan, adopted.plan, keys=before.keys)
            _log.info("%s", change_text(change))
        known = before.plan.notes if before else ()
        for note in (each for each in adopted.plan.notes if each not in known):
            _log.info("generation %s: %s", generation.number, note.reason)
        if generation.hold:
            hold = {"reason": generation.hold}
            _log.warning("training pauses in generation %s: %s", generation.number, generation.hold, extra=hold)

    def _follow(self) -> None:
        """Tell the workers of a generation as soon as its group store is known."""
        while not self._closed.is_set():
            if self._membership.wait(self._is_new, timeout_s=POLL_S):
                self._tell(self._membership.status)
            self._log_waiting(time.monotonic())

    def _log_waiting(self, now_s: float) -> None:
        """Say once, after a moment, what a node waits for that is in no generation."""
        status = self._membership.status
        reason, since_s = self._waiting
        # As long as its own workers start there is nothing that others could do.
        is_ready = len(self._ready) == self._slots
        if not is_ready or status.is_listed or status.ended is not None or status.error is not None:
            self._waiting = ("", math.inf)
        elif status.decision.reason != reason:
            self._waiting = (status.decision.reason, now_s)
        elif now_s > since_s + WAITING_TOLD_S:
            self._waiting = (reason, math.inf)
            _log.info("this node waits: %s", reason)

    def _is_new(self, status: Status) -> bool:
        adopted, offer = status.adopted, status.offer
        return (
            adopted is not None
            and offer is not None
            and offer.generation == adopted.generation.number > self._told
            and adopted.generation.lists(status.node)
        )

    def _tell(self, status: Status) -> None:
        adopted, offer = status.adopted, status.offer
        assert adopted is not None
        assert offer is not None
        with self._lock:
            self._told = adopted.generation.number
            self._channel.tell(
                Follow(
                    self._policy.job.to_json(),
                    adopted.generation.to_json(),
                    offer.address,
                    offer.port,
                    status.node.node_id,
                )
            )
