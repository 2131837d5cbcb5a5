"""The embedded store for agents: served by one of them, and by another when that one is lost.

Every agent stands by with a server of its own, whose port is in its node's record, and holds everything its
watch has told. When the host is lost (its process has ended, or it is silent for `following.HOST_SILENT_S`),
each registers with the first member of the last generation, in rank order, that answers; the first that lives
collects, asks for votes, and goes on with the newest state brought: same leases, same incarnations, larger
revisions. The rules that make this safe are in `succession`.

Who comes from elsewhere asks an endpoint; a job may have several, and begins at the first. Whoever serves
answers at the endpoints that are addresses of its machine, and calls on the others and on every agent it does
not hear: so a host that was frozen, or comes back as a new process, learns where the job is. A store that
begins waits `FOUND_S` for such a call, and as long as agents without a host knock there. Agents whose
membership was frozen for `following.FROZEN_S` after their host's process ended join such a new store as new
nodes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from elastic_hieravg.errors import Problem, StoreAwayError
from elastic_hieravg.membership.embedded import EmbeddedKeyValue
from elastic_hieravg.membership.failover_watch import FailoverWatch
from elastic_hieravg.membership.following import Follower
from elastic_hieravg.membership.hosts import Where
from elastic_hieravg.membership.kv import Snapshot, Write
from elastic_hieravg.membership.stewardship import FOUND_S, Stewardship

T = TypeVar("T")


class FailoverKeyValue:
    """`address`: where the others reach this agent; `port`: where it stands by.

    `report` is told, once each time, that the membership is frozen, and why.
    """

    def __init__(
        self,
        endpoints: Sequence[Where],
        *,
        run_id: str,
        address: str,
        found_s: float = FOUND_S,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._lock = threading.Lock()
        self._watches: list[FailoverWatch] = []
        self._steward = Stewardship(address, run_id=run_id, found_s=found_s)
        self.port = self._steward.me[1]
        try:
            self._follower = Follower(self._steward, endpoints, on_switch=self._switch, report=report)
        except BaseException:
            self._steward.close()
            raise

    def get(self, prefix: str) -> Snapshot:
        return self._ask(lambda kv: kv.get(prefix))

    def write(self, write: Write) -> int | None:
        def make(kv: EmbeddedKeyValue) -> int | None:
            with self._steward.lock:
                self._steward.knowledge.note_write(write)
            return kv.write(write)

        return self._ask(make)

    def grant(self, ttl_s: float) -> int:
        sent_s = time.monotonic()
        lease_id = self._ask(lambda kv: kv.grant(ttl_s))
        self._note_lease(sent_s, lease_id, ttl_s)
        return lease_id

    def keep_alive(self, lease_id: int) -> None:
        sent_s = time.monotonic()
        self._note_lease(sent_s, lease_id, self._ask(lambda kv: kv.renew(lease_id)))

    def revoke(self, lease_id: int) -> None:
        self._ask(lambda kv: kv.revoke(lease_id))

    def watch(self, prefix: str) -> FailoverWatch:
        def forget(watch: FailoverWatch) -> None:
            with self._lock:
                self._watches = [each for each in self._watches if each is not watch]

        watch = FailoverWatch(self._follower, prefix, on_doubt=self._steward.wake.set, on_close=forget)
        with self._lock:
            self._watches.append(watch)
        return watch

    def close(self) -> None:
        self._follower.close()
        self._steward.close()

    def _ask(self, ask: Callable[[EmbeddedKeyValue], T]) -> T:
        _, client = self._follower.client
        if client is None:
            raise StoreAwayError(Problem(self._steward.why_away(), "training goes on; the membership waits"))
        try:
            return ask(client)
        except StoreAwayError:
            # Perhaps the host is lost.
            self._steward.wake.set()
            raise

    def _note_lease(self, sent_s: float, lease_id: int, ttl_s: float) -> None:
        with self._steward.lock:
            self._steward.knowledge.note_lease(sent_s, lease_id, ttl_s=ttl_s)

    def _switch(self) -> None:
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.switch()
