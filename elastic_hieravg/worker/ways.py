"""A rank's way into one generation, as values: how far it is, and what came out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_hieravg.averaging.groups import Group
from elastic_hieravg.averaging.rounds import AveragingGroup
from elastic_hieravg.membership.local import Follow
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.opening import Entry, Opening
from elastic_hieravg.plan import GroupKey
from elastic_hieravg.worker.optimizer_state import StateCopy, StateTaken


@dataclass(frozen=True, slots=True)
class Entering:
    """A generation that this rank can enter, with what it needs for it. `state` is for a rank that is new."""

    adopted: Adopted
    rank: int
    wanted: Mapping[str, GroupKey]
    entry: Entry
    gradients: Mapping[GroupKey, Group]
    state: StateTaken | None


@dataclass(eq=False, slots=True)
class Way:
    """The way to one generation. `opening`: what this rank has said, until it has entered.

    `is_state_asked`: the training thread's optimizer state is wanted, and then there. `passing` is the group in
    which it is averaged.
    """

    adopted: Adopted
    follow: Follow
    rank: int
    is_over: bool = False
    opening: Opening | None = None
    is_state_asked: bool = False
    state: StateCopy | None = None
    passing: AveragingGroup | None = None
    gradients: dict[GroupKey, Group] = field(default_factory=dict)
