"""torch's rendezvous, on our membership: every round is a generation, with a store of its own.

torchrun restarts its workers whenever `num_nodes_waiting` is not 0: it is not 0 when somebody came, left, died
or started anew, which torch's own backends notice late or never. Each rendezvous is a new incarnation of the
node, so that no round can meet what an earlier one left behind.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.logging import get_logger

from elastic_hieravg.config import NODE_ID_VARIABLE, OWNER_VARIABLE, export
from elastic_hieravg.errors import HierAvgError, StoreError
from elastic_hieravg.membership.decisions import Action, Policy, View
from elastic_hieravg.membership.etcd import EtcdKeyValue
from elastic_hieravg.membership.kv import KeyValue
from elastic_hieravg.membership.messages import Adopted, Candidate, Fenced, Notice, Warned
from elastic_hieravg.membership.records import Closing, StoreOffer
from elastic_hieravg.membership.service import Membership, Observe, Status, StoreAway, StoreBack
from elastic_hieravg.membership.snapshot_files import Owner, remove_of, remove_stale
from elastic_hieravg.rendezvous import BACKEND
from elastic_hieravg.rendezvous.round_store import RoundStore, cut_connections
from elastic_hieravg.rendezvous.settings import read_settings

# How long a round's store may take to be offered, and to be connected to.
STORE_TIMEOUT_S = 30.0
# How long the end of a job may take to be written.
CLOSE_TIMEOUT_S = 10.0
# A connection that broke is a sign; that a node is lost is known so much after its lease at the latest.
LOSS_MARGIN_S = 2.0
POLL_S = 0.5
CUT_EVERY_S = 0.1

# Beside the loggers of torch's own backends, so that its handlers and LOGLEVEL hold for this one too.
_log = get_logger(f"torch.distributed.elastic.rendezvous.{BACKEND}")


def create_handler(parameters: RendezvousParameters) -> "MembershipRendezvousHandler":
    """A handler for what torchrun was told, connected to etcd; `ValueError` with what is wrong with it."""
    try:
        settings = read_settings(
            run_id=parameters.run_id,
            endpoint=parameters.endpoint,
            nodes_min=parameters.min_nodes,
            nodes_max=parameters.max_nodes,
            local_address=parameters.local_addr,
            conf=parameters.config,
        )
        return MembershipRendezvousHandler(
            EtcdKeyValue(settings.etcd),
            settings.candidate,
            backend=BACKEND,
            run_id=settings.run_id,
            policy=settings.policy,
            lease_ttl_s=settings.lease_ttl_s,
        )
    except StoreError as exc:
        raise RendezvousConnectionError(str(exc)) from exc
    except HierAvgError as exc:
        raise ValueError(str(exc)) from exc


class MembershipRendezvousHandler(RendezvousHandler):
    """`kv` is the store of the membership, whichever it is; it is closed with the handler.

    `observe` and `on_view` are told what the membership tells, as `Membership` says.
    """

    def __init__(
        self,
        kv: KeyValue,
        candidate: Candidate,
        *,
        backend: str,
        run_id: str,
        policy: Policy,
        lease_ttl_s: float,
        observe: Observe = lambda _: None,
        on_view: Callable[[View], None] = lambda _: None,
    ) -> None:
        self._backend = backend
        self._told_too = observe
        self._run_id = run_id
        self._policy = policy
        self._lease_ttl_s = lease_ttl_s
        self._address = candidate.address
        # The store of the round that runs, if it is this process that serves it.
        self._server: TCPStore | None = None
        self._watched: tuple[int, str, int] | None = None
        self._has_run = False
        self._told = ""
        self._closed = threading.Event()
        self._kv = kv
        # What agents that are gone have left; this one's workers may need the room.
        remove_stale(time.time())
        self._owner = Owner.of_process(os.getpid())
        try:
            self._membership = Membership(
                kv,
                candidate,
                run_id=run_id,
                policy=policy,
                lease_ttl_s=lease_ttl_s,
                observe=self._observe,
                on_view=on_view,
            )
        except BaseException:
            self._kv.close()
            raise
        self._cutter = threading.Thread(target=self._cut_rounds, name="hieravg-rounds", daemon=True)
        self._cutter.start()
        # torchrun does not shut its handler down when a signal ends it.
        atexit.register(self._close)
        self._membership.wait(_is_first_known, timeout_s=STORE_TIMEOUT_S)
        error = self._membership.status.error
        if error is not None:
            self._close()
            raise error

    def get_backend(self) -> str:
        return self._backend

    @property
    def status(self) -> Status:
        return self._membership.status

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        deadline_s = time.monotonic() + self._policy.pause_s
        while True:
            before = self._membership.status.adopted
            self._membership.renew(is_ready=True)
            after = before.generation.number if before else 0
            adopted = self._await_generation(after=after, deadline_s=deadline_s)
            info = self._enter(adopted)
            if info is not None:
                self._has_run = True
                # For the workers: who they are, and that this process removes what they keep.
                node_id = self._membership.status.node.node_id
                export({NODE_ID_VARIABLE: node_id, OWNER_VARIABLE: str(self._owner)})
                return info
            _log.info("generation %s ended before it began", adopted.generation.number)

    def is_closed(self) -> bool:
        return self._membership.status.ended is not None

    def set_closed(self) -> None:
        closing = Closing(True, f"closed by {self._membership.status.node.node_id}")
        if not self._membership.end_job(closing, timeout_s=CLOSE_TIMEOUT_S):
            raise RendezvousConnectionError("the store did not take the end of the job in time")

    def num_nodes_waiting(self) -> int:
        status = self._membership.status
        if status.ended is not None or status.error is not None:
            # Nobody will come to another round: what runs may finish.
            return 0
        return self._membership.num_restart_wanted()

    def shutdown(self) -> bool:
        """torchrun is done. It does not say how, but calls this while the exception is on its way, if any."""
        error = sys.exception()
        try:
            if error is None:
                self.set_closed()
            elif not isinstance(error, SystemExit):
                self._give_up(error)
        except RendezvousConnectionError as exc:
            _log.warning("%s", exc)
            return False
        finally:
            self._close()
        return True

    # --- a round ----------------------------------------------------------------------------------------------

    def _await_generation(self, *, after: int, deadline_s: float) -> Adopted:
        """The first generation after that number that holds this node."""
        while True:
            self._membership.wait(lambda status: _is_decided(status, after=after), timeout_s=POLL_S)
            status = self._membership.status
            self._check(status)
            if status.adopted is not None and status.adopted.generation.number > after:
                return status.adopted
            if status.decision.reason != self._told:
                self._told = status.decision.reason
                _log.info("waiting: %s", self._told)
            if status.decision.action is Action.KEEP:
                # A spare waits as long as the job runs without it.
                deadline_s = time.monotonic() + self._policy.pause_s
            if time.monotonic() > deadline_s + CLOSE_TIMEOUT_S:
                raise RendezvousTimeoutError(f"no round began within join_timeout: {status.decision.reason}")

    def _check(self, status: Status) -> None:
        """Leave if the job is over, or this node cannot be in it."""
        if status.error is not None:
            raise RendezvousStateError(str(status.error)) from status.error
        if status.ended is None:
            return
        if status.ended.is_success and not self._has_run:
            _log.warning(
                "run %s is over (%s); this node came too late and is not needed; to run it again, "
                "use another --rdzv-id",
                self._run_id,
                status.ended.reason,
            )
            # The way out of torchrun with exit code 0: its own exception for this crashes it.
            raise SystemExit(0)
        raise RendezvousClosedError(f"run {self._run_id} is over: {status.ended.reason}")

    def _enter(self, adopted: Adopted) -> RendezvousInfo | None:
        """Meet the others at the generation's store; None if the generation is over before that."""
        generation = adopted.generation
        number, world_size = generation.number, len(generation.members)
        rank = [member.node_id for member in generation.members].index(self._membership.status.node.node_id)
        if rank == 0:
            self._serve(number)
        if not self._membership.wait(
            lambda status: _is_offered(status, number) or self._is_over(number),
            # Not before the lease of the one who should offer it has had the time to end.
            timeout_s=max(STORE_TIMEOUT_S, self._loss_known_s),
        ):
            raise RendezvousTimeoutError(f"generation {number} was not offered a store in time")
        offer = self._membership.status.offer
        if offer is None or offer.generation != number:
            return None
        try:
            store = self._connect(offer, number)
        except RuntimeError as exc:
            if self._await_end(number):
                return None
            raise RendezvousConnectionError(f"the round's store does not answer: {exc}") from exc
        round_store = RoundStore(
            store, rank=rank, world_size=world_size, await_end=lambda: self._await_end(number)
        )
        return RendezvousInfo(round_store, rank, world_size, RendezvousStoreInfo(offer.address, offer.port))

    def _serve(self, number: int) -> None:
        address = self._address
        # The one before is dropped only now: others may have been on their way through it.
        self._server = TCPStore(
            host_name=address,
            port=0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
        )
        self._membership.offer_store(StoreOffer(number, address, self._server.port))

    def _connect(self, offer: StoreOffer, number: int) -> TCPStore:
        self._watched = (number, offer.address, offer.port)
        return TCPStore(
            host_name=offer.address,
            port=offer.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
        )

    def _is_over(self, number: int) -> bool:
        """Whether the round lost somebody, or another one took its place."""
        status = self._membership.status
        is_gone = status.ended is not None or status.error is not None or status.newest_number != number
        return is_gone or self._membership.has_lost_member()

    @property
    def _loss_known_s(self) -> float:
        """A node that is lost is known to be so after this long, whatever took it."""
        return self._lease_ttl_s + LOSS_MARGIN_S

    def _await_end(self, number: int) -> bool:
        return self._membership.wait(lambda _: self._is_over(number), timeout_s=self._loss_known_s)

    def _cut_rounds(self) -> None:
        """End the waits of a round that is over: a call to its store has no bound of its own."""
        while not self._closed.wait(CUT_EVERY_S):
            watched = self._watched
            if watched is not None and self._is_over(watched[0]):
                self._watched = None
                cut_connections(watched[1], watched[2])

    # --- the end ----------------------------------------------------------------------------------------------

    def _give_up(self, error: BaseException) -> None:
        """This node failed. If the others can go on they do; if not, the job is over for them too."""
        status = self._membership.status
        reason = f"{status.node.node_id} failed: {type(error).__name__}"
        if status.num_others < self._policy.job.nodes_min:
            self._membership.end_job(Closing(False, reason), timeout_s=CLOSE_TIMEOUT_S)

    def _close(self) -> None:
        atexit.unregister(self._close)
        self._closed.set()
        self._cutter.join()
        self._membership.close()
        self._kv.close()
        # The workers have ended: nobody will need their snapshots.
        if self._owner is not None:
            remove_of(self._owner)

    def _observe(self, notice: Notice | StoreAway | StoreBack) -> None:
        self._told_too(notice)
        match notice:
            case Adopted(generation):
                _log.info("generation %s: %s", generation.number, generation.reason)
            case Fenced():
                _log.warning(
                    "the others did not hear from this node in time and took it out of the job; it joins again"
                )
            case StoreAway(why):
                _log.warning(
                    "the store does not answer; training goes on, "
                    "but no node can join or leave until it does: %s",
                    why,
                )
            case StoreBack():
                _log.warning("the store answers again")
            case Warned(text):
                _log.warning("%s", text)


def _is_first_known(status: Status) -> bool:
    return status.is_registered or status.ended is not None or status.error is not None


def _is_decided(status: Status, *, after: int) -> bool:
    is_adopted = status.adopted is not None and status.adopted.generation.number > after
    return is_adopted or status.ended is not None or status.error is not None


def _is_offered(status: Status, number: int) -> bool:
    return status.offer is not None and status.offer.generation == number
