"""`eh.join()` under torchrun, or `hieravg run --membership restart`: one attempt of a job that starts anew.

Each attempt is a generation of its own. What outlives it are the snapshots in shared memory. Invariant: a
worker ends when its agent does, and the files go with the job.
"""

import atexit
import contextlib
import ipaddress
import logging
import os
import select
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, rendezvous
from torch.optim import Optimizer

from elastic_hieravg.averaging.averager import STATE_VERSION, HierarchicalAverager
from elastic_hieravg.averaging.groups import NodeWorld
from elastic_hieravg.config import TORCHRUN_VARIABLE, Asked, RestartPlace, WorkerPlace, read_metrics_place
from elastic_hieravg.errors import InputError, MembershipError, PeerLostError, Problem, UsageError
from elastic_hieravg.events import Observe, ignore
from elastic_hieravg.membership.snapshot_files import Owner, find_agent, path_of, paths_of, remove_stale
from elastic_hieravg.plan import Hierarchy
from elastic_hieravg.rendezvous.settings import address_towards
from elastic_hieravg.worker.attempt import (
    AGENT_WAIT_S,
    BUILD_TIMEOUT_S,
    ROUND_TIMEOUT_S,
    Holding,
    RestartedAverager,
    read_holding,
)
from elastic_hieravg.worker.job import Job, check_step
from elastic_hieravg.worker.meeting import (
    MEET_TIMEOUT_S,
    Attendant,
    Meeting,
    attempt_store,
    check_alike,
    did_not_meet,
    exchange,
    meet,
)
from elastic_hieravg.worker.serving import WorkerEndpoint
from elastic_hieravg.worker.snapshots import Kept, Snapshot, SnapshotFile, read_snapshots

# A worker whose agent is gone has nobody to tell.
EXIT_ORPHANED = 1
# Nothing is sent there: it only chooses this machine's address towards other machines.
_ELSEWHERE = "192.0.2.1:9"

_log = logging.getLogger(__name__)


class RestartedJob(Job):
    """A place in one attempt. Its rank follows the plan, which orders nodes by their labels and names."""

    def __init__(self, place: RestartPlace) -> None:
        super().__init__(WorkerPlace(place.local_rank))
        self._attempt = place
        given = Owner.parse(place.owner)
        # Ours removes the files when the job ends; torchrun's knows nothing of them.
        self._is_tidied = given is not None
        self._owner = given or find_agent(mark=TORCHRUN_VARIABLE)
        self._store: Store | None = None
        self._meeting: Meeting | None = None
        self._watcher: _AgentWatcher | None = None
        # Its place among the workers of its agent.
        self._slot = place.local_rank

    def averager(  # type: ignore[override] # the same methods, and no elasticity behind them
        self,
        model: nn.Module | Iterable[Tensor],
        optimizer: Optimizer | None = None,
        *,
        step: int = 0,
        hierarchy: Hierarchy | str | None = None,
        average_buffers: bool = True,
        observe: Observe = ignore,
    ) -> RestartedAverager:
        """Average this model over the job's hierarchy: the launcher's, or this one. Collective over all ranks.

        Returns when the model is everybody's: that of the newest snapshot, or rank 0's if the job starts.
        `step`: of the checkpoint that model and optimizer were loaded from; a newer snapshot counts more.
        """
        if self._averager is not None:
            raise MembershipError(
                Problem(
                    "job.averager() was called twice",
                    "make one averager; put several models into one torch.nn.ModuleList",
                )
            )
        if self._store is None or self._meeting is None:
            raise MembershipError(
                Problem(
                    "job.averager() was called outside of the job's `with` block",
                    "write `with eh.join() as job:`",
                )
            )
        check_step(step)
        place, meeting, store = self._attempt, self._meeting, self._store
        asked = place.asked if hierarchy is None else replace(place.asked, hierarchy=str(hierarchy))
        check_alike(exchange(store, meeting, "asked", str(asdict(asked)), rank=place.rank))
        self._follow(meeting, asked)
        model = model if isinstance(model, nn.Module) else list(model)
        kept = Kept(model, optimizer)
        own = attempt_store(store, meeting)
        engine = self._build(model, own, average_buffers=average_buffers, observe=self._observed_too(observe))
        averager = RestartedAverager(
            engine,
            kept=kept,
            file=SnapshotFile(self._path()),
            name=meeting.name,
            addresses=meeting.addresses(),
            period_steps=Hierarchy.parse(asked.hierarchy).levels[-1].period_steps,
            agent_wait_s=AGENT_WAIT_S if self._is_tidied else 0.0,
            tally=self._tally,
        )
        self._averager = averager  # type: ignore[assignment] # as above
        found = self._find(kept)
        if found is not None and found.state.moment.step <= step:
            found = None
        _check_same(exchange(store, meeting, "step", str(step), rank=place.rank))
        engine.load_state_dict({"version": STATE_VERSION, "step": step, "samples": {}})
        holding = Holding(found.state.moment if found else None)
        texts = exchange(store, meeting, "holding", holding.to_json(), rank=place.rank)
        averager.begin(found, self._by_rank([read_holding(text) for text in texts]), own)
        for callback in self._callbacks:
            callback(self)
        return averager

    def __enter__(self) -> Self:
        self._watcher = _AgentWatcher(self._owner)
        try:
            remove_stale(time.time())
            self._meet()
            self._be_measured()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            self._ended()

    # --- inside -----------------------------------------------------------------------------------------------

    def _be_measured(self) -> None:
        """Tell the agent what is measured if it takes that; otherwise serve it."""
        place = self._attempt
        if place.socket:
            self._tell_agent(place.socket, place.token)
            return
        self._tally.begin()
        where = read_metrics_place()
        if where is not None:
            endpoint = WorkerEndpoint(
                where, local_rank=self._slot, samples=self._samples, world_size=lambda: self.world_size
            )
            self._closers.append(endpoint.close)

    def _meet(self) -> None:
        place = self._attempt
        self._store = _connect()
        self._meeting = meet(
            self._store,
            Attendant(
                rank=place.rank,
                group_rank=place.group_rank,
                local_rank=place.local_rank,
                slots=place.local_world_size,
                node_name=place.node_name,
                labels=dict(place.labels),
                address=_own_address(place.master_address),
                seen=max([place.restart_count, *(each.state.moment.generation for each in self._snapshots())]),
            ),
            world_size=place.world_size,
        )
        self._follow(self._meeting, place.asked)

    def _follow(self, meeting: Meeting, asked: Asked) -> None:
        place = self._attempt
        self.plan = meeting.plan(asked)
        self.generation = self.plan.generation
        self._slot = meeting.attendants[place.rank].local_rank
        self.rank = meeting.rank_in(self.plan, group_rank=place.group_rank, local_rank=self._slot)

    def _build(
        self, model: nn.Module | list[Tensor], store: Store, *, average_buffers: bool, observe: Observe
    ) -> HierarchicalAverager:
        assert self._meeting is not None
        try:
            return HierarchicalAverager(
                model,
                plan=self.plan,
                rank=self.rank,
                store=store,
                addresses=self._meeting.addresses(),
                average_buffers=average_buffers,
                equalize=False,
                observe=observe,
                timeout_s=ROUND_TIMEOUT_S,
                build_timeout_s=BUILD_TIMEOUT_S,
            )
        except PeerLostError as exc:
            raise did_not_meet(exc.problems[0].message) from exc

    def _by_rank(self, holdings: list[Holding]) -> list[Holding]:
        """What torchrun's ranks said, in the order of the plan's."""
        assert self._meeting is not None
        found = {
            self._meeting.rank_in(self.plan, group_rank=each.group_rank, local_rank=each.local_rank): holding
            for each, holding in zip(self._meeting.attendants, holdings, strict=True)
        }
        return [found[rank] for rank in range(self.plan.world_size)]

    def _path(self) -> Path:
        return path_of(run_id=self._attempt.run_id, owner=self._owner, local_rank=self._slot)

    def _snapshots(self) -> list[Snapshot]:
        """All that this node's workers have kept, newest step first, this worker's own before the others'."""
        paths = paths_of(run_id=self._attempt.run_id, owner=self._owner)
        paths.sort(key=lambda path: path != self._path())
        found = [snapshot for path in paths for snapshot in read_snapshots(path)]
        return sorted(found, key=lambda each: each.state.moment.step, reverse=True)

    def _find(self, kept: Kept) -> Snapshot | None:
        """The newest whole snapshot of this model that the node has."""
        found = self._snapshots()
        fitting = [each for each in found if each.state.signature == kept.signature]
        if found and not fitting:
            _log.warning(
                "the snapshots that this node kept are of another model or optimizer, and are not used"
            )
        return next((each for each in fitting if each.is_whole()), None)

    def _node_world(self) -> NodeWorld | None:
        if self._store is None or self._meeting is None:
            return super()._node_world()
        place = self._attempt
        store = PrefixStore(f"node/{place.group_rank}", attempt_store(self._store, self._meeting))
        # A default group that the script makes by itself goes by torchrun's ranks.
        first_rank = place.rank - self._slot
        return NodeWorld(store, self._slot, place.local_world_size, first_rank=first_rank)

    def _close(self) -> None:
        super()._close()
        self._store = None
        if self._watcher is not None:
            # What the script does after its loop ends with the agent too.
            atexit.register(self._watcher.close)

    def _ended(self) -> None:
        """The job is done. What torchrun's own agent does not remove is removed here."""
        if not self._is_tidied:
            self._path().unlink(missing_ok=True)


class _AgentWatcher:
    """Ends this process when its agent has ended."""

    def __init__(self, owner: Owner) -> None:
        self._stop_here, self._stop = os.pipe()
        try:
            self._agent = os.pidfd_open(owner.process_id)
        except OSError:
            self._agent = -1
        if not owner.is_alive:
            self._orphaned()
        self._thread = threading.Thread(target=self._watch, name="hieravg-agent-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stop)
        self._thread.join()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._stop_here, select.POLLIN)
        if self._agent >= 0:
            poll.register(self._agent, select.POLLIN)
        ended = [descriptor for descriptor, _ in poll.poll()]
        if self._agent in ended:
            self._orphaned()
        os.close(self._stop_here)
        if self._agent >= 0:
            os.close(self._agent)

    def _orphaned(self) -> None:
        _log.error("this worker's agent is gone; the worker ends")
        # Not an exception: the training thread may be anywhere, and must not go on.
        os._exit(EXIT_ORPHANED)


def _check_same(steps: Sequence[str]) -> None:
    """Else one rank's model would go on from another's step."""
    if len(set(steps)) > 1:
        raise InputError(
            Problem(
                f"workers gave job.averager() different steps: {', '.join(sorted(set(steps), key=int))}",
                "load the same checkpoint on every node, from where all of them can read it",
            )
        )


def _connect() -> Store:
    """torchrun's store, in the way that its settings ask for."""
    try:
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEET_TIMEOUT_S))))[0]
    except RuntimeError as exc:
        raise did_not_meet(str(exc)) from exc
    return store


def _own_address(master_address: str) -> str:
    """Where the other nodes reach this one: its address on the network that leads to the store."""
    own = address_towards(f"{master_address}:9")
    if master_address != "localhost" and _is_loopback(own) and not _is_loopback(master_address):
        # On some systems a machine's own name leads to itself only.
        with contextlib.suppress(UsageError):
            return address_towards(_ELSEWHERE)
    return own


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False
