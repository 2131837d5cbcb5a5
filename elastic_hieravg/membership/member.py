"""One node's part in the membership protocol, without any effects of its own.

A `Member` is told what the store says (`see`, `answer`), what connections say (`suspect`) and what its owner
wants (`ready`, `renew`, `leave`, ...), and says what to ask of the store next (`next`). Sockets, threads and
clocks are the business of whoever drives it: `service.Membership` in a job, the simulator in the tests.
Invariant: what it writes is guarded by its own record, so a node that is out writes nothing.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from elastic_hieravg.errors import HierAvgError, MembershipError, Problem
from elastic_hieravg.membership.decisions import Action, Decision, Policy, View, decide, disagreement
from elastic_hieravg.membership.kv import Changes, Put, Snapshot, Write
from elastic_hieravg.membership.messages import (
    Adopted,
    Answer,
    Applied,
    Candidate,
    Ended,
    Failed,
    Fenced,
    Grant,
    Granted,
    Lease,
    LeaseOver,
    Notice,
    Refresh,
    Refreshed,
    Refused,
    Request,
    Unknown,
    Warned,
)
from elastic_hieravg.membership.mirror import Keys, Mirror
from elastic_hieravg.membership.proposing import PlanGeneration, generation_write, guards_of, plan_generation
from elastic_hieravg.membership.records import Bounds, Closing, NodeRecord, NodeState, StoreOffer, Suspicion
from elastic_hieravg.plan import Node, natural_key

# The job's own records outlive its last node by so much.
JOB_TTL_S = 120.0
# A node that comes after the end finds the closing record for so long.
CLOSING_TTL_S = 300.0
# After a failure everybody alive is told at once, and whoever starts again may soon try.
CLOSING_FAILED_TTL_S = 15.0
# The first wait after an answer that did not come, and the longest.
RETRY_S = 0.1
RETRY_MAX_S = 2.0
# A write that was applied and is not seen for so long is looked for.
UNSEEN_S = 1.0
# Whoever sees a peer die waits so long for each who comes before it, and writes if nobody did.
ACCUSE_TURN_S = 0.05


class Member:
    def __init__(
        self,
        candidate: Candidate,
        *,
        run_id: str,
        policy: Policy,
        lease_ttl_s: float,
        new_incarnation: Callable[[], str],
        plan_for: PlanGeneration = plan_generation,
    ) -> None:
        self.mirror = Mirror(Keys(run_id))
        self.policy = policy  # with the bounds that the store has, once it was read
        self._job = policy.job
        self.decision = Decision(Action.WAIT, "the store was not read yet")
        self.wake_s = math.inf
        self.is_over = False
        self.notices: list[Notice] = []
        self._candidate = candidate
        self._lease_ttl_s = lease_ttl_s
        self._new_incarnation = new_incarnation
        self._plan_for = plan_for
        self.node = Node(candidate.node_id, candidate.slots, candidate.labels, new_incarnation())
        self._state = NodeState.JOINING
        self._incarnations = {self.node.incarnation}
        self._was_registered = False
        self._seen = self._seen_told = self._entered = self._asked = 0
        self._leases: dict[Lease, int] = {}
        self._dead: set[str] = set()
        self._accusations: dict[str, tuple[float, str]] = {}
        self._accused = ""
        self._refuted_revision = 0
        self._reports: set[str] = set()
        self._closing: Closing | None = None
        self._offer: StoreOffer | None = None
        self._bounds: Bounds | None = None
        self._in_flight: Request | None = None
        self._is_behind = False
        self._not_before_s = -math.inf
        self._retry_s = RETRY_S
        self._unseen: tuple[float, float] | None = None
        self._group_names: tuple[int, frozenset[str]] = (0, frozenset())
        self._warned: set[str] = set()
        self._decided_on: View | None = None

    # --- what it is told --------------------------------------------------------------------------------

    def see(self, now_s: float, update: Snapshot | Changes) -> None:
        """What the watch brought."""
        self.mirror.apply(now_s, update, nodes_min=self.policy.job.nodes_min)
        if isinstance(update, Snapshot):
            self._is_behind, self._unseen = False, None
        self._follow()

    def answer(self, now_s: float, answer: Answer) -> None:
        """What became of the request in flight."""
        request, self._in_flight = self._in_flight, None
        accused, self._accused = self._accused, ""
        assert request is not None, "an answer follows a request"
        if isinstance(answer, Unknown):
            self._is_behind = True
            self._refuted_revision = 0
            self._not_before_s = now_s + self._retry_s
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
            return
        self._retry_s = RETRY_S
        match answer:
            case Granted(lease_id):
                assert isinstance(request, Grant)
                self._leases[request.purpose] = lease_id
            case Applied(revision):
                self._unseen = (revision, now_s + UNSEEN_S)
                # Said once; until it is known to be said, it is said again.
                self._accusations.pop(accused, None)
                self._note_bounds(request)
            case Refreshed():
                # Until everything is told once more, or asked for again if that takes too long.
                self._unseen = (math.inf, now_s + UNSEEN_S)
            case Refused():
                self._is_behind = True
            case LeaseOver():
                assert isinstance(request, Write)
                self._is_behind = True
                for put in request.puts:
                    self.lose_lease(put.lease_id)

    def lose_lease(self, lease_id: int) -> None:
        """A lease is over; the record that went with it will be missed when the store shows it."""
        self._leases = {purpose: each for purpose, each in self._leases.items() if each != lease_id}

    def fail(self, error: HierAvgError) -> None:
        """This node cannot be in the job."""
        self._end(Failed(error))

    def suspect(self, now_s: float, incarnation: str, *, why: str, turn: int) -> None:
        """There is proof that a peer's process ended. `turn`: how many others saw it and come before."""
        self._dead.add(incarnation)
        self._accusations.setdefault(incarnation, (now_s + turn * ACCUSE_TURN_S, why))

    # --- what its owner wants ---------------------------------------------------------------------------

    def ready(self) -> None:
        """The node's workers run and can be connected to."""
        self._state = NodeState.READY

    def renew(self, *, is_ready: bool) -> None:
        """The node's workers start anew: it is out, and comes back as another incarnation."""
        self._start_anew(NodeState.READY if is_ready else NodeState.JOINING)

    def ask_round(self) -> None:
        """Have everybody meet for one more global round, in a generation of its own."""
        self._asked = self._seen

    def leave(self) -> None:
        self._state = NodeState.LEAVING

    def close(self, closing: Closing) -> None:
        """End the job for everybody."""
        self._closing = closing

    def change_bounds(self, bounds: Bounds) -> None:
        """Have the job run with other bounds from now on, for everybody."""
        self._bounds = bounds

    def enter(self, number: int) -> None:
        """The node's ranks work in this generation now."""
        self._entered = max(self._entered, number)

    def offer_store(self, offer: StoreOffer) -> None:
        """Tell the generation's nodes where its store is; it is served by this node's process."""
        self._offer = offer

    def report_broken(self, group: str) -> None:
        """A group failed, known by its key's name."""
        self._reports.add(group)

    # --- what follows -----------------------------------------------------------------------------------

    @property
    def is_registered(self) -> bool:
        own = self._own()
        return own is not None and own.node.incarnation == self.node.incarnation

    @property
    def is_listed(self) -> bool:
        """Whether the store's generation holds this incarnation."""
        generation = self.mirror.generation
        return generation is not None and generation.lists(self.node)

    @property
    def own_lease(self) -> int:
        return self._leases.get(Lease.NODE, 0)

    @property
    def kept_leases(self) -> frozenset[int]:
        """The leases somebody has to keep alive for this node."""
        return frozenset({self.own_lease, self.mirror.lease_of(self.mirror.keys.job)} - {0})

    @property
    def rival(self) -> NodeRecord | None:
        """Another agent's record under this node's name: whether that agent lives decides who keeps it."""
        own = self._own()
        return own if own is not None and own.node.incarnation not in self._incarnations else None

    def yield_name(self) -> None:
        """The rival lives."""
        rival = self.rival
        if rival is None:
            return
        if self._candidate.may_rename:
            self._rename()
        else:
            self._refuse(
                f"node id {self.node.node_id} is in use by a live agent at {rival.address}:{rival.port}",
                "give every node a name of its own with --node-id",
            )

    def view(self) -> View:
        """What `decide` looks at."""
        view = self.mirror.view(self.node)
        if not view.broken:
            return view
        broken = tuple(name for name in view.broken if name in self._current_groups())
        return replace(view, broken=broken)

    def next(self, now_s: float) -> Request | None:
        """The next request, if there is one now; else `wake_s` says when to ask again at the latest."""
        self.wake_s = math.inf
        if self._in_flight is not None or self.is_over or not self.mirror.is_synced:
            return None
        if now_s < self._not_before_s:
            self.wake_s = self._not_before_s
            return None
        # Speaking up comes before everything: others wait for it, and not for long.
        self._in_flight = self._refute()
        if self._in_flight is not None:
            return self._in_flight
        if self._unseen is not None:
            revision, until_s = self._unseen
            if self.mirror.revision < revision and now_s < until_s:
                self.wake_s = until_s
                return None
            self._is_behind |= self.mirror.revision < revision
            self._unseen = None
        self._in_flight = Refresh() if self._is_behind else self._choose(now_s)
        return self._in_flight

    def _choose(self, now_s: float) -> Request | None:
        if Lease.NODE not in self._leases:
            return Grant(Lease.NODE, self._lease_ttl_s)
        if not self.is_registered:
            return self._write_record()
        return (
            self._write_record()
            or self._create_job()
            or self._write_bounds()
            or self._write_offer()
            or self._write_closing()
            or self._accuse(now_s)
            or self._report()
            or self._change(now_s)
        )

    # --- following the store ----------------------------------------------------------------------------

    def _follow(self) -> None:
        if self.is_over or not self.mirror.is_synced:
            return
        mirror, keys = self.mirror, self.mirror.keys
        for key, error in mirror.unreadable.items():
            if key in (keys.job, keys.generation, keys.closing):
                self.fail(error)
                return
            if key not in self._warned:
                self._warned.add(key)
                self.notices.append(Warned(f"{key} is ignored: {error.problems[0].message}"))
        if mirror.closing is not None:
            self._end(Ended(mirror.closing))
            return
        if not self._take_job():
            return
        refusal = mirror.refusal_of(self.node)
        if refusal is not None:
            self._refuse(f"this node cannot join: {refusal.reason}", "correct its labels, given by --label")
            return
        if self.is_registered:
            self._was_registered = True
        elif self._was_registered:
            self.notices.append(Fenced(self.node.incarnation))
            self._start_anew(self._state)
        self._adopt()

    def _adopt(self) -> None:
        generation = self.mirror.generation
        if generation is None or generation.number < self._seen:
            # The store has forgotten what this node has followed: say so, that numbers only grow.
            self._seen_told = self._seen
            return
        if generation.number == self._seen or not generation.lists(self.node):
            return
        plan, _ = self._plan_for(self.policy.job, generation.number, generation.members)
        if plan.digest != generation.digest:
            self._refuse(
                f"generation {generation.number} has the plan {generation.digest[:12]}, "
                f"and this node computes {plan.digest[:12]} for the same nodes",
                "run the same version of elastic_hieravg on every node",
            )
            return
        self._seen = generation.number
        keys = generation.keys(plan)
        self._group_names = generation.number, frozenset(key.name for key in keys)
        self.notices.append(Adopted(generation, plan, keys))

    def _start_anew(self, state: NodeState) -> None:
        self._state = state
        self._was_registered = False
        self._entered = self._asked = 0
        self._seen_told = self._seen
        self.node = replace(self.node, incarnation=self._new_incarnation())
        self._incarnations.add(self.node.incarnation)

    def _take_job(self) -> bool:
        """Whether this node can be in the job; if so, its bounds are the store's from now on."""
        job, bounds = self.mirror.job, self.mirror.bounds
        if job is None:
            return True
        problem = disagreement(self._job, job, follows_bounds=self.policy.follows_bounds)
        if problem is not None:
            self.fail(MembershipError(problem))
            return False
        job = job.within(bounds) if bounds else job
        self.policy = self.policy if job == self.policy.job else replace(self.policy, job=job)
        return True

    def _refuse(self, message: str, hint: str) -> None:
        self.fail(MembershipError(Problem(message, hint)))

    def _end(self, notice: Ended | Failed) -> None:
        self.is_over = True
        self.notices.append(notice)

    # --- writing ----------------------------------------------------------------------------------------

    def _own(self) -> NodeRecord | None:
        return self.mirror.nodes.get(self.node.node_id)

    def _write(
        self, *, puts: tuple[Put, ...] = (), deletes: tuple[str, ...] = (), seen: tuple[str, ...]
    ) -> Write:
        """A write that holds only while this node is in and the keys `seen` are as seen."""
        own = self.mirror.keys.node(self.node.node_id)
        return Write(guards_of(self.mirror, own, *seen), puts, deletes)

    def _write_record(self) -> Write | None:
        candidate, key = self._candidate, self.mirror.keys.node(self.node.node_id)
        wanted = NodeRecord(
            self.node,
            self._state,
            candidate.address,
            candidate.port,
            seen=self._seen_told,
            entered=self._entered,
            asked=self._asked,
            standby=candidate.standby,
        )
        if self._own() == wanted:
            return None
        rival = self.rival
        if (rival is not None and rival.node.incarnation not in self._dead) or key in self.mirror.unreadable:
            # Perhaps this node's own predecessor, whose lease has not ended yet: waiting costs little.
            self.decision = Decision(Action.WAIT, f"the name {self.node.node_id} is taken")
            return None
        return self._write(puts=(Put(key, wanted.to_json(), self._leases[Lease.NODE]),), seen=())

    def _rename(self) -> None:
        base = self._candidate.node_id
        taken = self.mirror.nodes.keys()
        number = next(n for n in range(2, len(taken) + 3) if f"{base}.{n}" not in taken)
        self.node = replace(self.node, node_id=f"{base}.{number}")

    def _refute(self) -> Write | None:
        """Take the suspicion against this node away, once."""
        key = self.mirror.keys.suspicion(self.node.node_id)
        revision = self.mirror.revision_of(key)
        if self.mirror.suspicion_of(self.node) is None or revision == self._refuted_revision:
            return None
        self._refuted_revision = revision
        return Write({key: revision}, deletes=(key,))

    def _create_job(self) -> Request | None:
        """The first by name does it, so that not everybody asks for a lease for it."""
        if self.mirror.job is not None or min(self.mirror.nodes, key=natural_key) != self.node.node_id:
            return None
        if Lease.JOB not in self._leases:
            return Grant(Lease.JOB, JOB_TTL_S)
        key = self.mirror.keys.job
        return self._write(puts=(Put(key, self.policy.job.to_json(), self._leases[Lease.JOB]),), seen=(key,))

    def _write_bounds(self) -> Write | None:
        if self._bounds == self.policy.job.bounds:
            self._bounds = None
        if self._bounds is None or self.mirror.job is None:
            return None
        key = self.mirror.keys.bounds
        put = Put(key, self._bounds.to_json(), self.mirror.lease_of(self.mirror.keys.job))
        return self._write(puts=(put,), seen=(key,))

    def _note_bounds(self, request: Request) -> None:
        """Said once: others may have been told something newer since, and their word counts as well."""
        if isinstance(request, Write) and any(put.key == self.mirror.keys.bounds for put in request.puts):
            self._bounds = None

    def _write_offer(self) -> Write | None:
        offer, self._offer = self._offer, None
        if offer is None or offer == self.mirror.offer:
            return None
        self._offer = offer
        key = self.mirror.keys.store
        return self._write(puts=(Put(key, offer.to_json(), self._leases[Lease.NODE]),), seen=(key,))

    def _write_closing(self) -> Request | None:
        if self._closing is None:
            return None
        if Lease.CLOSING not in self._leases:
            return Grant(Lease.CLOSING, CLOSING_TTL_S if self._closing.is_success else CLOSING_FAILED_TTL_S)
        key = self.mirror.keys.closing
        return self._write(puts=(Put(key, self._closing.to_json(), self._leases[Lease.CLOSING]),), seen=(key,))

    def _accuse(self, now_s: float) -> Write | None:
        if not self._accusations:
            return None
        live = {record.node.incarnation: record.node for record in self.mirror.nodes.values()}
        self._accusations = {each: what for each, what in self._accusations.items() if each in live}
        for incarnation, (due_s, why) in self._accusations.items():
            node = live[incarnation]
            if self.mirror.suspicion_of(node) is not None:
                continue
            if now_s < due_s:
                self.wake_s = min(self.wake_s, due_s)
                continue
            self._accused = incarnation
            suspicion = Suspicion(incarnation, self.node.node_id, why)
            key = self.mirror.keys.suspicion(node.node_id)
            put = Put(key, suspicion.to_json(), self._leases[Lease.NODE])
            return self._write(puts=(put,), seen=(key, self.mirror.keys.node(node.node_id)))
        return None

    def _report(self) -> Write | None:
        self._reports &= self._current_groups()
        for name in sorted(self._reports - self.mirror.broken):
            key = self.mirror.keys.broken(name)
            return self._write(puts=(Put(key, self.node.node_id, self._leases[Lease.NODE]),), seen=(key,))
        return None

    def _change(self, now_s: float) -> Write | None:
        if self.mirror.job is None:
            return None
        view = self.view()
        if view is not self._decided_on or now_s >= self.decision.again_s or self.decision.proposal:
            self.decision, self._decided_on = decide(now_s, view=view, policy=self.policy), view
        self.wake_s = min(self.wake_s, self.decision.again_s)
        if self.decision.action is Action.STOP:
            self._closing = Closing(False, self.decision.reason)
            self.wake_s = now_s
        if self.decision.proposal is None:
            return None
        return generation_write(
            self.mirror,
            self.decision.proposal,
            writer=self.node,
            job=self.policy.job,
            plan_for=self._plan_for,
        )

    def _current_groups(self) -> frozenset[str]:
        """The names of the groups of the store's generation."""
        generation = self.mirror.generation
        if generation is None:
            return frozenset()
        number, names = self._group_names
        if number != generation.number:
            plan, _ = self._plan_for(self.policy.job, generation.number, generation.members)
            names = frozenset(key.name for key in generation.keys(plan))
            self._group_names = generation.number, names
        return names
