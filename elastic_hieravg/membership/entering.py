"""When a rank goes from the generation it works in to the newest one. Pure.

It says when, not how: groups are built and cut elsewhere. Invariant: a rank never enters a lower number, and
never one that does not hold its node.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.plan import GroupKey, Node


class When(StrEnum):
    STAY = "stay"  # there is nothing to enter, or a new generation has to come first
    NOW = "now"  # at the next step boundary
    TOGETHER = "together"  # when all ranks name it in the header of a global round
    OUT = "out"  # the newest generation does not hold this node


@dataclass(frozen=True, slots=True)
class Entering:
    when: When
    reason: str


def entering(
    node: Node, *, current: Adopted | None, newest: Adopted, failed: Collection[GroupKey] = ()
) -> Entering:
    """When to go on from `current`, in which the groups `failed` have failed here; None is a newcomer's."""
    generation = newest.generation
    if not generation.lists(node):
        return Entering(When.OUT, f"generation {generation.number} does not hold {node.node_id}")
    if current is None:
        return Entering(When.NOW, "nothing is left behind")
    if generation.number <= current.generation.number:
        return Entering(When.STAY, "this is the newest generation")
    if current.generation.hold:
        return Entering(When.NOW, "the generation before holds")
    if not current.keys:
        return Entering(When.NOW, "a rank that is alone has nobody to agree with")
    lost = [each.node_id for each in current.generation.members if not generation.lists(each)]
    if lost:
        return Entering(When.NOW, f"{', '.join(lost)} lost")
    built = {key.members: key for key in newest.keys}
    if any(built.get(key.members, key) != key for key in current.keys):
        return Entering(When.NOW, "a group is built anew")
    if failed:
        if any(key in newest.keys for key in failed):
            return Entering(When.STAY, "a group that failed is still listed")
        return Entering(When.NOW, "a group failed here")
    return Entering(When.TOGETHER, "nobody was lost")


def entered_together(named: Sequence[int], *, current: int) -> int | None:
    """The generation that a global round's header agrees to enter: everybody names the same newer one.

    >>> entered_together([7, 7, 7], current=6), entered_together([7, 6, 7], current=6)
    (7, None)
    """
    return named[0] if len(set(named)) == 1 and named[0] > current else None
