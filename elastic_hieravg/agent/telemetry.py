"""What a node tells the world about itself and its job: metrics, health and status.

The agent and its node say here what happens; the endpoint and the other agents are told what follows from it.
Invariant: nothing in here raises into whoever says something, or makes it wait.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Concatenate, ParamSpec

from elastic_hieravg.agent.logs import Facts
from elastic_hieravg.config import MetricsPlace
from elastic_hieravg.errors import DocumentError
from elastic_hieravg.events import Outcome
from elastic_hieravg.membership.decisions import View
from elastic_hieravg.membership.messages import Adopted, Fenced, Notice
from elastic_hieravg.membership.records import Bounds, Job, Kind, StoreOffer
from elastic_hieravg.membership.service import Status, StoreAway, StoreBack
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.attention import span_text
from elastic_hieravg.metrics.board import Board
from elastic_hieravg.metrics.catalogue import Cause, RestartReason
from elastic_hieravg.metrics.endpoint import (
    HTML_TYPE,
    JSON_TYPE,
    Answer,
    Cached,
    Endpoint,
    listen,
    metrics_route,
    page,
)
from elastic_hieravg.metrics.pace import Pace
from elastic_hieravg.metrics.recovery import Phases, Recovery
from elastic_hieravg.metrics.registry import Registry
from elastic_hieravg.metrics.samples import Samples, read_samples
from elastic_hieravg.metrics.status import (
    DONE,
    STARTING,
    Document,
    JobSeen,
    WorkerSeen,
    status,
    status_json,
    summary,
)
from elastic_hieravg.metrics.summaries import Summaries
from elastic_hieravg.metrics.timeline import Timeline
from elastic_hieravg.plan import NoteKind, Plan

# An agent that has not looked at its workers for so long does not work.
HEALTH_S = 30.0

P = ParamSpec("P")

_log = logging.getLogger(__name__)


def _harmless(
    method: "Callable[Concatenate[Telemetry, P], None]",
) -> "Callable[Concatenate[Telemetry, P], None]":
    """Whatever goes wrong in telling is told once, and nothing else happens."""

    @functools.wraps(method)
    def call(self: "Telemetry", /, *arguments: P.args, **named: P.kwargs) -> None:
        try:
            with self.lock:
                method(self, *arguments, **named)
        except Exception:  # noqa: BLE001 - whatever it is, training goes on
            self.complain()

    return call


class Telemetry:
    """Any thread may say anything. `health_s`: an agent that has not looked for so long is not healthy."""

    def __init__(
        self,
        *,
        run_id: str,
        node_id: str,
        backend: str,
        job: Job,
        slots: int,
        lease_ttl_s: float,
        facts: Facts | None = None,
        health_s: float = HEALTH_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.lock = threading.RLock()
        self._clock = clock
        self._wall = wall
        self._seen = JobSeen(run_id, node_id, backend, job, wall())
        self._node_id = node_id
        self._job = job
        self._lease_ttl_s = lease_ttl_s
        self._health_s = health_s
        self._facts = facts or Facts()
        self._facts.run, self._facts.node = run_id, node_id
        self._has_complained = False
        self._workers = [WorkerSeen(slot, restarts=-1, absence=STARTING) for slot in range(slots)]
        self._timeline = Timeline(clock(), slots=slots)
        self._recovery = Recovery()
        self._board = Board(nodes_max=job.nodes_max)
        self._pace = Pace()
        self._plan: Plan | None = None
        self._is_store_up = True
        self._began_s = self._looked_s = clock()
        self.is_meeting = False
        self._port = 0
        self._endpoint: Endpoint | None = None
        self._summaries: Summaries | None = None
        self.registry = Registry(refresh=self._refresh)
        self._declare()

    # --- serving ----------------------------------------------------------------------------------------------

    def serve(
        self,
        place: MetricsPlace | None,
        *,
        why_not_ready: Callable[[], str],
        membership: Callable[[], Status],
        has_group_store: bool,
    ) -> None:
        """Begin to serve, and to tell the other agents if the newest generation's store takes it."""
        if place is not None:
            self._open(place, why_not_ready=why_not_ready, membership=membership)
        if has_group_store:
            self._summaries = Summaries(
                own=self._point,
                offer=lambda: _offer_of(membership()),
                known=self._known,
                node_id=lambda: self._node_id,
                report=self.complain,
            )

    def _open(
        self, place: MetricsPlace, *, why_not_ready: Callable[[], str], membership: Callable[[], Status]
    ) -> None:
        listener = listen(place.host, place.port)
        if listener is None:
            _log.warning(
                "no metrics and no status page: --metrics-host %s is not an address of this machine", place.host
            )
            return
        if listener.warning:
            _log.warning("%s", listener.warning)
        make_status = Cached(lambda: self._status(membership()))
        page_body = page()
        self._endpoint = Endpoint(
            listener,
            {
                "/": lambda _: Answer(page_body, HTML_TYPE),
                "/metrics": metrics_route(self.registry),
                "/status": lambda _: Answer(make_status(), JSON_TYPE),
                "/healthz": lambda _: _verdict(self._why_not_healthy()),
                "/readyz": lambda _: _verdict(why_not_ready()),
            },
            report=lambda text: _log.warning("%s", text),
        )
        self._port = self._endpoint.port
        shown = f"[{place.host}]" if ":" in place.host else place.host
        _log.info("metrics and status of this node: http://%s:%s/", shown, self._port)

    @property
    def port(self) -> int:
        """Where metrics are served; 0 if nowhere."""
        return self._port

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        if self._summaries is not None:
            self._summaries.close()

    def complain(self) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.exception(
                "an error in elastic_hieravg: metrics are not complete from here on; training goes on"
            )

    # --- what happens -----------------------------------------------------------------------------------------

    @_harmless
    def looked(self) -> None:
        """The agent has looked at its workers."""
        self._looked_s = self._clock()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """The agent waits for the others, bounded by itself; there are no workers to look at."""
        self.is_meeting = True
        try:
            yield
        finally:
            self.is_meeting = False
            self.looked()

    @_harmless
    def viewed(self, view: View, ended_s: Callable[[str], float | None] = lambda _: None) -> None:
        """What this node sees of the job has changed. `ended_s`: when it saw a process end, if it did."""
        self._node_id = self._facts.node = view.me.node_id
        self._board.see(self._wall(), view)
        if view.bounds is not None and view.bounds != self._job.bounds:
            self._note_bounds(view.bounds)
        lost = {loss.incarnation for loss in (view.lost or {}).values()}
        members = view.generation.members if view.generation else ()
        self._recovery.spoke_up({member.incarnation for member in members} - lost)
        for loss in (view.lost or {}).values():
            if not loss.is_on_purpose and self._plan is not None:
                last_sign_s = self._last_sign_s(loss.incarnation, loss.why, loss.since_s, ended_s)
                self._tell_phases(
                    self._recovery.lost(loss.incarnation, since_s=loss.since_s, last_sign_s=last_sign_s)
                )
        counts = self._board.count_by_state()
        self.registry.set_gauges(names.NODES, {(str(state),): count for state, count in counts.items()})

    @_harmless
    def noticed(self, notice: Notice | StoreAway | StoreBack) -> None:
        match notice:
            case Adopted():
                self._adopt(notice)
            case Fenced():
                self._recovery.forget()
            case StoreAway() | StoreBack():
                self._is_store_up = isinstance(notice, StoreBack)

    @_harmless
    def workers_start(self) -> None:
        """All workers of this node are about to start, for the first time or anew."""
        for before in self._workers:
            if before.process_id:
                self._timeline.gone(self._clock(), slot=before.local_rank)
        self._workers = [
            WorkerSeen(before.local_rank, restarts=before.restarts, absence=STARTING)
            for before in self._workers
        ]

    @_harmless
    def worker_came(self, local_rank: int, process_id: int) -> None:
        before = self._workers[local_rank]
        self._workers[local_rank] = WorkerSeen(local_rank, process_id, restarts=before.restarts + 1)
        self._timeline.came(self._clock(), slot=local_rank)

    @_harmless
    def worker_gone(self, local_rank: int, process_id: int) -> None:
        self.registry.drop(local_rank=local_rank, process_id=process_id)
        before = self._workers[local_rank]
        if before.process_id == process_id:
            self._workers[local_rank] = replace(before, process_id=0, samples=None)
            self._timeline.gone(self._clock(), slot=local_rank)
            self._recovery.forget()

    @_harmless
    def worker_done(self, local_rank: int) -> None:
        """Its training loop has ended."""
        self._workers[local_rank] = replace(self._workers[local_rank], absence=DONE)
        self._timeline.done(self._clock(), slot=local_rank)

    @_harmless
    def measured(self, local_rank: int, process_id: int, text: str) -> None:
        before = self._workers[local_rank]
        if before.process_id != process_id:
            return
        try:
            samples = read_samples(text)
        except DocumentError:
            self.registry.count(names.REPORTS_DROPPED)
            self.complain()
            return
        self.registry.take(samples, local_rank=local_rank, process_id=process_id)
        self._workers[local_rank] = replace(before, samples=samples)
        self._timeline.told(
            self._clock(),
            slot=local_rank,
            productive_s=samples.counters.get((names.PRODUCTIVE_SECONDS, ()), 0.0),
            badput_s={cause: samples.counters.get((names.BADPUT_SECONDS, (cause,)), 0.0) for cause in Cause},
            num_steps=samples.counters.get((names.STEPS, ()), 0.0),
        )
        step = max(each.samples.step for each in self._workers if each.samples is not None)
        # A worker that joins does not know it yet.
        self._facts.step = step or self._facts.step
        self._note_round(samples)

    @_harmless
    def entered(self, number: int) -> None:
        """All workers of this node work in a generation."""
        self._tell_phases(self._recovery.entered(self._clock(), number=number))

    @_harmless
    def restarted(self, reason: RestartReason) -> None:
        """The workers of this node are started anew, all of them."""
        self.registry.count(names.WORKER_RESTARTS, str(reason))

    # --- what follows -----------------------------------------------------------------------------------------

    def _declare(self) -> None:
        registry, job = self.registry, self._job
        registry.set_build_info()
        self._note_bounds(job.bounds)
        # What is counted from nothing is there from the start: a rate over it needs the 0.
        for kind in Kind:
            registry.count(names.GENERATIONS, str(kind), amount=0.0)
        for reason in RestartReason:
            registry.count(names.WORKER_RESTARTS, str(reason), amount=0.0)
        for cause in Cause:
            registry.count(names.BADPUT_SECONDS, str(cause), amount=0.0)
        for phase in names.Phase:
            registry.expect(names.RECOVERY_SECONDS, str(phase))
        registry.count(names.PRODUCTIVE_SECONDS, amount=0.0)
        registry.count(names.REPORTS_DROPPED, amount=0.0)
        registry.set_gauge(names.GENERATION, value=0)
        registry.set_gauge(names.WORLD_RANKS, value=0)
        registry.set_gauges(names.NODES, {(str(state),): 0 for state in self._board.count_by_state()})
        self._note_plan(None)

    def _note_bounds(self, bounds: Bounds) -> None:
        self._job = self._job.within(bounds)
        self._seen = replace(self._seen, job=self._job)
        self.registry.set_gauge(names.NODES_LIMIT, "min", value=bounds.nodes_min)
        self.registry.set_gauge(names.NODES_LIMIT, "max", value=bounds.nodes_max)

    def _refresh(self) -> None:
        """What changes with time alone."""
        with self.lock:
            now_s = self._clock()
            for cause, seconds in self._timeline.own(now_s).items():
                self.registry.set_total(names.BADPUT_SECONDS, str(cause), value=seconds)
            self.registry.set_gauge(names.GOODPUT, value=self._timeline.goodput(now_s))
            self.registry.set_gauge(names.STORE_UP, value=float(self._is_store_up))

    def _adopt(self, adopted: Adopted) -> None:
        generation = adopted.generation
        members = {member.incarnation for member in generation.members}
        self._tell_phases(self._recovery.adopted(self._clock(), number=generation.number, members=members))
        self._plan = adopted.plan
        self._facts.generation = generation.number
        self.registry.count(names.GENERATIONS, str(generation.kind))
        self.registry.set_gauge(names.GENERATION, value=generation.number)
        self.registry.set_gauge(names.WORLD_RANKS, value=adopted.plan.world_size)
        self._note_plan(adopted.plan)

    def _note_plan(self, plan: Plan | None) -> None:
        notes = [note.kind for note in plan.notes] if plan else []
        self.registry.set_gauges(names.PLAN_NOTES, {(str(kind),): notes.count(kind) for kind in NoteKind})

    def _last_sign_s(
        self, incarnation: str, why: str, since_s: float, ended_s: Callable[[str], float | None]
    ) -> float | None:
        """The last sign of life of somebody who is lost, as far as this node can know."""
        seen_s = ended_s(incarnation)
        if seen_s is not None:
            return min(seen_s, since_s)
        if why == "it started anew":
            # Its own agent says so, as soon as a worker is gone.
            return since_s
        # A lease ends when nothing was heard for as long as it is. Who saw a process end tells of it itself.
        return since_s - self._lease_ttl_s if why == "its lease ended" else None

    def _note_round(self, samples: Samples) -> None:
        plan = self._plan
        last = samples.rounds.get(plan.levels[-1].name) if plan and plan.levels else None
        if last is not None and last.outcome == Outcome.COMMITTED:
            at_s = self._clock() - (self._wall() - last.at_s)
            self._tell_phases(self._recovery.committed(at_s, number=samples.generation))

    def _tell_phases(self, phases: Phases) -> None:
        for phase, seconds in phases:
            self.registry.observe(names.RECOVERY_SECONDS, str(phase), value=seconds)

    # --- for whoever asks -------------------------------------------------------------------------------------

    def steps_since_round(self) -> int:
        """The steps of this node's workers that are in nobody else's model, as far as they have told."""
        with self.lock:
            plan = self._plan
            widest = plan.levels[-1].name if plan and plan.levels else ""
            told = [each.samples for each in self._workers if each.samples is not None]
            # `last` may be a round that failed; then the steps before it count too, and are not known here.
            lasts = [(samples, samples.rounds.get(widest)) for samples in told]
            return max((samples.step - (last.step if last else 0) for samples, last in lasts), default=0)

    def log_end(self) -> None:
        """The last word of a job that is done."""
        took = span_text(self._clock() - self._began_s)
        _log.info("training is done at step %s; this node was part of it for %s", self._facts.step, took)

    def _why_not_healthy(self) -> str:
        silent_s = 0.0 if self.is_meeting else self._clock() - self._looked_s
        return (
            f"the agent has not looked at its workers for {silent_s:.0f} s" if silent_s > self._health_s else ""
        )

    def _known(self) -> Collection[str]:
        return self._board.nodes.keys()

    def _point(self) -> Document:
        """This node's summary, with one more point of its pace."""
        with self.lock:
            heard = {
                (each.local_rank, each.process_id): each.samples
                for each in self._workers
                if each.samples is not None
            }
            self._pace.point(self._clock(), heard)
        return self._summary()

    def _summary(self) -> Document:
        with self.lock:
            step_seconds = self._pace.step_seconds_of
            workers = [
                replace(
                    each,
                    restarts=max(0, each.restarts),
                    step_seconds=step_seconds.get((each.local_rank, each.process_id)),
                )
                for each in self._workers
            ]
            return summary(
                self._wall(),
                workers=workers,
                pace=self._pace,
                goodput_ratio=self._timeline.goodput(self._clock()),
                metrics_port=self._port,
            )

    def _status(self, membership: Status) -> bytes:
        others: Mapping[str, Document] = self._summaries.want() if self._summaries else {}
        own = self._summary()
        with self.lock:
            seen = self._seen
            found = JobSeen(
                seen.run_id,
                self._node_id,
                seen.backend,
                seen.job,
                seen.began_s,
                str(membership.decision.action),
                membership.decision.reason,
                self._is_store_up,
                self._plan,
                {**others, self._node_id: own},
            )
            document = status(self._wall(), seen=found, board=self._board)
        # Of a large job it is long; nobody who tells something waits for it to be written.
        return status_json(document)


def _offer_of(status: Status) -> StoreOffer | None:
    """The store of the newest generation, if this node is in it."""
    return status.offer if status.is_listed else None


def _verdict(why_not: str) -> Answer:
    return Answer(f"{why_not}\n".encode(), status=503) if why_not else Answer(b"ok\n")
