"""A worker's place in a job: `eh.join()` and what it gives. This is what training scripts see.

Under `hieravg run` the agent tells of every generation; alone, the job is a world of one. Invariant: leaving
the block normally ends with all replicas alike; leaving it by an exception does not wait for anybody.
"""

import atexit
import faulthandler
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import Self, SupportsFloat

from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup
from torch.optim import Optimizer

from elastic_hieravg.averaging.averager import STATE_VERSION, HierarchicalAverager
from elastic_hieravg.averaging.groups import NodeWorld, has_default_group, node_process_group
from elastic_hieravg.config import RestartPlace, WorkerPlace, read_worker_place
from elastic_hieravg.errors import InputError, MembershipError, Problem, raise_if_any
from elastic_hieravg.events import Observe, RoundDone, ignore
from elastic_hieravg.membership.local import (
    Bye,
    Drain,
    Fence,
    Follow,
    FromAgent,
    FromWorker,
    Measured,
    Progress,
    Raised,
    Ready,
    Stop,
)
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.snapshot_files import Owner, path_of
from elastic_hieravg.metrics.catalogue import Cause, Link
from elastic_hieravg.metrics.samples import Samples
from elastic_hieravg.metrics.tally import Tally
from elastic_hieravg.plan import Hierarchy, Node, Plan, Topology, fit
from elastic_hieravg.worker.averager import ElasticAverager
from elastic_hieravg.worker.keeping import Keeper
from elastic_hieravg.worker.link import AgentLink

# How often the agent is told how far this worker is. Without news too: one that waits is not silent, a frozen
# one is. Less than the shortest time for which a worker may be asked to stand still.
PROGRESS_S = 0.5
# What is measured is told less often: it costs the agent more.
PROGRESS_PER_SAMPLES = 2
# Who is late is waited for, however long its step: a death is told by the membership, a hang by its agent.
ROUND_TIMEOUT_S = 3600.0
# Whoever is in a generation can be connected to.
BUILD_TIMEOUT_S = 30.0
# A script reports no more names than these: a number in a name is a mistake.
REPORTED_NAMES_MAX = 50
PROCESS_GROUPS = ("node",)
# So much of a traceback is told to the agent.
RAISED_MAX = 16_000
# The agent asks for every thread's stack with this before it kills a worker that hangs.
STACKS_SIGNAL = signal.SIGUSR2
# A worker whose node came back into the job, and that cannot go on where it is.
EXIT_OUT_OF_STEP = 1
# A rank without a generation is alone: nothing is ever due.
_ALONE = Hierarchy.parse("global=1")

_log = logging.getLogger(__name__)
# The places that were taken by this process, and by the one it was forked from.
_entered: set[tuple[int, str, int]] = set()


def join() -> "Job":
    """Take this process's place in the job: under `hieravg run`, under torchrun, or alone."""
    place = read_worker_place()
    if isinstance(place, RestartPlace):
        from elastic_hieravg.worker.restarted import RestartedJob  # noqa: PLC0415 - it is made of this module

        return RestartedJob(place)
    return Job(place)


def _enter_once(socket: str, local_rank: int) -> None:
    """A second place would be given to the same worker: its agent, and all others, would wait for both."""
    place = os.getpid(), socket, local_rank
    if place in _entered:
        raise MembershipError(
            Problem(
                f"worker {local_rank} has joined the job already",
                "call eh.join(), or eh.attach(), once in a script: the job ends with the first one",
            )
        )
    _entered.add(place)


class Job:
    """Use it as a context manager, around the training loop."""

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        plan = fit(_ALONE, Topology([Node("alone", 1)]))
        assert isinstance(plan, Plan)
        self.plan: Plan = plan
        self.rank = 0
        self.generation = 0
        self._averager: ElasticAverager | None = None
        # Whether the node's workers talk to each other by themselves in a step.
        self._is_talking: Callable[[], bool] = has_default_group
        self._link: AgentLink | None = None
        self._callbacks: list[Callable[[Job], None]] = []
        self._closers: list[Callable[[], None]] = []
        self._reported: dict[str, float] = {}
        self._process_group: ProcessGroup | None = None
        self._num_quiet = 0
        self._links: dict[str, str] = {}
        self._tally = Tally(link_of=self._link_of)
        self._last_step = 0
        self._early: list[FromAgent] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reporter: threading.Thread | None = None

    # --- where this worker is ---------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def local_rank(self) -> int:
        return self._place.local_rank

    @property
    def node_rank(self) -> int:
        return next(index for index, (_, ranks) in enumerate(self.plan.topology.placed()) if self.rank in ranks)

    @property
    def step(self) -> int:
        """The optimizer steps of the job so far; a worker that joins begins with the others' number."""
        return self._averager.step_count if self._averager else self._last_step

    @property
    def should_stop(self) -> bool:
        """The end, agreed by all in the same global round."""
        return self._averager is not None and self._averager.is_ended

    # --- for the training script ------------------------------------------------------------------------------

    def averager(
        self,
        model: nn.Module | Iterable[Tensor],
        optimizer: Optimizer | None = None,
        *,
        step: int = 0,
        hierarchy: Hierarchy | str | None = None,
        average_buffers: bool = True,
        observe: Observe = ignore,
    ) -> ElasticAverager:
        """Average this model over the job's hierarchy. Returns when the model is everybody's.

        The hierarchy is the launcher's: agents plan with it before any script runs. One given here has to be
        the same. A worker that joins a running job waits here for its first global round, so that model and
        `job.step` are right when its loop starts. `step`: of the checkpoint that model and optimizer were
        loaded from; it counts if the job starts.
        """
        if self._averager is not None:
            raise MembershipError(
                Problem(
                    "job.averager() was called twice",
                    "make one averager; put several models into one torch.nn.ModuleList",
                )
            )
        self._check_hierarchy(hierarchy)
        check_step(step)
        observe = self._observed_too(observe)
        model = model if isinstance(model, nn.Module) else list(model)
        engine = HierarchicalAverager(
            model,
            plan=self.plan,
            rank=0,
            store=HashStore(),
            average_buffers=average_buffers,
            equalize=False,
            observe=observe,
            timeout_s=ROUND_TIMEOUT_S,
            build_timeout_s=BUILD_TIMEOUT_S,
        )
        # DDP sends gradients through our hook if there is one, and buffers by itself.
        has_buffers = isinstance(model, nn.Module) and any(True for _ in model.buffers())
        self._is_talking = lambda: has_default_group() and (has_buffers or not engine.is_hooked)
        keeper = self._keeper(model, optimizer) if engine.tensors else None
        averager = ElasticAverager(
            engine,
            local_rank=self.local_rank,
            optimizer=optimizer,
            tell=self._tell,
            on_change=self._changed,
            tally=self._tally,
            observe=observe,
            keeper=keeper,
        )
        with self._lock:
            self._averager = averager
            early, self._early = self._early, []
            for message in early:
                self._heed(averager, message)
        # Before it says anything. Neither counts for anything as long as anybody holds the model.
        kept = keeper.restore(after_step=step) if keeper is not None and self._link is not None else None
        engine.load_state_dict({"version": STATE_VERSION, "step": kept or step, "samples": {}})
        if self._link is None:
            averager.hold_alone()
        else:
            self._tell(Ready())
            averager.join()
        return averager

    def process_group(self, name: str = "node") -> ProcessGroup:
        """A process group of torch over this node's workers, for DDP or FSDP inside the node.

        Collective over them. It ends with the job, and when the node's workers start anew there is a new one.
        """
        if name not in PROCESS_GROUPS:
            raise InputError(
                Problem(
                    f"there is no process group {name!r}",
                    f"ask for {' or '.join(map(repr, PROCESS_GROUPS))}; the averager reaches all other ranks",
                )
            )
        if self._process_group is None:
            self._process_group, close = node_process_group(self._node_world())
            self._closers.append(close)
        return self._process_group

    def report(self, **values: SupportsFloat) -> None:
        """Say how the training goes: `job.report(loss=loss)`. The newest number of each name is kept."""
        numbers = {name: _number(value) for name, value in values.items()}
        problems = [
            Problem(
                f"job.report() was given {name}={str(values[name])[:40]!r}", "report numbers, one for each name"
            )
            for name, number in numbers.items()
            if number is None
        ]
        names = {*self._reported, *numbers}
        if len(names) > REPORTED_NAMES_MAX:
            new = ", ".join(sorted(names - self._reported.keys())[:3])
            problems.append(
                Problem(
                    f"job.report() was given {len(names)} names, more than {REPORTED_NAMES_MAX}; new: {new}",
                    "use the same names at every step: loss, not loss_1 and loss_2",
                )
            )
        raise_if_any(InputError, problems)
        self._reported |= {name: number for name, number in numbers.items() if number is not None}

    @property
    def reported(self) -> Mapping[str, float]:
        """The newest number of each name that was reported."""
        return MappingProxyType(self._reported)

    def on_change(self, callback: "Callable[[Job], None]") -> None:
        """Have a function called, between two steps, whenever this worker enters a generation."""
        self._callbacks.append(callback)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Say that no steps are made for a while: evaluation, checkpointing. It is not taken for a hang."""
        self._num_quiet += 1
        try:
            with self._tally.spending(Cause.QUIET):
                yield
        finally:
            self._num_quiet -= 1

    def close(self) -> None:
        """What leaving the block does: have the last global round with everybody, and go."""
        self.__exit__(None, None, None)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have a function called when the job is left, however it is left."""
        self._closers.append(callback)

    def __enter__(self) -> Self:
        if self._place.socket is not None:
            _enter_once(self._place.socket, self.local_rank)
            faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=True)
            self._tell_agent(self._place.socket, self._place.token)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed.is_set():
            return
        try:
            if kind is None:
                if self._averager is not None:
                    self._averager.finish()
                self._tell_samples()
                self._tell(Bye())
            elif isinstance(error, Exception):
                self._tell(Raised("".join(traceback.format_exception(error))[-RAISED_MAX:]))
        finally:
            self._close()

    # --- inside -----------------------------------------------------------------------------------------------

    def _tell_agent(self, socket: str, token: str) -> None:
        """Be connected to this worker's agent from now on, and tell it how far this worker is."""
        self._tally.begin()
        self._link = AgentLink(socket, token=token, local_rank=self._place.local_rank, on_message=self._told)
        self._reporter = threading.Thread(target=self._report, name="hieravg-progress", daemon=True)
        self._reporter.start()

    def _keeper(self, model: nn.Module | Sequence[Tensor], optimizer: Optimizer | None) -> Keeper | None:
        """Replicas of a node are alike after a round of all: one of them is enough to keep."""
        place, owner = self._place, Owner.parse(self._place.owner)
        if owner is None or self.local_rank > 0:
            return None
        path = path_of(run_id=place.run_id, owner=owner, local_rank=self.local_rank)
        period_steps = Hierarchy.parse(place.hierarchy).levels[-1].period_steps
        return Keeper(model, optimizer, path=path, period_steps=period_steps)

    def _check_hierarchy(self, given: Hierarchy | str | None) -> None:
        """What the script asks for has to be what the job runs with."""
        asked = Hierarchy.parse(given) if isinstance(given, str) else given
        planned = self._place.hierarchy
        if asked is not None and planned and asked != Hierarchy.parse(planned):
            raise InputError(
                Problem(
                    f"the script asks for the hierarchy {asked}, and the job runs with {planned}",
                    f"start every node with --hierarchy {asked}, or leave the hierarchy out in the script",
                )
            )

    def _node_world(self) -> NodeWorld | None:
        """Where this node's workers meet; None if the environment says so, as the agent makes it do."""
        return NodeWorld(HashStore(), rank=0, num_ranks=1) if self._link is None else None

    def _close(self) -> None:
        self._closed.set()
        while self._closers:
            self._closers.pop()()
        if self._reporter is not None:
            self._reporter.join()
        if self._averager is not None:
            self._last_step = self._averager.step_count
            self._averager.close()
        if self._link is not None:
            # What the script does after its loop ends with the agent too.
            atexit.register(self._link.close)

    def _tell(self, message: FromWorker) -> None:
        if self._link is not None:
            self._link.send(message)

    def _told(self, message: FromAgent) -> None:
        with self._lock:
            if self._averager is None:
                # The agent may be ahead of the script, which builds its model first.
                self._early.append(message)
                return
            averager = self._averager
        self._heed(averager, message)

    def _heed(self, averager: ElasticAverager, message: FromAgent) -> None:
        match message:
            case Follow():
                averager.generations.follow(message)
            case Fence():
                if self._is_talking():
                    # The node's workers stand at different steps now, and each waits for the others' part of
                    # the next one: of DDP's or FSDP's messages nobody but torch knows.
                    _log.warning(
                        "this node was out of the job; its workers share a process group, so all start anew"
                    )
                    os._exit(EXIT_OUT_OF_STEP)
                averager.fence()
            case Drain():
                averager.drain()
            case Stop():
                averager.stop(message)

    def _changed(self, adopted: Adopted) -> None:
        self.plan = adopted.plan
        self.generation = adopted.generation.number
        assert self._averager is not None
        self.rank = self._averager.rank
        self._links = {}
        for callback in self._callbacks:
            callback(self)

    def _report(self) -> None:
        num_told = 0
        while not self._closed.wait(PROGRESS_S):
            averager = self._averager
            is_excused = bool(self._num_quiet) or averager is None or averager.is_busy
            self._tell(Progress(self.step, is_excused=is_excused))
            num_told += 1
            if num_told % PROGRESS_PER_SAMPLES == 0:
                self._tell_samples()

    def _tell_samples(self) -> None:
        if self._link is None:
            return
        try:
            self._link.offer(Measured(self._samples().to_json()))
        except (TypeError, ValueError, ArithmeticError) as exc:
            # Whatever it is about a number, training and its end go on.
            _log.warning("metrics of this worker cannot be sent to its agent: %s", exc)

    def _samples(self) -> Samples:
        """What this worker has measured so far. Any thread may ask."""
        averager, link = self._averager, self._link
        doing = "joining" if averager is None else "quiet" if self._num_quiet else averager.doing
        return self._tally.samples(
            rank=self.rank,
            generation=self.generation,
            step=self.step,
            state=doing,
            values=dict(self._reported),
            num_local_gradients=0 if averager is None else averager.num_local_gradients,
            num_dropped=0 if link is None else link.num_dropped,
        )

    def _observed_too(self, observe: Observe) -> Observe:
        """The script's observer, after our own."""

        def both(done: RoundDone) -> None:
            self._tally.round_done(done)
            observe(done)

        return both

    def _link_of(self, level_name: str, link: str) -> str:
        """The widest link that a level's rounds cross: memory, or sockets between what its group spans."""
        if link == Link.SHM:
            return link
        found = self._links.get(level_name)
        if found is None:
            found = self._links[level_name] = _widest_link(self.plan, level_name, rank=self.rank)
        return found


def _widest_link(plan: Plan, level_name: str, *, rank: int) -> Link:
    level = next((each for each in plan.levels if each.name == level_name), None)
    group = {rank} if level is None else set(level.group_of(rank))
    nodes = [node for node, ranks in plan.topology.placed() if not group.isdisjoint(ranks)]
    if len({node.labels.get("zone") for node in nodes}) > 1:
        return Link.INTER_ZONE
    return Link.INTER_NODE if len(nodes) > 1 else Link.INTRA_NODE


def check_step(step: int) -> None:
    if type(step) is not int or step < 0:
        raise InputError(
            Problem(
                f"job.averager() was given step={step!r}",
                "give the job.step that was saved with the checkpoint, or nothing if there is none",
            )
        )


def _number(value: object) -> float | None:
    """A number, also one of torch's or numpy's. Not text, and not a flag, which is a number to Python."""
    if isinstance(value, (str, bytes, bool)) or not isinstance(value, SupportsFloat):
        return None
    try:
        # A loss is reported as it is; torch warns of a number made of something that has a gradient.
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        return None
