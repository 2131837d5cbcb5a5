"""What runs on a simulated node: steps, global rounds and the entering of generations, or restarts.

The rules of opening are the real ones; rounds are only met or missed. One object stands for all ranks of a
node, because a node enters, fails and leaves as one.
"""

from functools import partial

from elastic_hieravg.membership.decisions import num_restart_wanted
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.opening import Entry, Opening, entry_of, replaced_keys
from elastic_hieravg.membership.records import Generation, Kind, Mode
from elastic_hieravg.plan import GroupKey
from tests.membership.simulation import PERIOD_STEPS, Agent, Ranks, ViolationError

STEP_S = 0.25
ROUND_TIMEOUT_S = 5.0
RETRY_WAIT_S = 2.0
# How long groups take to be built, and how long a way may take before it is given up.
BUILD_S = (0.01, 0.1)
WAY_TIMEOUT_S = 6.0
POLL_S = 0.2
# How often some ranks see everybody's header, or opening, and others do not.
HEADER_MISSED = 0.1


class Meetings:
    """Who has come to which group's round, and how far everybody is on the way to which generation."""

    def __init__(self) -> None:
        self.open: dict[str, set[str]] = {}
        # Groups that somebody left or cut: whoever waits there is told by its connections.
        self.over: set[str] = set()
        self.openings: dict[int, dict[str, Opening]] = {}
        self.built: dict[int, set[str]] = {}
        self.entered_at: dict[int, int] = {}

    def make_ranks(self, agent: Agent) -> Ranks:
        if agent.world.job.mode is Mode.RESTART:
            return RestartedRanks(agent)
        return AveragingRanks(agent, self)


class AveragingRanks:
    """In-place membership."""

    def __init__(self, agent: Agent, meetings: Meetings) -> None:
        self.agent = agent
        self.meetings = meetings
        self.world = agent.world
        self.current: Adopted | None = None
        self.newest: Adopted | None = None
        self.step = 0
        self.rounds = 0
        self._holds_model = False
        self._lost_round = False
        self._failed: set[GroupKey] = set()
        self._waits_in: GroupKey | None = None
        self._waits_until_s = 0.0
        self._arrival = 0
        # The way to the newest generation: asked for an opening, said it, and what follows from all of them.
        self._is_asked = False
        self._opening: Opening | None = None
        self._entry: Entry | None = None

    def start(self) -> None:
        self.agent.member.ready()
        self.agent.act()
        self._tick()

    def told(self, newest: Adopted) -> None:
        self.newest = newest
        self._is_asked, self._opening, self._entry = False, None, None
        if self._waits_in is not None and self._waits_in in _replaced(newest, self.current):
            # Woken: a generation replaces the group it waits in.
            self._round_failed(self._waits_in)
        self.agent.later(self.world.random.uniform(*BUILD_S), partial(self._built, newest))
        self.agent.later(WAY_TIMEOUT_S, partial(self._give_up, newest))

    def fenced(self) -> None:
        self.current = self.newest = None
        self._is_asked, self._opening, self._entry = False, None, None
        self._holds_model = False
        self._failed.clear()
        self._leave_meeting()

    def restart(self) -> None:
        """The workers start anew under the same agent."""
        self.fenced()
        self.step = 0
        self.agent.member.renew(is_ready=False)
        self.agent.act()
        self.agent.later(self.world.random.uniform(0.1, 2.0), self._ready)

    def _ready(self) -> None:
        self.agent.member.ready()
        self.agent.act()

    # --- the way to a generation ------------------------------------------------------------------------------

    def _built(self, adopted: Adopted) -> None:
        """This node's groups are there; when everybody's are, all are asked where they stand."""
        if self.newest is not adopted:
            return
        number = adopted.generation.number
        built = self.meetings.built.setdefault(number, set())
        built.add(self.agent.member.node.incarnation)
        if built >= {node.incarnation for node in adopted.generation.members}:
            for agent in self._members(adopted):
                agent.later(self.world.latency_s(), partial(_averaging(agent).ask, number))

    def ask(self, number: int) -> None:
        if self.newest is not None and self.newest.generation.number == number:
            self._is_asked = True

    def _post(self, step: int) -> None:
        """Say from which boundary on this node can enter; it does not pass it before it knows the entry."""
        assert self.newest is not None
        generation = self.newest.generation
        wants_round = self._lost_round or generation.kind is Kind.ROUND
        self._opening = Opening(step, holds_model=self._holds_model, wants_round=wants_round)
        openings = self.meetings.openings.setdefault(generation.number, {})
        openings[self.agent.member.node.incarnation] = self._opening
        wanted = {node.incarnation for node in generation.members}
        if openings.keys() >= wanted:
            entry = entry_of([openings[incarnation] for incarnation in sorted(wanted)])
            for agent in self._members(self.newest):
                if self.world.now_s < self.world.faults_s and self.world.random.random() < HEADER_MISSED:
                    # The store of the openings was gone for this one: it gives the way up.
                    self.world.story.faults["opening missed"] += 1
                    agent.later(self.world.latency_s(), partial(_averaging(agent)._give_up, self.newest))
                else:
                    agent.later(self.world.latency_s(), partial(_averaging(agent)._know, self.newest, entry))

    def _know(self, adopted: Adopted, entry: Entry) -> None:
        if self.newest and self.newest.generation == adopted.generation and self._opening is not None:
            self._entry = entry

    def _give_up(self, adopted: Adopted) -> None:
        """The way failed: say so, that another generation is made."""
        if self.newest is None or self.newest.generation != adopted.generation or self._entry is not None:
            return
        if self.current is not None and self.current.generation.number >= adopted.generation.number:
            return
        self._is_asked, self._opening = False, None
        key = _global_key(adopted)
        if key is None:
            # Alone, there is nobody to make another generation for: it tries again.
            self.agent.later(self.world.random.uniform(*BUILD_S), partial(self._built, adopted))
        else:
            self.agent.member.report_broken(key.name)
            self.agent.act()

    def _enter_if_time(self, *, can_wait: bool) -> bool:
        if self._is_asked and self._opening is None:
            self._post(self.step if can_wait else self.step + 1)
        if self._entry is None or (self._holds_model and self.step < self._entry.step):
            return False
        self._enter(self._entry)
        return True

    def _enter(self, entry: Entry) -> None:
        assert self.newest is not None
        assert self.current is None or self.newest.generation.number > self.current.generation.number
        if self._holds_model:
            self._check_step(entry)
        else:
            self.step = entry.step
        for key in self.current.keys if self.current else ():
            if key not in self.newest.keys:
                self._cut(key)
        self.current = self.newest
        self._is_asked, self._opening, self._entry = False, None, None
        self._failed.clear()
        self.world.story.entered_together += 1
        self.agent.member.enter(self.current.generation.number)
        self.agent.act()
        if entry.is_round_wanted:
            self._arrive()

    def _check_step(self, entry: Entry) -> None:
        """Everybody who holds the model enters a generation at the same step."""
        assert self.newest is not None
        at = self.meetings.entered_at.setdefault(self.newest.generation.number, self.step)
        if at != self.step or self.step != entry.step:
            raise ViolationError(
                f"{self.agent.node_id} enters generation {self.newest.generation.number} at step {self.step}, "
                f"others at {at}"
            )

    def _members(self, adopted: Adopted) -> list[Agent]:
        """The members whose processes run; the others hear nothing."""
        agents = [self.world.agents[node.node_id] for node in adopted.generation.members]
        return [agent for agent in agents if agent.is_up]

    # --- steps and rounds -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.agent.later(STEP_S, self._tick)
        if self.newest is None or self._waits_in is not None:
            return
        is_held = self.current is not None and bool(self.current.generation.hold)
        is_waiting = is_held or not self._holds_model or self.world.now_s < self._waits_until_s
        if self._enter_if_time(can_wait=is_waiting):
            return
        if is_waiting and not self._must_meet_later():
            return
        if self._opening is not None and self._entry is None and self.step >= self._opening.step:
            # It said that it would wait here.
            return
        if self.current is None:
            return
        self.step += 1
        if not self._enter_if_time(can_wait=False) and self.step % PERIOD_STEPS == 0:
            self._arrive()

    def _must_meet_later(self) -> bool:
        """Whether the others are at a later step already, so that waiting here is of no use."""
        return self._holds_model and self._entry is not None and self._entry.step > self.step

    def _arrive(self) -> None:
        assert self.current is not None
        key = _global_key(self.current)
        if key is None:
            self.rounds += 1
            self._holds_model, self._lost_round = True, False
            return
        if key in self._failed:
            return
        if key.name in self.meetings.over:
            self._round_failed(key)
            return
        self._waits_in = key
        self._arrival += 1
        arrival = self._arrival
        arrived = self.meetings.open.setdefault(key.name, set())
        arrived.add(self.agent.node_id)
        self.agent.later(ROUND_TIMEOUT_S, lambda: self._timed_out(arrival))
        if len(arrived) == len(key.members):
            del self.meetings.open[key.name]
            self.world.after(self.world.latency_s(), lambda: self._meet(key))

    def _meet(self, key: GroupKey) -> None:
        """Everybody has come: all see everybody's header, unless the nemesis wants otherwise."""
        world = self.world
        agents = [world.agents[member.node_id] for member in key.members]
        present = [agent for agent in agents if agent.is_up and _averaging(agent).waits_in(key)]
        is_whole = len(present) == len(agents) and not any(agent.is_paused for agent in agents)
        missing_it: list[Agent] = [] if is_whole else present
        if is_whole and world.now_s < world.faults_s and world.random.random() < HEADER_MISSED:
            missing_it = world.random.sample(present, world.random.randint(1, len(present)))
            world.story.faults["header missed"] += 1
        for agent in present:
            met = partial(_averaging(agent).met, key, sees_it=agent not in missing_it)
            agent.later(world.latency_s(), met)

    @property
    def is_waiting(self) -> bool:
        return self._waits_in is not None

    def fail_round(self) -> None:
        assert self._waits_in is not None
        self._round_failed(self._waits_in)

    def waits_in(self, key: GroupKey) -> bool:
        return self._waits_in == key

    def met(self, key: GroupKey, *, sees_it: bool) -> None:
        if self._waits_in != key:
            return
        if not sees_it:
            self._round_failed(key)
            return
        self._waits_in = None
        self.rounds += 1
        self.world.story.rounds += 1
        self._holds_model, self._lost_round = True, False

    def _timed_out(self, arrival: int) -> None:
        if self._waits_in is not None and self._arrival == arrival:
            self._round_failed(self._waits_in)

    def _round_failed(self, key: GroupKey) -> None:
        """The group is over here: its key is reported; the next generation is waited for, not for long."""
        self._leave_meeting()
        self._cut(key)
        self._failed.add(key)
        self._lost_round = True
        self._waits_until_s = self.world.now_s + RETRY_WAIT_S
        self.agent.member.report_broken(key.name)
        self.agent.act()

    def _cut(self, key: GroupKey) -> None:
        """The group is over for everybody, as soon as they hear of it."""
        self.meetings.over.add(key.name)
        for agent in self.world.agents.values():
            if agent.is_up and agent is not self.agent and _averaging(agent).waits_in(key):
                agent.later(self.world.latency_s(), partial(_averaging(agent).hung_up, key))

    def hung_up(self, key: GroupKey) -> None:
        if self._waits_in == key:
            self._round_failed(key)

    def _leave_meeting(self) -> None:
        if self._waits_in is not None:
            self.meetings.open.get(self._waits_in.name, set()).discard(self.agent.node_id)
        self._waits_in = None

    def is_settled(self, generation: Generation) -> bool:
        return self.current is not None and self.current.generation.number == generation.number


def _global_key(adopted: Adopted) -> GroupKey | None:
    spanning = [key for key in adopted.keys if len(key.members) == adopted.plan.world_size]
    return spanning[0] if spanning else None


def _replaced(newest: Adopted, current: Adopted | None) -> list[GroupKey]:
    return replaced_keys(current.keys, newest) if current else []


def _averaging(agent: Agent) -> AveragingRanks:
    assert isinstance(agent.ranks, AveragingRanks)
    return agent.ranks


class RestartedRanks:
    """A node's ranks under stock torchrun: every change restarts them, through the rendezvous."""

    is_waiting = False

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.current: Adopted | None = None
        self.rounds = 0

    def start(self) -> None:
        self._rendezvous()
        self._poll()

    def told(self, newest: Adopted) -> None:
        self.current = newest

    def fenced(self) -> None:
        """The handler notices by itself that the generation does not hold it any more."""

    def fail_round(self) -> None:
        raise AssertionError("there are no rounds")

    def restart(self) -> None:
        self.current = None
        self.agent.later(self.agent.world.random.uniform(0.0, 0.5), self._rendezvous)

    def is_settled(self, generation: Generation) -> bool:
        return self.current is not None and self.current.generation.number == generation.number

    def _rendezvous(self) -> None:
        self.current = None
        self.agent.member.renew(is_ready=True)
        self.agent.act()

    def _poll(self) -> None:
        self.agent.later(POLL_S, self._poll)
        member = self.agent.member
        if self.current is None or not member.mirror.is_synced:
            return
        if num_restart_wanted(self.agent.clock_s(), view=member.view(), policy=member.policy):
            self.restart()
