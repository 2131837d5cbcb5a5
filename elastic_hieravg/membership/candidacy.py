"""An agent that would serve the store: who has registered with it, who has voted, and when it may begin.

Registering binds nobody. Once enough have registered, votes are asked for in a term above all that were
promised; a vote comes with everything the voter knows. Pure: the time comes in as an argument.
"""

import math
from dataclasses import dataclass

from elastic_hieravg.errors import DocumentError
from elastic_hieravg.membership.kv import Snapshot
from elastic_hieravg.membership.mirror import Keys
from elastic_hieravg.membership.records import Generation, read_generation
from elastic_hieravg.membership.succession import (
    Before,
    Brought,
    Registration,
    newest,
    read_before,
    tally,
    term_after,
)

# A registration is said again several times a second, by somebody who asks silent agents too more seldom.
FRESH_S = 2.5
# Once there are enough, the others have so long to come too: what they alone know is kept then.
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Mandate:
    """The right to serve: the term, the newest state that a voter brought, and the host that has ended."""

    term: int
    brought: Brought
    ended: str


class Candidacy:
    """`salt`: a number that is likely this agent's alone, for its terms."""

    def __init__(self, keys: Keys, *, salt: int) -> None:
        self._keys = keys
        self._salt = salt
        self.term = 0
        self.reason = self._ended = ""
        self._registrations: dict[str, tuple[float, Registration]] = {}
        self._votes: dict[str, tuple[Registration, Brought]] = {}
        self._enough_since_s = math.inf
        self._refused_term = 0

    def register(self, now_s: float, who: str, registration: Registration) -> None:
        """`who` is the process, whatever its vote counts for."""
        self._registrations[who] = now_s, registration
        if self.term and registration.promised > self.term:
            # It has voted in a later term, and takes nothing from this one.
            self._ask_again()

    def is_asked(self, who: str) -> bool:
        """Whether this one's vote is wanted."""
        return bool(self.term) and who not in self._votes

    def refuse(self, term: int) -> None:
        """Somebody has voted for another one in this term."""
        if term and term == self.term:
            self._refused_term = term
            self._ask_again()

    def vote(self, who: str, *, term: int, registration: Registration, brought: Brought) -> None:
        if term == self.term:
            self._votes[who] = registration, brought

    def look(self, now_s: float, *, known: Snapshot) -> Mandate | None:
        """Whether votes may be asked for, or have been given. `known` is what this agent itself knows."""
        fresh = {who: each for who, (at_s, each) in self._registrations.items() if at_s > now_s - FRESH_S}
        if not self.term:
            if self._is_settled(now_s, known, list(fresh.values())):
                highest = max(self._refused_term, *(each.promised for each in fresh.values()))
                self.term = term_after(highest, salt=self._salt)
                self._enough_since_s = math.inf
            return None
        if not self._votes:
            return None
        registrations = [registration for registration, _ in self._votes.values()]
        best = newest([brought for _, brought in self._votes.values()])
        # Who has registered and not voted is waited for, as long as it still comes.
        is_settled = self._is_settled(
            now_s, best.known, registrations, has_all=fresh.keys() <= self._votes.keys()
        )
        return Mandate(self.term, best, self._ended) if is_settled else None

    def withdraw(self) -> None:
        """Somebody else stands. Who has voted here is free to vote in another term."""
        self._registrations.clear()
        self._ask_again()

    def _ask_again(self) -> None:
        self.term = 0
        self._votes.clear()
        self._enough_since_s = math.inf

    def _is_settled(
        self,
        now_s: float,
        known: Snapshot,
        registrations: list[Registration],
        *,
        has_all: bool = False,
    ) -> bool:
        generation, before = self._read(known)
        count = tally(generation, registrations, before=before)
        self.reason, self._ended = count.reason, count.ended
        self._enough_since_s = min(self._enough_since_s, now_s) if count.is_enough else math.inf
        return count.is_enough and (count.is_complete or has_all or now_s >= self._enough_since_s + SETTLE_S)

    def _read(self, known: Snapshot) -> tuple[Generation | None, Before | None]:
        entry, before = known.entries.get(self._keys.generation), known.entries.get(self._keys.quorum)
        try:
            return (
                read_generation(entry.value) if entry else None,
                read_before(before.value) if before else None,
            )
        except DocumentError:
            return None, None
