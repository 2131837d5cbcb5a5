"""A cluster in virtual time: agents with the real protocol code, a store, and a nemesis that breaks things.

Everything follows from the seed: the same seed is the same run, event by event. Real are `Member` and all it
decides with, the ledger, and the rule of entering; simulated are clocks, messages, processes and the ranks'
rounds. `ViolationError` is raised the moment a rule of safety is broken.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol

from elastic_hieravg.errors import LeaseLostError
from elastic_hieravg.membership.decisions import Policy
from elastic_hieravg.membership.kv import Changes, Snapshot, Write
from elastic_hieravg.membership.ledger import Ledger
from elastic_hieravg.membership.member import Member
from elastic_hieravg.membership.messages import (
    Adopted,
    Answer,
    Applied,
    Candidate,
    Ended,
    Failed,
    Fenced,
    Grant,
    Granted,
    LeaseOver,
    Notice,
    Refreshed,
    Refused,
    Request,
    Unknown,
)
from elastic_hieravg.membership.mirror import Keys
from elastic_hieravg.membership.proposing import plan_generation
from elastic_hieravg.membership.records import (
    Bounds,
    Generation,
    Job,
    Kind,
    Mode,
    read_bounds,
    read_generation,
    read_job,
)
from elastic_hieravg.plan import Hierarchy

KEYS = Keys("simulated")
LEASE_TTL_S = 3.0
CALL_TIMEOUT_S = 1.0
LATENCY_S = (0.001, 0.01)
# Some messages are overtaken by others. Two in a row still let somebody falsely accused speak up in time.
LATE_S = (0.01, 0.08)
LATE = 0.1
# How soon the end of a process is told to the peers that hold a connection to it.
TOLD_S = (0.001, 0.05)
PERIOD_STEPS = 4
# Healed, the cluster must agree within so long: a lease or two, the settling, and the round that enters.
HEALED_S = 60.0

plan_once = lru_cache(4096)(plan_generation)


class ViolationError(AssertionError):
    """A rule of safety or liveness is broken."""


@dataclass
class Story:
    """What happened in a run, for the tests to count."""

    faults: Counter[str] = field(default_factory=Counter)
    generations: Counter[Kind] = field(default_factory=Counter)
    events: int = 0
    rounds: int = 0
    entered_together: int = 0
    fenced: int = 0
    log: list[str] = field(default_factory=list)


class Checks(Protocol):
    """The rules of safety; `safety.Checks` has them."""

    def before_write(self) -> None: ...
    def after_change(self) -> None: ...
    def adopted(self, agent: "Agent", adopted: Adopted) -> None: ...
    def forget_store(self) -> None: ...


class Ranks(Protocol):
    """What runs on a node under its agent; `simulated_ranks` has them."""

    current: Adopted | None
    rounds: int

    @property
    def is_waiting(self) -> bool: ...
    def start(self) -> None: ...
    def told(self, newest: Adopted) -> None: ...
    def fenced(self) -> None: ...
    def restart(self) -> None: ...
    def fail_round(self) -> None: ...
    def is_settled(self, generation: Generation) -> bool: ...


class World:
    """Virtual time, the store, and who can talk to whom."""

    def __init__(
        self,
        seed: int,
        *,
        num_agents: int,
        mode: Mode,
        faults_s: float,
        make_checks: "Callable[[World], Checks]",
        make_ranks: "Callable[[Agent], Ranks]",
    ) -> None:
        self.random = random.Random(seed)
        self.make_ranks = make_ranks
        self.now_s = 0.0
        self.story = Story()
        self.ledger = Ledger()
        self.is_store_up = True
        self.slowness = 1.0
        self.reply_loss = 0.0
        self.faults_s = faults_s
        # Told of every request as it is sent, for a fault that has to hit that moment.
        self.sending: Callable[[Agent, Request], None] | None = None
        # Whether nothing was wrong with the store and the network so far; who was accused, and if in calm.
        self.is_calm = True
        self.falsely_accused: dict[str, bool] = {}
        self.agents: dict[str, Agent] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._incarnations = 0
        self._wipes = 0
        self._told_revision = 0
        self._expiry_at_s = 0.0
        self.checks = make_checks(self)
        nodes_min = self.random.randint(1, max(1, num_agents // 2))
        nodes_max = self.random.randint(max(nodes_min, num_agents - 1), num_agents + 1)
        hierarchy = Hierarchy.parse(f"zone=2,global={PERIOD_STEPS}")
        self.job = Job(nodes_min, nodes_max, hierarchy, mode)
        self.policy = Policy(self.job, pause_s=10_000.0, follows_bounds=True)
        for index in range(num_agents):
            self.agents[f"n{index}"] = Agent(self, f"n{index}")

    def log(self, text: str) -> None:
        self.story.log.append(f"{self.now_s:9.3f} {text}")

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when_s, self._order, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def run_until(self, end_s: float, *, until: Callable[[], bool] | None = None) -> None:
        while self._queue and self._queue[0][0] <= end_s:
            if until is not None and until():
                return
            self.now_s, _, action = heapq.heappop(self._queue)
            self.story.events += 1
            action()
        self.now_s = max(self.now_s, end_s)

    def latency_s(self) -> float:
        is_late = self.random.random() < LATE
        return self.random.uniform(*(LATE_S if is_late else LATENCY_S)) * self.slowness

    def new_incarnation(self) -> str:
        self._incarnations += 1
        return f"i{self._incarnations}"

    # --- the store ----------------------------------------------------------------------------------------

    def reach_store(self, agent: "Agent", request: Request) -> Answer | None:
        """What the store answers a request that arrives now; None if it does not arrive."""
        if not self.is_store_up or agent.is_cut_off:
            return None
        self.ledger.expire(self.now_s)
        match request:
            case Grant():
                answer: Answer = Granted(self.ledger.grant(self.now_s, ttl_s=request.ttl_s))
            case Write():
                self.checks.before_write()
                try:
                    revision = self.ledger.write(request)
                except LeaseLostError:
                    answer = LeaseOver()
                else:
                    answer = Refused() if revision is None else Applied(revision)
            case _:
                agent.resync()
                answer = Refreshed()
        self.store_changed()
        return answer

    def store_changed(self) -> None:
        """Check what was written, tell those who watch, and come back when the next lease ends."""
        if self.ledger.revision != self._told_revision:
            self._told_revision = self.ledger.revision
            self.checks.after_change()
            for agent in self.agents.values():
                agent.notify()
        expiry_s = self.ledger.next_expiry_s()
        if expiry_s is not None and not self.now_s < self._expiry_at_s <= expiry_s:
            self._expiry_at_s = expiry_s
            self.at(expiry_s, self._expire)

    def _expire(self) -> None:
        if self.is_store_up:
            self._expiry_at_s = 0.0
            self.ledger.expire(self.now_s)
            self.store_changed()

    def wipe(self) -> None:
        """Lose everything, the count of revisions too; the ids of leases are never used twice."""
        self._wipes += 1
        self.ledger = Ledger(first_lease_id=1 + self._wipes * 1_000_000)
        self.checks.forget_store()
        self._told_revision = 0
        for agent in self.agents.values():
            agent.resync()
        self.store_changed()

    def generation(self) -> Generation | None:
        entry = self.ledger.get(KEYS.generation).entries.get(KEYS.generation)
        return read_generation(entry.value) if entry else None

    def bounds(self) -> Bounds:
        """Those that hold now: the last that were written, or those of the job's record."""
        entries = self.ledger.get(KEYS.prefix).entries
        if KEYS.bounds in entries:
            return read_bounds(entries[KEYS.bounds].value)
        return read_job(entries[KEYS.job].value).bounds if KEYS.job in entries else self.job.bounds


class Agent:
    """A process with a member in it, a connection to the store, and a node's worth of ranks."""

    def __init__(self, world: World, node_id: str) -> None:
        self.world = world
        self.node_id = node_id
        self.is_up = False
        self.is_paused = False
        self.is_cut_off = False
        self.is_leaving = False
        self.is_disturbed = False
        self.will_return = True
        self.process = 0
        self._missed: list[Callable[[], None]] = []
        self._is_waking = False
        self._watched_revision: int | None = None
        self._is_update_coming = False
        self._clock = (0.0, 1.0)
        self.member: Member
        self.ranks: Ranks

    @property
    def is_working(self) -> bool:
        return self.is_up and not self.is_paused

    def clock_s(self) -> float:
        """This machine's own clock: it began anywhere and may be fast or slow."""
        offset_s, rate = self._clock
        return offset_s + rate * self.world.now_s

    def skew(self, rate: float, *, jump_s: float = 0.0) -> None:
        now_s = self.clock_s() + jump_s
        self._clock = now_s - rate * self.world.now_s, rate

    def start(self) -> None:
        world = self.world
        if self.is_up:
            return
        self.is_up, self.is_paused, self.is_leaving, self.is_disturbed = True, False, False, False
        self.process += 1
        self._missed, self._is_waking, self._is_update_coming = [], False, False
        self._watched_revision = None
        self._clock = world.random.uniform(0, 1e6), 1.0
        self.member = Member(
            Candidate(self.node_id, 1, {"zone": f"z{int(self.node_id[1:]) % 2}"}, "10.0.0.1", 1),
            run_id=KEYS.run_id,
            policy=world.policy,
            lease_ttl_s=LEASE_TTL_S,
            new_incarnation=world.new_incarnation,
            plan_for=plan_once,
        )
        self.ranks = world.make_ranks(self)
        self.later(world.random.uniform(0.0, 1.0), self.ranks.start)
        self.later(0.0, self.keep_alive)
        self.notify()

    def stop(self) -> None:
        """The process is gone, at once."""
        self.is_up = False
        self.process += 1

    def resume(self) -> None:
        self.is_paused = False
        missed, self._missed = self._missed, []
        for action in missed:
            action()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something in this process; a pause puts it off, the end of the process ends it."""
        process = self.process

        def run() -> None:
            if self.process != process:
                return
            if self.is_paused:
                self._missed.append(action)
            else:
                action()

        self.world.after(delay_s, run)

    # --- the store ----------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Something changed in the store: the watch brings it, if it is connected."""
        if self.is_up and not self._is_update_coming and not self.is_cut_off and self.world.is_store_up:
            self._is_update_coming = True
            self.later(self.world.latency_s(), self._update)

    def resync(self) -> None:
        self._watched_revision = None
        self.notify()

    def _update(self) -> None:
        world = self.world
        self._is_update_coming = False
        if self.is_cut_off or not world.is_store_up:
            return
        update: Snapshot | Changes | None = None
        if self._watched_revision is not None:
            update = world.ledger.changes_after(self._watched_revision, prefix=KEYS.prefix)
        if update is None:
            update = world.ledger.get(KEYS.prefix)
        self._watched_revision = update.revision
        self.member.see(self.clock_s(), update)
        self.act()

    def act(self) -> None:
        """Ask the member what to do next, and do it."""
        request = self.member.next(self.clock_s())
        self._take_notices()
        if request is not None:
            self._send(request)
        elif self.member.wake_s < float("inf") and not self._is_waking:
            self._is_waking = True
            delay_s = max(0.0, (self.member.wake_s - self.clock_s()) / self._clock[1])
            self.later(min(delay_s, 1.0), self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        self.act()

    def _send(self, request: Request) -> None:
        process = self.process

        def arrive() -> None:
            answer = self.world.reach_store(self, request)
            if self.process != process:
                return
            if answer is None or self.world.random.random() < self.world.reply_loss:
                self.later(CALL_TIMEOUT_S, lambda: self._answered(Unknown()))
            else:
                self.later(self.world.latency_s(), lambda: self._answered(answer))

        if self.world.sending is not None:
            self.world.sending(self, request)
        # Once sent, a request arrives even if its sender is paused or gone by then.
        self.world.after(self.world.latency_s(), arrive)

    def _answered(self, answer: Answer) -> None:
        self.member.answer(self.clock_s(), answer)
        self.act()

    def keep_alive(self) -> None:
        """A thread of its own in the real process; paused with it."""
        for lease_id in sorted(self.member.kept_leases):
            self.world.after(self.world.latency_s(), partial(self._beat, lease_id))
        self.later(LEASE_TTL_S / 3 / self._clock[1], self.keep_alive)

    def _beat(self, lease_id: int) -> None:
        world, process = self.world, self.process
        if not world.is_store_up or self.is_cut_off:
            return
        world.ledger.expire(world.now_s)
        try:
            world.ledger.keep_alive(world.now_s, lease_id=lease_id)
        except LeaseLostError:
            if process == self.process:
                self.later(world.latency_s(), lambda: self._lost_lease(lease_id))
        world.store_changed()

    def _lost_lease(self, lease_id: int) -> None:
        self.member.lose_lease(lease_id)
        self.act()

    def _take_notices(self) -> None:
        notices, self.member.notices = self.member.notices, []
        for notice in notices:
            self._take_notice(notice)

    def _take_notice(self, notice: Notice) -> None:
        self.world.log(f"{self.node_id}: {_short(notice)}")
        match notice:
            case Adopted():
                self.world.checks.adopted(self, notice)
                self.ranks.told(notice)
            case Fenced():
                self.world.story.fenced += 1
                self.ranks.fenced()
            case Ended() | Failed():
                raise ViolationError(f"{self.node_id}: {notice}")

    def told_of_death(self, incarnation: str) -> None:
        turn = int(self.node_id[1:]) % 4
        self.member.suspect(self.clock_s(), incarnation, why="its process ended", turn=turn)
        self.act()


def _short(notice: Notice) -> str:
    if isinstance(notice, Adopted):
        generation = notice.generation
        members = " ".join(f"{node.node_id}/{node.incarnation}" for node in generation.members)
        return f"adopts {generation.number} {generation.kind} [{members}] {generation.reason}"
    return str(notice)
