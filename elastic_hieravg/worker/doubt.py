"""A round in doubt: its result is whole here, and others may have taken it before somebody was lost.

Nobody is told of it until it is known what became of it: whoever took the result says so on the way to the next
generation. Invariant: it is settled once, and told as what it was in the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.events import Outcome, RoundDone
from elastic_hieravg.membership.local import Stop
from elastic_hieravg.membership.opening import Entry
from elastic_hieravg.plan import PlannedLevel

# Who is in doubt may miss some generations that others enter. In each of them a rank has a few groups.
GROUPS_REMEMBERED = 32


class Results:
    """The rounds whose results this rank took, in groups that it has left too: others may be in doubt still."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def leave(self, rounds: Mapping[str, int]) -> None:
        """These are the last rounds of the groups it is about to leave, by their keys' names."""
        self._left = dict(list({**self._left, **rounds}.items())[-GROUPS_REMEMBERED:])

    def known(self, rounds: Mapping[str, int]) -> dict[str, int]:
        """All it can tell of. `rounds` are those of the groups it has."""
        return {**self._left, **rounds}


@dataclass(eq=False, slots=True)
class Doubt:
    """`failed`: how the round is told if nobody took its result. `is_taken` is None until it is settled."""

    level: PlannedLevel
    failed: RoundDone
    is_taken: bool | None = None

    def settle(self, engine: HierarchicalAverager, entry: Entry | None, *, stopped: Stop | None) -> RoundDone:
        """Take the result if somebody took it, or drop it; how the round is told.

        `entry` is what everybody said. If nobody has, only the end of the job tells.
        """
        assert self.is_taken is None
        assert engine.in_doubt is not None
        if entry is not None:
            self.is_taken = entry.was_committed(*engine.in_doubt)
        else:
            self.is_taken = stopped is not None and stopped.is_success
        engine.settle(is_committed=self.is_taken)
        return replace(self.failed, outcome=Outcome.COMMITTED) if self.is_taken else self.failed
