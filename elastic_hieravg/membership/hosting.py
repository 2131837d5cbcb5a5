"""What a host of the embedded store knows of its followers, and which generations it may write for them.

The rules are in `succession`; here is what they are asked about. Not for two threads at once. Invariant: with
every generation stands, under a key of its own, what the next one will be judged by.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from elastic_hieravg.errors import DocumentError, Problem, StoreAwayError
from elastic_hieravg.membership.frames import FrameError
from elastic_hieravg.membership.kv import Put, Snapshot, Write
from elastic_hieravg.membership.ledger import Ledger
from elastic_hieravg.membership.mirror import Keys
from elastic_hieravg.membership.records import NodeState, read_generation, read_node, read_suspicion
from elastic_hieravg.membership.succession import before_of, is_known, objection, read_before

V = TypeVar("V")

# A follower that answered a host is its own for longer than this: `following.HOST_SILENT_S`. If it ends within
# this time, it cannot have voted for another host before.
ENDED_S = 3.5
# Incarnations that came and went; the oldest are forgotten.
REMEMBERED_MAX = 4096


class Hosting:
    """`open_s`: the first generation is not written earlier, so that a job that lives already can say so.

    `ended`: the incarnation of the host before this one, if it served its followers until it ended.
    """

    def __init__(self, keys: Keys, *, open_s: float, ended: str = "") -> None:
        self._keys = keys
        self._open_s = open_s
        self._known_by: dict[str, int] = {}
        # As good as its own word: it was host and nobody's voter.
        self._renounced: dict[str, None] = {ended: None} if ended else {}
        self._echo_s: dict[str, float] = {}
        self._ended: dict[str, None] = {}
        self._heard_s: dict[str, float] = {}

    def hold(self, until_s: float) -> None:
        """Somebody looks for the job's host: no first generation before it had time to find it."""
        self._open_s = max(self._open_s, until_s)

    def hear(
        self,
        now_s: float,
        who: str,
        *,
        incarnation: str,
        revision: int,
        renounced: Iterable[str],
        echo_s: float = -math.inf,
    ) -> None:
        """A follower knows the store up to here, and is none of these any more.

        `echo_s`: when this host gave the last answer that the follower has heard, by this host's clock.
        """
        _remember(self._heard_s, who, now_s)
        if incarnation:
            _remember(self._echo_s, incarnation, echo_s)
            _remember(self._known_by, incarnation, max(revision, self._known_by.get(incarnation, 0)))
        for each in renounced:
            _remember(self._renounced, each, None)

    def is_silent(self, now_s: float, who: str, *, silent_s: float) -> bool:
        return self._heard_s.get(who, -math.inf) <= now_s - silent_s

    def admit(self, now_s: float, ledger: Ledger, write: Write) -> Write:
        """The write with what it has to leave behind; `StoreAwayError` if it is a generation and not now."""
        self._note_ended(now_s, write)
        put = next((each for each in write.puts if each.key == self._keys.generation), None)
        if put is None:
            return self._say_if_known(ledger, write)
        snapshot = ledger.get(self._keys.prefix)
        last = snapshot.entries.get(self._keys.generation)
        if last is None:
            if now_s < self._open_s:
                raise _not_now("the store is new, and waits a moment to hear whether the job runs elsewhere")
            return write
        before = snapshot.entries.get(self._keys.quorum)
        try:
            generation, following = read_generation(last.value), read_generation(put.value)
            gone, knowing = self._gone(snapshot), self._knowing(last.revision)
            why = objection(
                generation,
                following,
                before=read_before(before.value) if before else None,
                knowing=knowing,
                gone=gone,
            )
        except DocumentError as exc:
            raise FrameError("a generation's record cannot be read") from exc
        if why:
            raise _not_now(why)
        left = Put(self._keys.quorum, before_of(generation, following, gone=gone).to_json(), put.lease_id)
        return replace(write, puts=(*write.puts, left))

    def _note_ended(self, now_s: float, write: Write) -> None:
        """Somebody says that a process has ended: whether it followed this host until then is known now."""
        for put in write.puts:
            if put.key.startswith(self._keys.suspicion("")):
                try:
                    incarnation = read_suspicion(put.value).incarnation
                except DocumentError:
                    continue
                if now_s < self._echo_s.get(incarnation, -math.inf) + ENDED_S:
                    _remember(self._ended, incarnation, None)

    def _knowing(self, revision: int) -> set[str]:
        return {each for each, known in self._known_by.items() if known >= revision}

    def _gone(self, snapshot: Snapshot) -> set[str]:
        """Incarnations that followed this host until they ended, or said themselves that they go."""
        gone = set(self._renounced)
        for key, entry in snapshot.entries.items():
            if key.startswith(self._keys.suspicion("")):
                gone |= {read_suspicion(entry.value).incarnation} & self._ended.keys()
            elif key.startswith(self._keys.node("")):
                record = read_node(entry.value)
                if record.state is NodeState.LEAVING:
                    gone.add(record.node.incarnation)
        return gone

    def _say_if_known(self, ledger: Ledger, write: Write) -> Write:
        """Once the last generation is known by enough, everybody is told, with the next write that comes."""
        if self._keys.quorum not in ledger.get(self._keys.quorum).entries:
            return write
        snapshot = ledger.get(self._keys.prefix)
        last = snapshot.entries.get(self._keys.generation)
        try:
            if last is not None and not is_known(
                read_generation(last.value),
                before=read_before(snapshot.entries[self._keys.quorum].value),
                knowing=self._knowing(last.revision),
                gone=self._gone(snapshot),
            ):
                return write
        except DocumentError:
            # Whoever reads it will say so; it is no affair of this write.
            return write
        return replace(write, deletes=(*write.deletes, self._keys.quorum))


def _remember(known: dict[str, V], key: str, value: V) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > REMEMBERED_MAX:
        del known[next(iter(known))]


def _not_now(why: str) -> StoreAwayError:
    return StoreAwayError(Problem(why, "training goes on; the membership waits"))
