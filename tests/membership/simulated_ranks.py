"""What runs on a simulated node: steps, global rounds and the entering of generations, or restarts.

The rules of entering are the real ones; rounds are only met or missed. One object stands for all ranks of a
node, because a node enters, fails and leaves as one.
"""

from functools import partial

from elastic_hieravg.membership.decisions import num_restart_wanted
from elastic_hieravg.membership.entering import Entering, When, entered_together, entering
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.records import Generation, Kind, Mode
from elastic_hieravg.plan import GroupKey
from tests.membership.simulation import PERIOD_STEPS, Agent, Ranks

STEP_S = 0.25
ROUND_TIMEOUT_S = 5.0
POLL_S = 0.2
# How often some ranks of a round see everybody's header and others do not.
HEADER_MISSED = 0.1


class Meetings:
    """Who has come to which group's round."""

    def __init__(self) -> None:
        self.open: dict[str, Meeting] = {}

    def make_ranks(self, agent: Agent) -> Ranks:
        if agent.world.job.mode is Mode.RESTART:
            return RestartedRanks(agent)
        return AveragingRanks(agent, self)


class Meeting:
    """The ranks of a group that have come to a round, with the generation each of them names."""

    def __init__(self) -> None:
        self.arrived: dict[str, int] = {}


class AveragingRanks:
    """In-place membership."""

    def __init__(self, agent: Agent, meetings: Meetings) -> None:
        self.agent = agent
        self.meetings = meetings
        self.world = agent.world
        self.current: Adopted | None = None
        self.newest: Adopted | None = None
        self.failed: set[GroupKey] = set()
        self.step = 0
        self.rounds = 0
        self._waits_in: GroupKey | None = None
        self._arrival = 0

    def start(self) -> None:
        self.agent.member.ready()
        self.agent.act()
        self._tick()

    def told(self, newest: Adopted) -> None:
        self.newest = newest
        if self._waits_in is not None and self._entering().when is When.NOW:
            # Woken: a generation replaces the group it waits in.
            self._round_failed(self._waits_in)

    def fenced(self) -> None:
        self.current = self.newest = None
        self.failed.clear()
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

    def _entering(self) -> Entering:
        assert self.newest is not None
        return entering(self.agent.member.node, current=self.current, newest=self.newest, failed=self.failed)

    def _tick(self) -> None:
        self.agent.later(STEP_S, self._tick)
        if self.newest is None or self._waits_in is not None:
            return
        if self._entering().when is When.NOW:
            was_newcomer = self.current is None and self.newest.generation.kind is Kind.JOIN
            self._enter(self.newest)
            if was_newcomer:
                self._arrive()
                return
        assert self.current is not None
        if self.current.generation.hold:
            return
        self.step += 1
        if self.step % PERIOD_STEPS == 0:
            self._arrive()

    def _enter(self, adopted: Adopted) -> None:
        assert self.current is None or adopted.generation.number > self.current.generation.number
        self.current = adopted
        self.failed.clear()
        self.agent.member.enter(adopted.generation.number)
        self.agent.act()

    def _global_key(self) -> GroupKey | None:
        assert self.current is not None
        spanning = [key for key in self.current.keys if len(key.members) == self.current.plan.world_size]
        return spanning[0] if spanning else None

    def _arrive(self) -> None:
        key = self._global_key()
        if key is None:
            self.rounds += 1
            return
        if key in self.failed:
            return
        assert self.newest is not None
        self._waits_in = key
        self._arrival += 1
        arrival = self._arrival
        meeting = self.meetings.open.setdefault(key.name, Meeting())
        meeting.arrived[self.agent.node_id] = self.newest.generation.number
        self.agent.later(ROUND_TIMEOUT_S, lambda: self._timed_out(arrival))
        if len(meeting.arrived) == len(key.members):
            del self.meetings.open[key.name]
            self.world.after(self.world.latency_s(), lambda: self._meet(key, meeting))

    def _meet(self, key: GroupKey, meeting: Meeting) -> None:
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
            met = partial(_averaging(agent).met, key, meeting, sees_it=agent not in missing_it)
            agent.later(world.latency_s(), met)

    @property
    def is_waiting(self) -> bool:
        return self._waits_in is not None

    def fail_round(self) -> None:
        assert self._waits_in is not None
        self._round_failed(self._waits_in)

    def waits_in(self, key: GroupKey) -> bool:
        return self._waits_in == key

    def met(self, key: GroupKey, meeting: Meeting, *, sees_it: bool) -> None:
        if self._waits_in != key:
            return
        if not sees_it:
            self._round_failed(key)
            return
        self._waits_in = None
        self.rounds += 1
        self.world.story.rounds += 1
        assert self.current is not None
        assert self.newest is not None
        number = entered_together(list(meeting.arrived.values()), current=self.current.generation.number)
        if number is not None and number == self.newest.generation.number:
            self.world.story.entered_together += 1
            self._enter(self.newest)
            self._arrive()

    def _timed_out(self, arrival: int) -> None:
        if self._waits_in is not None and self._arrival == arrival:
            self._round_failed(self._waits_in)

    def _round_failed(self, key: GroupKey) -> None:
        """The group is over here: its key is reported, and training goes on."""
        self._leave_meeting()
        self.failed.add(key)
        self.agent.member.report_broken(key.name)
        self.agent.act()

    def _leave_meeting(self) -> None:
        if self._waits_in is not None:
            meeting = self.meetings.open.get(self._waits_in.name)
            if meeting is not None:
                meeting.arrived.pop(self.agent.node_id, None)
        self._waits_in = None

    def is_settled(self, generation: Generation) -> bool:
        return self.current is not None and self.current.generation.number == generation.number


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
