"""A node's membership as a running service: the store, the leases, the doors, and the member between them.

`Member` decides; here are its threads. One drives the member and makes its requests, one follows the watch,
one keeps the leases alive whatever the others do, and one minds the doors. The owner asks from any thread and
is told of changes by `observe`, in the driving thread, and by `wait`. Invariant: all threads end with
`close`, and nothing in here waits without a bound.
"""

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from elastic_hieravg.errors import (
    HierAvgError,
    LeaseLostError,
    MembershipError,
    Problem,
    StoreAwayError,
    StoreDeniedError,
    StoreError,
)
from elastic_hieravg.membership.decisions import Decision, Policy, View, has_lost_member, num_restart_wanted
from elastic_hieravg.membership.doors import Door, Doors, turn_of, watched_by
from elastic_hieravg.membership.kv import Changes, KeyValue, Snapshot, Watch, Write
from elastic_hieravg.membership.member import JOB_TTL_S, Member
from elastic_hieravg.membership.messages import (
    Adopted,
    Answer,
    Applied,
    Candidate,
    Ended,
    Failed,
    Grant,
    Granted,
    LeaseOver,
    Notice,
    Refreshed,
    Refused,
    Request,
    Unknown,
)
from elastic_hieravg.membership.mirror import Keys
from elastic_hieravg.membership.records import Bounds, Closing, NodeRecord, StoreOffer
from elastic_hieravg.plan import Node

LEASE_TTL_S = 3.0
# A lease is kept alive so many times in its life, the node's and the job's by the shorter of the two.
BEATS_PER_LEASE = 3
# How long a store may take to answer for the first time.
CONNECT_TIMEOUT_S = 30.0
RETRY_S = 0.1
RETRY_MAX_S = 2.0
IDLE_S = 1.0
POLL_S = 0.1
# Of so many incarnations it is remembered when their process ended.
ENDED_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class StoreAway:
    """The store does not answer; the membership stays as it is until it does."""

    why: str


@dataclass(frozen=True, slots=True)
class StoreBack:
    """The store answers again."""


Observe = Callable[[Notice | StoreAway | StoreBack], None]


@dataclass(frozen=True, slots=True)
class Status:
    """What the owner can know at any time. `adopted` is the newest generation that held this node.

    `bounds`: those of the job, None until its record was read.
    """

    node: Node
    decision: Decision
    adopted: Adopted | None = None
    newest_number: int = 0
    num_others: int = 0
    is_listed: bool = False
    is_registered: bool = False
    offer: StoreOffer | None = None
    ended: Closing | None = None
    error: HierAvgError | None = None
    bounds: Bounds | None = None


class Membership:
    """`candidate` is the node as it asks to be in the job; its door's port is filled in here.

    `on_view` is told, in the driving thread, whenever what this node sees of the job has changed.
    """

    def __init__(
        self,
        kv: KeyValue,
        candidate: Candidate,
        *,
        run_id: str,
        policy: Policy,
        lease_ttl_s: float = LEASE_TTL_S,
        observe: Observe = lambda _: None,
        on_view: Callable[[View], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv = kv
        self._clock = clock
        self._observe = observe
        self._on_view = on_view
        self._ended_s: dict[str, float] = {}
        self._lease_ttl_s = lease_ttl_s
        self._inputs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._is_store_away = False
        self._kept_leases: frozenset[int] = frozenset()
        self._watched_doors: tuple[Door, ...] = ()
        self._probed = ""
        self._view: View | None = None
        self._keys = Keys(run_id)
        self._await_store()
        self._doors = Doors(candidate.address, on_death=self._told_of_death, on_life=self._told_of_life)
        try:
            self._member = Member(
                replace(candidate, port=self._doors.port),
                run_id=run_id,
                policy=policy,
                lease_ttl_s=lease_ttl_s,
                new_incarnation=self._new_incarnation,
            )
        except BaseException:
            self._doors.close()
            raise
        self.status = Status(self._member.node, self._member.decision)
        self._watch: Watch = kv.watch(self._keys.prefix)
        self._threads = [
            threading.Thread(target=target, name=f"hieravg-{name}", daemon=True)
            for name, target in (
                ("member", self._drive),
                ("watch", self._follow_watch),
                ("leases", self._keep_leases),
            )
        ]
        self._driver = self._threads[0]
        for thread in self._threads:
            thread.start()

    # --- for the owner --------------------------------------------------------------------------------------

    def ready(self) -> None:
        """The node's workers run and can be connected to."""
        self._post(self._member.ready)

    def renew(self, *, is_ready: bool) -> None:
        """The node's workers start anew."""
        self._post(partial(self._member.renew, is_ready=is_ready))

    def enter(self, number: int) -> None:
        """The node's ranks work in this generation now."""
        self._post(self._member.enter, number)

    def offer_store(self, offer: StoreOffer) -> None:
        """Tell the generation's nodes where the store is that this process serves for them."""
        self._post(self._member.offer_store, offer)

    def change_bounds(self, bounds: Bounds) -> None:
        """Have the job run with other bounds from now on, for everybody."""
        self._post(self._member.change_bounds, bounds)

    def report_broken(self, group: str) -> None:
        """A group failed, known by its key's name."""
        self._post(self._member.report_broken, group)

    def end_job(self, closing: Closing, *, timeout_s: float) -> bool:
        """Write the closing record, for everybody. False if that was not possible in time."""
        self._post(self._member.close, closing)
        self.wait(lambda status: status.ended is not None or status.error is not None, timeout_s=timeout_s)
        return self.status.ended is not None

    def ask_round(self) -> None:
        """Have everybody meet for one more global round, in a generation of its own."""
        self._post(self._member.ask_round)

    def leave(self, *, timeout_s: float) -> bool:
        """Go on purpose; True once a generation without this node is written."""
        self._post(self._member.leave)
        return self.wait(lambda status: not status.is_listed, timeout_s=timeout_s)

    def num_restart_wanted(self) -> int:
        """How many changes call for a restart, as `decisions.num_restart_wanted`."""
        view = self._view
        return 0 if view is None else num_restart_wanted(self._clock(), view=view, policy=self._member.policy)

    def has_lost_member(self) -> bool:
        """Whether the newest generation has lost somebody, as `decisions.has_lost_member`."""
        view = self._view
        return view is not None and has_lost_member(self._clock(), view=view, policy=self._member.policy)

    def ended_s(self, incarnation: str) -> float | None:
        """When this node saw the process of an incarnation end, by its own clock; None if it did not."""
        return self._ended_s.get(incarnation)

    def wait(self, until: Callable[[Status], bool], *, timeout_s: float) -> bool:
        """Until the status is as wanted; False if it is not in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not until(self.status):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                # Some things are wanted that come with time alone.
                self._changed.wait(min(left_s, POLL_S))
        return True

    def close(self) -> None:
        """End everything here, and the node's lease with it. The store itself stays open."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._inputs.put(None)
        self._watch.close()
        for thread in self._threads:
            thread.join()
        self._doors.close()
        with contextlib.suppress(StoreError):
            own = self._member.own_lease
            if own:
                self._kv.revoke(own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the driving thread ---------------------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            self._drive_member()
        except HierAvgError as exc:
            # It says itself what is wrong; anything else is an error in here, and ends in a traceback.
            self._give_up(exc)
            self._observe(Failed(exc))

    def _drive_member(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                wait_s = min(IDLE_S, max(0.0, self._member.wake_s - self._clock()))
                order = self._inputs.get(timeout=wait_s)
                self._take_inputs(order)
            while not self._closed.is_set():
                request = self._member.next(self._clock())
                self._publish()
                if request is None:
                    break
                answer = self._ask(request)
                self._member.answer(self._clock(), answer)
            self._publish()

    def _take_inputs(self, order: Callable[[], None] | None) -> None:
        """This one and all that wait behind it: a burst of changes is one change to decide on."""
        with contextlib.suppress(queue.Empty):
            while order is not None:
                order()
                order = self._inputs.get_nowait()

    def _ask(self, request: Request) -> Answer:
        try:
            answer = self._make(request)
        except LeaseLostError:
            answer = LeaseOver()
        except StoreDeniedError as exc:
            if not self.status.is_registered:
                self._member.fail(exc)
            answer = self._no_answer(exc)
        except StoreError as exc:
            answer = self._no_answer(exc)
        else:
            # Asking the watch to begin anew is no question to the store.
            if not isinstance(answer, Refreshed):
                self._store_answered()
        return answer

    def _make(self, request: Request) -> Answer:
        match request:
            case Grant(_, ttl_s):
                return Granted(self._kv.grant(ttl_s))
            case Write():
                revision = self._kv.write(request)
                return Refused() if revision is None else Applied(revision)
            case _:
                self._watch.resync()
                return Refreshed()

    def _publish(self) -> None:
        """Tell the owner, the leases and the doors what has changed."""
        member = self._member
        self._kept_leases = member.kept_leases
        notices, member.notices = member.notices, []
        status = replace(
            self.status,
            node=member.node,
            decision=member.decision,
            newest_number=member.mirror.generation.number if member.mirror.generation else 0,
            offer=member.mirror.offer,
            num_others=len(member.mirror.nodes.keys() - {member.node.node_id}),
            is_listed=member.is_listed,
            is_registered=member.is_registered,
            bounds=member.policy.job.bounds if member.mirror.job else None,
        )
        for notice in notices:
            match notice:
                case Adopted():
                    status = replace(status, adopted=notice)
                case Ended(closing):
                    status = replace(status, ended=closing)
                case Failed(error):
                    status = replace(status, error=error)
        view = member.view() if member.mirror.is_synced else None
        if view is not self._view:
            self._view = view
            self._mind_doors()
            if view is not None:
                self._on_view(view)
        if status != self.status:
            with self._changed:
                self.status = status
                self._changed.notify_all()
        for notice in notices:
            self._observe(notice)

    def _mind_doors(self) -> None:
        """Watch the doors this node has to watch, and find out whether somebody with its name lives."""
        member = self._member
        nodes = member.mirror.nodes
        order = sorted(nodes)
        # While this node starts anew it keeps the connections it has: what it knows of a door, that it was
        # open, is what makes a death of a refusal later.
        if member.is_registered:
            doors = tuple(_door(nodes[each]) for each in watched_by(member.node.node_id, order))
            if doors != self._watched_doors:
                self._watched_doors = doors
                self._doors.watch(doors)
        rival = member.rival
        if rival is not None and rival.node.incarnation != self._probed:
            self._probed = rival.node.incarnation
            self._doors.probe(_door(rival))

    # --- the other threads ----------------------------------------------------------------------------------

    def _post(self, order: Callable[..., None], *arguments: object) -> None:
        """Have something done in the driving thread."""
        self._inputs.put(partial(order, *arguments))

    def _see(self, update: Snapshot | Changes) -> None:
        self._member.see(self._clock(), update)

    def _new_incarnation(self) -> str:
        incarnation = secrets.token_hex(8)
        self._doors.own(incarnation)
        return incarnation

    def _told_of_death(self, door: Door, why: str) -> None:
        self._post(self._suspect, door, why, self._clock())

    def _told_of_life(self, door: Door) -> None:
        self._post(self._yield_name, door)

    def _suspect(self, door: Door, why: str, ended_s: float) -> None:
        """Everything that was registered at this door is gone."""
        nodes = self._member.mirror.nodes
        order, now_s = sorted(nodes), self._clock()
        for node_id, record in nodes.items():
            if (record.address, record.port) == (door.address, door.port):
                turn = turn_of(self._member.node.node_id, watched=node_id, node_ids=order)
                self._member.suspect(now_s, record.node.incarnation, why=why, turn=turn)
                self._ended_s[record.node.incarnation] = ended_s
        while len(self._ended_s) > ENDED_REMEMBERED:
            del self._ended_s[next(iter(self._ended_s))]

    def _yield_name(self, door: Door) -> None:
        rival = self._member.rival
        if rival is not None and rival.node.incarnation == door.incarnation:
            self._member.yield_name()

    def _follow_watch(self) -> None:
        while not self._closed.is_set():
            try:
                update = self._watch.next(timeout_s=IDLE_S)
            except StoreError as exc:
                self._post(self._store_failed, exc)
                continue
            if update is not None:
                self._post(self._see, update)

    def _keep_leases(self) -> None:
        """Its own thread, so that nothing the others wait for costs the node its lease."""
        regular_s = beat_s = min(self._lease_ttl_s, JOB_TTL_S) / BEATS_PER_LEASE
        while not self._closed.wait(beat_s):
            if not self._driver.is_alive():
                problem = Problem(
                    "an error in elastic_hieravg ended the thread that follows the membership",
                    "read its traceback on stderr, and report it",
                )
                self._give_up(MembershipError(problem))
                return
            for lease_id in sorted(self._kept_leases):
                try:
                    self._kv.keep_alive(lease_id)
                    beat_s = regular_s
                    if self._is_store_away:
                        self._post(self._store_answered)
                except LeaseLostError:
                    self._post(self._member.lose_lease, lease_id)
                except StoreError as exc:
                    # The beat that was missed is made up for soon.
                    beat_s = RETRY_S
                    self._post(self._store_failed, exc)

    def _give_up(self, error: HierAvgError) -> None:
        """The driving thread has ended: a node that nobody drives must not look alive for long."""
        with self._changed:
            # The first one says why.
            self.status = replace(self.status, error=self.status.error or error)
            self._changed.notify_all()

    # --- the store ------------------------------------------------------------------------------------------

    def _await_store(self) -> None:
        """Read the store for the first time: it may start a little later than this node."""
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        wait_s = RETRY_S
        while True:
            try:
                self._kv.get(self._keys.job)
            except StoreAwayError:
                if time.monotonic() + wait_s >= deadline_s:
                    raise
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_MAX_S)
            else:
                return

    def _no_answer(self, exc: StoreError) -> Unknown:
        self._store_failed(exc)
        return Unknown()

    def _store_failed(self, exc: StoreError) -> None:
        if not self._is_store_away and not self._closed.is_set():
            self._is_store_away = True
            self._observe(StoreAway(exc.problems[0].message))

    def _store_answered(self) -> None:
        if self._is_store_away:
            self._is_store_away = False
            self._observe(StoreBack())


def _door(record: NodeRecord) -> Door:
    return Door(record.address, record.port, record.node.incarnation)
