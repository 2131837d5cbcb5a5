"""The rules of safety that every simulated run keeps, looked at with every write and every adoption."""

from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.records import Generation, Kind, Mode, read_node
from elastic_hieravg.plan import GroupKey
from tests.membership.simulation import KEYS, Agent, ViolationError, World, plan_once


class Safety:
    """One plan per generation, generations only grow, nobody acts who is out, nobody is dropped who is well."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last: Generation | None = None
        self._texts: dict[int, str] = {}
        self._adopted: dict[tuple[str, int], int] = {}
        self._gone_keys: set[GroupKey] = set()
        self._keys: set[GroupKey] = set()
        self._registered: set[str] = set()

    def forget_store(self) -> None:
        """The store lost everything: its numbers may come again, agents' may not."""
        self._last, self._texts = None, {}

    def before_write(self) -> None:
        self._registered = self._incarnations()

    def after_change(self) -> None:
        generation = self._world.generation()
        if generation is None or generation == self._last:
            return
        text = generation.to_json()
        if self._texts.setdefault(generation.number, text) != text:
            raise ViolationError(f"two plans for generation {generation.number}")
        self._check_successor(generation)
        self._check_writer(generation)
        self._check_groups(generation)
        self._world.story.generations[generation.kind] += 1
        self._world.log(f"generation {generation.number} {generation.kind}: {generation.reason}")
        self._last = generation

    def adopted(self, agent: Agent, adopted: Adopted) -> None:
        number = adopted.generation.number
        process = (agent.node_id, agent.process)
        if number <= self._adopted.get(process, 0):
            raise ViolationError(f"{agent.node_id} goes back to generation {number}")
        self._adopted[process] = number
        if not adopted.generation.lists(agent.member.node):
            raise ViolationError(f"{agent.node_id} follows generation {number}, which does not hold it")

    def _check_successor(self, generation: Generation) -> None:
        job, bounds, last = self._world.job, self._world.bounds(), self._last
        # Nobody is sent away when the bounds shrink; nobody is taken in above them either.
        size_before = len(last.members) if last and job.mode is Mode.IN_PLACE else 0
        if len(generation.members) > max(bounds.nodes_max, size_before):
            raise ViolationError(f"generation {generation.number} has more than {bounds.nodes_max} nodes")
        if (len(generation.members) < bounds.nodes_min) != bool(generation.hold):
            raise ViolationError(f"generation {generation.number} holds, or does not, against the rule")
        if last is None:
            return
        if generation.number <= last.number:
            raise ViolationError(f"generation {last.number} is followed by {generation.number}")
        before = {(node.node_id, node.incarnation) for node in last.members}
        after = {(node.node_id, node.incarnation) for node in generation.members}
        if job.mode is Mode.IN_PLACE and before & after and not (before <= after or after <= before):
            raise ViolationError(f"generation {generation.number} both shrinks and grows")
        self._check_losses(last, generation)
        if generation.kind is Kind.JOIN:
            self._check_growth(last)

    def _check_growth(self, last: Generation) -> None:
        """One growth at a time: everybody is in the last generation before the next one grows."""
        for node in last.members:
            agent = self._world.agents[node.node_id]
            if agent.is_up and agent.member.node.incarnation == node.incarnation:
                current = agent.ranks.current
                if current is None or current.generation.number < last.number:
                    raise ViolationError(f"growth while {node.node_id} is not in generation {last.number}")

    def _check_writer(self, generation: Generation) -> None:
        """A node that is out never acts: whoever wrote this was registered at that moment."""
        if generation.writer not in self._incarnations():
            raise ViolationError(f"generation {generation.number} was written by a node that is out")

    def _check_losses(self, last: Generation, generation: Generation) -> None:
        """Nobody is dropped who lives, holds its lease and does not leave.

        A false accusation is no reason either, as long as the accused can speak up in time.
        """
        for node in last.members:
            agent = self._world.agents[node.node_id]
            is_lost = generation.member(node.node_id) != node and node.incarnation in self._registered
            is_well = agent.is_up and agent.member.node.incarnation == node.incarnation and not agent.is_leaving
            is_excused = node.incarnation in self._world.falsely_accused and not (
                self._world.falsely_accused[node.incarnation] and self._world.is_calm and not agent.is_disturbed
            )
            if is_lost and is_well and not is_excused:
                raise ViolationError(f"generation {generation.number} drops {node.node_id}, which is well")

    def _incarnations(self) -> set[str]:
        entries = self._world.ledger.get(KEYS.node("")).entries
        return {read_node(entry.value).node.incarnation for entry in entries.values()}

    def _check_groups(self, generation: Generation) -> None:
        """A group's key that was gone never comes back."""
        plan, _ = plan_once(self._world.job, generation.number, generation.members)
        keys = set(generation.keys(plan))
        if keys & self._gone_keys:
            raise ViolationError(f"generation {generation.number} has a group that was gone")
        self._gone_keys |= self._keys - keys
        self._keys = keys
