"""Faults for the simulated cluster, chosen by its seed, then the healing, then what must be true.

A fault counts when it really hit something. `run` is one whole run: it raises `ViolationError` with all that
happened, or returns the story.
"""

from collections.abc import Callable
from functools import partial

from elastic_hieravg.membership.kv import Write
from elastic_hieravg.membership.messages import Request
from elastic_hieravg.membership.records import Bounds, Mode
from tests.membership.safety import Safety
from tests.membership.simulated_ranks import Meetings
from tests.membership.simulation import (
    HEALED_S,
    KEYS,
    LEASE_TTL_S,
    TOLD_S,
    Agent,
    Story,
    ViolationError,
    World,
)

START_S = 2.0
FAULTS_S = 25.0
ROUNDS_AFTER = 2
# A fault that finds nothing to hit is replaced by another one.
TRIES_MAX = 5
# What `lose_writers_lease` waits for; counted when it comes.
FENCED_WRITING = "fenced while writing"


class Nemesis:
    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random
        self._kinds = [getattr(self, kind.__name__) for kind in KINDS]

    def begin(self, num_faults: int) -> None:
        for _ in range(num_faults):
            self._world.at(self._random.uniform(START_S, self._world.faults_s), self._strike)

    def heal(self) -> None:
        """Everything works again. Who is down comes back, most of them."""
        world = self._world
        self.end_outage()
        world.slowness, world.reply_loss, world.sending = 1.0, 0.0, None
        for agent in world.agents.values():
            agent.is_cut_off = False
            if agent.is_up:
                agent.skew(1.0)
                if agent.is_paused:
                    agent.resume()
                agent.notify()
            elif agent.will_return or not any(each.is_up for each in world.agents.values()):
                agent.start()
        world.log("healed")

    def _strike(self) -> None:
        for _ in range(TRIES_MAX):
            fault = self._random.choice(self._kinds)
            if fault():
                self._world.story.faults[fault.__name__] += 1
                return

    def _victim(self) -> Agent | None:
        up = [agent for agent in self._world.agents.values() if agent.is_working]
        return self._random.choice(up) if up else None

    def _for_a_while(self, shortest_s: float, longest_s: float, end: Callable[[], None]) -> None:
        self._world.after(self._random.uniform(shortest_s, longest_s), end)

    # --- processes ----------------------------------------------------------------------------------------

    def kill(self) -> bool:
        victim = self._victim()
        if victim is None:
            return False
        self._kill(victim, is_told=True)
        return True

    def cut_power(self) -> bool:
        """Nobody's connection tells: only the lease does."""
        victim = self._victim()
        if victim is None:
            return False
        self._kill(victim, is_told=False)
        return True

    def kill_rack(self) -> bool:
        up = [agent for agent in self._world.agents.values() if agent.is_working]
        if len(up) < 3:
            return False
        for victim in up[::2]:
            moment_s = self._random.uniform(0.0, 0.1)
            self._world.after(moment_s, partial(self._kill, victim, is_told=True))
        return True

    def _kill(self, victim: Agent, *, is_told: bool) -> None:
        if not victim.is_up:
            return
        self._world.log(f"{victim.node_id} is killed")
        incarnation = victim.member.node.incarnation
        victim.stop()
        if is_told:
            for peer in self._world.agents.values():
                if peer.is_up:
                    peer.later(self._random.uniform(*TOLD_S), partial(peer.told_of_death, incarnation))
        if self._random.random() < 0.8:
            self._for_a_while(0.2, 10.0, victim.start)
        else:
            victim.will_return = self._random.random() < 0.5

    def restart_workers(self) -> bool:
        victim = self._victim()
        if victim is None or not victim.member.is_registered:
            return False
        self._world.log(f"{victim.node_id}'s workers die")
        victim.ranks.restart()
        return True

    def pause(self) -> bool:
        return self._pause(LEASE_TTL_S, 4 * LEASE_TTL_S)

    def pause_shortly(self) -> bool:
        return self._pause(0.05, 0.8 * LEASE_TTL_S)

    def _pause(self, shortest_s: float, longest_s: float) -> bool:
        victim = self._victim()
        if victim is None:
            return False
        self._world.log(f"{victim.node_id} freezes")
        victim.is_paused = victim.is_disturbed = True
        process = victim.process
        self._for_a_while(
            shortest_s,
            longest_s,
            lambda: victim.resume() if victim.process == process and victim.is_paused else None,
        )
        return True

    def skew_clock(self) -> bool:
        victim = self._victim()
        if victim is None:
            return False
        victim.is_disturbed = True
        victim.skew(self._random.uniform(0.5, 2.0), jump_s=self._random.choice([0.0, 0.0, 5.0]))
        return True

    def leave(self) -> bool:
        victim = self._victim()
        if victim is None or not victim.member.is_registered:
            return False
        self._world.log(f"{victim.node_id} leaves")
        victim.is_leaving = True
        victim.member.ask_round()
        victim.act()
        victim.later(self._random.uniform(0.1, 2.0), lambda: self._go(victim))
        return True

    def _go(self, victim: Agent) -> None:
        victim.member.leave()
        victim.act()
        victim.later(1.0, lambda: self._leave(victim))

    def _leave(self, victim: Agent) -> None:
        self._world.ledger.revoke(victim.member.own_lease)
        self._world.store_changed()
        victim.stop()
        self._for_a_while(1.0, 5.0, victim.start)

    # --- network and store ----------------------------------------------------------------------------------

    def cut_off(self) -> bool:
        victim = self._victim()
        if victim is None:
            return False
        self._world.log(f"{victim.node_id} is cut off")
        victim.is_cut_off = victim.is_disturbed = True

        def end() -> None:
            victim.is_cut_off = False
            if victim.is_up:
                victim.notify()

        self._for_a_while(0.1, 3 * LEASE_TTL_S, end)
        return True

    def slow_down(self) -> bool:
        self._world.is_calm = False
        self._world.slowness = self._random.uniform(2.0, 60.0)
        self._for_a_while(0.5, 4.0, lambda: setattr(self._world, "slowness", 1.0))
        return True

    def lose_replies(self) -> bool:
        self._world.is_calm = False
        self._world.reply_loss = self._random.uniform(0.1, 0.9)
        self._for_a_while(0.5, 4.0, lambda: setattr(self._world, "reply_loss", 0.0))
        return True

    def lose_lease(self) -> bool:
        victim = self._victim()
        if victim is None or not victim.member.is_registered:
            return False
        self._world.log(f"{victim.node_id} loses its lease")
        self._world.ledger.revoke(victim.member.own_lease)
        self._world.store_changed()
        return True

    def lose_writers_lease(self) -> bool:
        """Whoever writes the next generation is out by the time its write arrives."""
        if self._world.sending is not None:
            return False
        self._world.sending = self._fence_writer
        return self.kill()

    def _fence_writer(self, writer: Agent, request: Request) -> None:
        if isinstance(request, Write) and any(put.key == KEYS.generation for put in request.puts):
            self._world.sending = None
            self._world.story.faults[FENCED_WRITING] += 1
            self._world.log(f"{writer.node_id} loses its lease while it writes")
            self._world.ledger.revoke(writer.member.own_lease)
            self._world.store_changed()

    def take_store_away(self) -> bool:
        if not self._world.is_store_up:
            return False
        self._world.log("the store is away")
        self._world.is_store_up = self._world.is_calm = False
        self._since_s = self._world.now_s
        self._for_a_while(0.5, 10.0, self.end_outage)
        return True

    def end_outage(self) -> None:
        world = self._world
        if not world.is_store_up:
            world.log("the store is back")
            world.is_store_up = True
            world.ledger.forgive(world.now_s - self._since_s)
            world.store_changed()
            for agent in world.agents.values():
                agent.notify()

    def wipe_store(self) -> bool:
        """Every key and every lease is gone, as after a restore from nothing."""
        world = self._world
        if not world.is_store_up or self._random.random() < 0.5:
            return False
        world.log("the store is wiped")
        world.is_calm = False
        world.wipe()
        return True

    def compact(self) -> bool:
        self._world.ledger.compact()
        return True

    # --- false witness, failing rounds ------------------------------------------------------------------------

    def accuse_falsely(self) -> bool:
        """A reset connection between two live nodes looks like a death."""
        witness, accused = self._victim(), self._victim()
        if witness is None or accused is None or witness is accused or not accused.member.is_registered:
            return False
        self._world.log(f"{witness.node_id} thinks that {accused.node_id} is dead")
        is_calm = self._world.is_calm and not accused.is_disturbed
        self._world.falsely_accused[accused.member.node.incarnation] = is_calm
        witness.told_of_death(accused.member.node.incarnation)
        return True

    def fail_collective(self) -> bool:
        """A group fails at one of its members, with nobody lost."""
        up = [agent for agent in self._world.agents.values() if agent.is_working]
        waiting = [agent for agent in up if agent.ranks.is_waiting]
        if not waiting:
            return False
        self._random.choice(waiting).ranks.fail_round()
        return True

    def change_bounds(self) -> bool:
        """Somebody writes other bounds; each agent reads them when it looks, and some never do."""
        up = [agent for agent in self._world.agents.values() if agent.is_up]
        if not up:
            return False
        most = len(self._world.agents)
        nodes_min = self._random.randint(1, most)
        bounds = Bounds(nodes_min, self._random.randint(nodes_min, most))
        told = self._random.sample(up, self._random.randint(1, len(up)))
        for agent in told:
            agent.later(self._random.uniform(0.0, 2.0), partial(self._tell_bounds, agent, bounds))
        self._world.log(f"{bounds} for {' '.join(agent.node_id for agent in told)}")
        return True

    def _tell_bounds(self, agent: Agent, bounds: Bounds) -> None:
        agent.member.change_bounds(bounds)
        agent.act()


# Killing is the commonest of all.
KINDS = (
    Nemesis.kill,
    Nemesis.kill,
    Nemesis.cut_power,
    Nemesis.kill_rack,
    Nemesis.restart_workers,
    Nemesis.pause,
    Nemesis.pause_shortly,
    Nemesis.cut_off,
    Nemesis.slow_down,
    Nemesis.lose_replies,
    Nemesis.lose_lease,
    Nemesis.lose_writers_lease,
    Nemesis.take_store_away,
    Nemesis.wipe_store,
    Nemesis.compact,
    Nemesis.skew_clock,
    Nemesis.accuse_falsely,
    Nemesis.fail_collective,
    Nemesis.leave,
    Nemesis.change_bounds,
)


def run(seed: int, *, num_agents: int, mode: Mode = Mode.IN_PLACE, num_faults: int = 8) -> Story:
    """One run: start, faults, healing, and agreement; everything follows from the seed."""
    world = World(
        seed,
        num_agents=num_agents,
        mode=mode,
        faults_s=START_S + FAULTS_S,
        make_checks=Safety,
        make_ranks=Meetings().make_ranks,
    )
    nemesis = Nemesis(world)
    try:
        for agent in world.agents.values():
            world.at(world.random.uniform(0.0, START_S), agent.start)
        nemesis.begin(num_faults)
        world.run_until(world.faults_s)
        nemesis.heal()
        _await(world, "agreement", lambda: _disagreement(world))
        rounds = {agent.node_id: agent.ranks.rounds for agent in world.agents.values() if agent.is_up}
        _await(world, "rounds", lambda: _standstill(world, rounds))
    except Exception as exc:
        told = "\n".join(world.story.log[-60:])
        replay = f"tests.membership.nemesis.run({seed}, num_agents={num_agents}, mode=Mode.{mode.name})"
        raise ViolationError(f"{exc}\n{told}\nreplay: {replay}") from exc
    return world.story


def _await(world: World, what: str, missing: Callable[[], str]) -> None:
    deadline_s = world.now_s + HEALED_S
    while missing():
        if world.now_s >= deadline_s:
            raise ViolationError(f"no {what} within {HEALED_S:.0f} s after healing: {missing()}")
        world.run_until(world.now_s + 0.5)


def _has_to_wait(world: World) -> bool:
    """Whether nobody of the last generation lives, and there are too few nodes for another."""
    up = [agent for agent in world.agents.values() if agent.is_up]
    generation = world.generation()
    lives = {agent.member.node.incarnation for agent in up}
    is_over = generation is None or not lives & {node.incarnation for node in generation.members}
    return len(up) < world.bounds().nodes_min and (is_over or world.job.mode is Mode.RESTART)


def _disagreement(world: World) -> str:
    """What keeps the cluster from one plan with all live nodes in it; nothing if it is there."""
    up = [agent for agent in world.agents.values() if agent.is_up]
    generation = world.generation()
    bounds = world.bounds()
    wanted = min(len(up), bounds.nodes_max)
    if _has_to_wait(world):
        return ""
    if generation is None:
        return "no generation"
    if not wanted <= len(generation.members) <= len(up):
        return f"generation {generation.number} has {len(generation.members)} of {wanted} nodes"
    if (len(generation.members) < bounds.nodes_min) != bool(generation.hold):
        return f"generation {generation.number} holds, or does not, against the bounds {bounds}"
    for node in generation.members:
        agent = world.agents[node.node_id]
        if not agent.is_up or agent.member.node.incarnation != node.incarnation:
            return f"generation {generation.number} holds {node.node_id}/{node.incarnation}, which is gone"
        if not agent.ranks.is_settled(generation):
            return f"{node.node_id} is not in generation {generation.number}"
    return ""


def _standstill(world: World, before: dict[str, int]) -> str:
    """Who has not made enough rounds since agreement; nobody does in a job that holds or restarts."""
    generation = world.generation()
    if generation is None or generation.hold or _has_to_wait(world) or world.job.mode is Mode.RESTART:
        return ""
    for node in generation.members:
        if world.agents[node.node_id].ranks.rounds < before.get(node.node_id, 0) + ROUNDS_AFTER:
            return f"{node.node_id} makes no rounds"
    return _disagreement(world)
