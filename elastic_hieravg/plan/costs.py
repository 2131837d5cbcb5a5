"""What a plan moves: bytes per round and per step inside nodes, between nodes and between zones.

The figures are of payload, for the whole world, under one rule: inside a node every other copy is brought
to the sum and the sum back to it; between nodes one copy per node travels a ring in rank order. Headers and
transport overhead are not counted. Two nodes are in different zones if their `zone` labels differ.
"""

from dataclasses import dataclass

from elastic_hieravg.plan.plan import Plan

ZONE_LABEL = "zone"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by the link they cross; each byte is counted at one link only."""

    inside_nodes_bytes: float = 0.0
    between_nodes_bytes: float = 0.0
    between_zones_bytes: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.inside_nodes_bytes + other.inside_nodes_bytes,
            self.between_nodes_bytes + other.between_nodes_bytes,
            self.between_zones_bytes + other.between_zones_bytes,
        )

    def __mul__(self, factor: float) -> "Traffic":
        return Traffic(
            self.inside_nodes_bytes * factor,
            self.between_nodes_bytes * factor,
            self.between_zones_bytes * factor,
        )

    @property
    def network_bytes(self) -> float:
        return self.between_nodes_bytes + self.between_zones_bytes


@dataclass(frozen=True, slots=True)
class LevelCost:
    """One level: a round is one averaging of all its groups."""

    name: str
    rounds_per_step: float
    per_round: Traffic

    @property
    def per_step(self) -> Traffic:
        return self.per_round * self.rounds_per_step


@dataclass(frozen=True, slots=True)
class Cost:
    """`synchronous` is what a step costs if each one ends with a global round, as during warm-up."""

    model_bytes: int
    levels: tuple[LevelCost, ...]
    synchronous: Traffic

    @property
    def per_step(self) -> Traffic:
        return sum((level.per_step for level in self.levels), Traffic())


def cost(plan: Plan, *, model_bytes: int) -> Cost:
    """The traffic of a plan for a model of this size.

    >>> from elastic_hieravg.plan import Hierarchy, Node, Topology, fit
    >>> plan = fit(Hierarchy.parse("node=2,global=8"), Topology([Node("a", 2), Node("b", 2)]))
    >>> cost(plan, model_bytes=100).levels[1].per_round
    Traffic(inside_nodes_bytes=400.0, between_nodes_bytes=200.0, between_zones_bytes=0.0)
    """
    node_of = [index for index, node in enumerate(plan.topology.nodes) for _ in range(node.slots)]
    zones = [node.labels.get(ZONE_LABEL, "") for node in plan.topology.nodes]
    levels = []
    for level, rate in plan.rounds_per_step():
        per_round = Traffic()
        for group in level.groups:
            # Ranks ascend, so the nodes come in rank order: the order of the ring.
            nodes = list(dict.fromkeys(node_of[rank] for rank in group))
            ring = [zones[node] for node in nodes]
            traffic = _group_round(ranks=len(group), ring=ring, model_bytes=model_bytes)
            per_round += traffic
        levels.append(LevelCost(level.name, rate, per_round))
    return Cost(model_bytes, tuple(levels), levels[-1].per_round if levels else Traffic())


def _group_round(*, ranks: int, ring: list[str], model_bytes: int) -> Traffic:
    """One round of one group whose nodes stand in these zones."""
    nodes = len(ring)
    # Each of the ring's links carries 2 (n-1)/n models; the last node is linked to the first.
    per_link_bytes = 2 * (nodes - 1) / nodes * model_bytes
    crossings = sum(here != there for here, there in zip(ring, [*ring[1:], ring[0]], strict=True))
    return Traffic(
        inside_nodes_bytes=2.0 * (ranks - nodes) * model_bytes,
        between_nodes_bytes=(nodes - crossings) * per_link_bytes,
        between_zones_bytes=crossings * per_link_bytes,
    )
