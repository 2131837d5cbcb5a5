"""Which workers of a node have joined the job, and which are late. Pure.

A script that never calls `eh.join()` trains by itself on every node: RANK and WORLD_SIZE span its node only.
Invariant: that workers are late is said once in the life of an agent.
"""

from dataclasses import dataclass, field

# Importing torch takes seconds; loading data before joining may take longer, and is no mistake.
LATE_S = 60.0


@dataclass(slots=True)
class Joins:
    """`has_any`: whether any worker has ever joined.

    >>> joins = Joins(2)
    >>> joins.start(0.0)
    >>> joins.join(1)
    >>> [joins.late(now_s) for now_s in (59.0, 61.0, 120.0)]
    [(), (0,), ()]
    """

    slots: int
    has_any: bool = False
    _joined: set[int] = field(default_factory=set)
    _started_s: float | None = None
    _is_told: bool = False

    def start(self, now_s: float) -> None:
        """All workers start, for the first time or anew."""
        self._joined.clear()
        self._started_s = now_s

    def join(self, local_rank: int) -> None:
        self._joined.add(local_rank)
        self.has_any = True

    def late(self, now_s: float) -> tuple[int, ...]:
        """The workers that have run for long and have not joined; none once they were told."""
        if self._is_told or self._started_s is None or now_s < self._started_s + LATE_S:
            return ()
        found = tuple(rank for rank in range(self.slots) if rank not in self._joined)
        self._is_told = bool(found)
        return found
