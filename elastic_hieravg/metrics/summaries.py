"""How the agents of a job know of each other: each writes a summary of its node and reads the others'.

They are in the store of the newest generation's groups, which the first node's agent serves, under leases of
their own. They are read only while somebody looks. Invariant: a store that fails makes summaries old and
nothing else; nobody waits for it but the thread in here.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping

from elastic_hieravg.errors import LeaseLostError, StoreError
from elastic_hieravg.membership.embedded import EmbeddedKeyValue
from elastic_hieravg.membership.frames import FRAME_BYTES_MAX, FrameError
from elastic_hieravg.membership.kv import Put, Write
from elastic_hieravg.membership.records import StoreOffer
from elastic_hieravg.metrics.pace import POINT_EVERY_S
from elastic_hieravg.metrics.status import Document, fitted, read_summary

PREFIX = "/summary/"
GROUPS_RUN_ID = "groups"
CALL_TIMEOUT_S = 1.0
# Many nodes write less often: together they write so many a second.
WRITES_PER_S = 32
# After so long without a look at the status nobody reads.
WANTED_S = 10.0
SUMMARY_BYTES_MAX = 16 * 1024
LEASE_TTL_S = 300.0


class Summaries:
    """`own` makes this node's summary, and is called every two seconds; `offer` says where the store is now.

    `known`: the nodes of the job, lost ones too. `report` is called while something unforeseen is handled.
    """

    def __init__(
        self,
        *,
        own: Callable[[], Document],
        offer: Callable[[], StoreOffer | None],
        known: Callable[[], Collection[str]],
        node_id: Callable[[], str],
        report: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._offer = offer
        self._known = known
        self._node_id = node_id
        self._report = report
        self._clock = clock
        self._read: dict[str, Document] = {}
        self._wanted_until_s = self._write_s = -1.0
        self._wake = threading.Event()
        self._is_closed = False
        self._store: _Store | None = None
        self._thread = threading.Thread(target=self._run, name="hieravg-summaries", daemon=True)
        self._thread.start()

    def want(self) -> Mapping[str, Document]:
        """What is known of all nodes, and have it read for a while."""
        was_wanted = self._wanted_until_s > self._clock()
        self._wanted_until_s = self._clock() + WANTED_S
        if not was_wanted:
            self._wake.set()
        return self._read

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        store = self._store
        if store is not None:
            store.close()
        self._thread.join()
        if self._store is not None:
            self._store.close()

    def _run(self) -> None:
        point_s = self._clock()
        while not self._is_closed:
            now_s = self._clock()
            try:
                if now_s >= point_s:
                    point_s = now_s + POINT_EVERY_S
                    self._tell(now_s)
                if now_s < self._wanted_until_s:
                    self._look()
            except Exception:  # noqa: BLE001 - whatever it is, the next summary may be a good one
                self._report()
            self._wake.wait(max(0.0, point_s - self._clock()))
            self._wake.clear()

    def _tell(self, now_s: float) -> None:
        document = self._own()
        if now_s >= self._write_s:
            num_nodes = max(1, len(self._known()))
            self._write_s = now_s + max(POINT_EVERY_S, num_nodes / WRITES_PER_S)
            self._publish(document, num_nodes)

    def _connected(self) -> "_Store | None":
        offer = self._offer()
        store = self._store
        if offer is None or self._is_closed:
            return None
        if store is None or store.where != (offer.address, offer.port):
            if store is not None:
                store.close()
            self._store = store = _Store(offer.address, offer.port)
        return store

    def _publish(self, document: Document, num_nodes: int) -> None:
        bytes_max = min(SUMMARY_BYTES_MAX, FRAME_BYTES_MAX // 2 // num_nodes)
        store = self._connected()
        if store is not None:
            with contextlib.suppress(StoreError, FrameError):
                store.put(PREFIX + self._node_id(), fitted(document, bytes_max=bytes_max))

    def _look(self) -> None:
        store = self._connected()
        if store is None:
            return
        with contextlib.suppress(StoreError, FrameError):
            found = {key.removeprefix(PREFIX): read_summary(text) for key, text in store.all().items()}
            # What is not there any more stays known while its node is: it is shown with its age.
            known = {*self._known()}
            self._read = {
                name: told
                for name, told in (self._read | found).items()
                if told is not None and (name in found or name in known)
            }


class _Store:
    """A client of one generation's store, and the lease of what is written there."""

    def __init__(self, address: str, port: int) -> None:
        self.where = address, port
        self._kv = EmbeddedKeyValue(address, port, run_id=GROUPS_RUN_ID, call_timeout_s=CALL_TIMEOUT_S)
        self._lease_id = 0
        self._renewed_s = 0.0

    def put(self, key: str, text: str) -> None:
        try:
            self._renew()
            self._kv.write(Write({}, (Put(key, text, self._lease_id),)))
        except LeaseLostError:
            # With the next one.
            self._lease_id = 0

    def all(self) -> dict[str, str]:
        return {key: entry.value for key, entry in self._kv.get(PREFIX).entries.items()}

    def close(self) -> None:
        self._kv.close()

    def _renew(self) -> None:
        now_s = time.monotonic()
        if not self._lease_id:
            self._lease_id, self._renewed_s = self._kv.grant(LEASE_TTL_S), now_s
        elif now_s > self._renewed_s + LEASE_TTL_S / 3:
            self._kv.keep_alive(self._lease_id)
            self._renewed_s = now_s
