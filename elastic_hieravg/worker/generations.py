"""A rank's way from one generation to the next: groups are built behind the training loop's back.

For every generation the agent tells of, a thread builds the groups that are missing, asks the training thread
for its opening, and reads everybody's. What comes out waits in `entry` until the training thread takes it at a
step boundary. Invariant: only the newest generation is worked on; whatever is built for an older one and named
by the newest is used, the rest is closed.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.averaging.flat import FlatModel, first_difference
from elastic_hieravg.averaging.groups import Group
from elastic_hieravg.averaging.rounds import AveragingGroup
from elastic_hieravg.errors import DifferentTensorsError, HierAvgError, ParametersError, Problem
from elastic_hieravg.membership.embedded import EmbeddedKeyValue
from elastic_hieravg.membership.local import Follow
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.opening import Opening, entry_of, read_opening, replaced_keys
from elastic_hieravg.membership.proposing import plan_generation
from elastic_hieravg.membership.records import Kind, read_generation, read_job
from elastic_hieravg.plan import GroupKey, PlannedLevel
from elastic_hieravg.rendezvous.group_store import GroupStore
from elastic_hieravg.worker.optimizer_state import StateCopy, StateTaken, bring_state
from elastic_hieravg.worker.roles import (
    Arrival,
    Role,
    missing_gradients,
    missing_groups,
    read_arrival,
    read_role,
    reference_of,
    sources_of,
    strangers_of,
)
from elastic_hieravg.worker.ways import Entering, Way

# How long everybody's groups and openings may take; a rank may be in the middle of a long step.
OPENING_TIMEOUT_S = 600.0
# A worker that cannot follow its generations any more.
EXIT_CRASHED = 1
RETRY_S = 0.5
# How long the threads on their way to a generation may take to end with the job.
CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Generations:
    """`on_news` is called from any thread when the training thread has something to look at.

    `on_broken` is told the keys of groups that could not be built, or that a generation's opening failed.
    """

    def __init__(
        self,
        engine: HierarchicalAverager,
        *,
        local_rank: int,
        role: Callable[[], Role],
        open_way: Callable[[Kind], Opening | None],
        parameters: Sequence[Tensor],
        on_news: Callable[[], None],
        on_broken: Callable[[GroupKey], None],
    ) -> None:
        """`role` says what this rank is at the moment, `open_way` where it stands or None if it cannot say;
        `parameters` are its optimizer's.
        """
        self.changed = threading.Condition()
        self._engine = engine
        self._local_rank = local_rank
        self._role = role
        self._open_way = open_way
        self._parameters = parameters
        self._on_news = on_news
        self._on_broken = on_broken
        self._way: Way | None = None
        self._built: dict[GroupKey, AveragingGroup] = {}
        self._entering: Entering | None = None
        self._store: tuple[tuple[str, int], EmbeddedKeyValue] | None = None
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        # Why this rank cannot be in the job at all.
        self.error: HierAvgError | None = None

    # --- told by the agent ------------------------------------------------------------------------------------

    def follow(self, follow: Follow) -> None:
        """Go for a generation, and give up the way to any before it."""
        generation, job = read_generation(follow.generation), read_job(follow.job)
        plan, _ = plan_generation(job, generation.number, generation.members)
        assert plan.digest == generation.digest, "agent and worker make the same plan of the same members"
        adopted = Adopted(generation, plan, generation.keys(plan))
        places = {node.node_id: ranks for node, ranks in plan.topology.placed()}
        way = Way(adopted, follow, places[follow.node_id][self._local_rank])
        with self.changed:
            is_old = self._way is not None and self._way.adopted.generation.number >= generation.number
            if is_old or self._is_closed:
                return
            self.give_up()
            self._way = way
        # Ranks that wait for somebody who is gone are woken; a group that grows is used until it is left.
        self._engine.cut(replaced_keys(self._engine.keys, adopted))
        thread = threading.Thread(target=self._walk, args=(way,), name="hieravg-groups", daemon=True)
        with self.changed:
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()

    def give_up(self) -> None:
        """End the way that is being made, if any."""
        with self.changed:
            way, self._way, self._entering = self._way, None, None
            if way is not None:
                way.is_over = True
                if way.passing is not None:
                    way.passing.cut()
                self._drop_gradients(way)
            self.changed.notify_all()

    def fenced(self) -> None:
        """This node is out: no group of its incarnation is of any use."""
        self.give_up()
        self._engine.cut(self._engine.keys)

    def close(self) -> None:
        """End every way. Waited for: a thread that comes out of gloo while Python ends would abort."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        with self.changed:
            self._is_closed = True
            self.give_up()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        with self.changed:
            built, self._built = self._built, {}
        for group in built.values():
            group.close()
        if self._store is not None:
            self._store[1].close()

    # --- asked by the training thread -------------------------------------------------------------------------

    @property
    def newest_number(self) -> int:
        way = self._way
        return way.adopted.generation.number if way else 0

    @property
    def posted_step(self) -> int | None:
        """The boundary that must not be passed before everybody's opening is known."""
        way = self._way
        return way.opening.step if way and way.opening and self._entering is None else None

    @property
    def entering(self) -> Entering | None:
        return self._entering

    @property
    def is_state_wanted(self) -> bool:
        way = self._way
        return way is not None and way.is_state_asked and way.state is None

    def post_state(self, state: StateCopy) -> None:
        with self.changed:
            if self._way is not None and self.is_state_wanted:
                self._way.state = state
            self.changed.notify_all()

    def build_gradients(self) -> dict[GroupKey, Group]:
        """Groups for gradients, now, if the generation that was entered last has none. Collective over it.

        What cannot be built is reported, and comes with the next generation.
        """
        way = self._way
        if way is None or self._engine.plan is not way.adopted.plan:
            return {}
        follow, plan = way.follow, way.adopted.plan
        wanted = self._engine.own_keys(plan, rank=way.rank, keys=way.adopted.keys)
        roles = [Role(self._engine.step_count, holds_model=True, is_hooked=True)] * plan.world_size
        missing = missing_gradients(plan, roles, rank=way.rank, wanted=wanted)
        if not missing or missing.keys() <= set(self._engine.gradient_keys):
            return {}
        kv = EmbeddedKeyValue(follow.address, follow.port, run_id="groups")
        try:
            number = way.adopted.generation.number
            store = GroupStore(kv, f"/generation/{number}/first/", is_over=lambda: way.is_over)
            self._build_missing_gradients(way, store, missing)
        except (HierAvgError, RuntimeError, OSError) as exc:
            if not way.is_over:
                _log.warning("gradients are not averaged with other ranks until the next generation: %s", exc)
                for key in missing:
                    self._on_broken(key)
        finally:
            kv.close()
        with self.changed:
            built, way.gradients = way.gradients, {}
        return built

    def withdraw(self) -> None:
        """What this rank has said on its way is not true any more: have another generation made."""
        with self.changed:
            way = self._way
            if way is None or way.opening is None:
                return
            way.is_over, way.opening, self._entering = True, None, None
            self._drop_gradients(way)
            self.changed.notify_all()
        keys = self._engine.own_keys(way.adopted.plan, rank=way.rank, keys=way.adopted.keys)
        for key in [*keys.values()][-1:]:
            self._on_broken(key)

    def take(self, entering: Entering) -> dict[GroupKey, AveragingGroup] | None:
        """The groups that were built for a generation, to be entered now; None if it is not the newest."""
        with self.changed:
            if self._entering is not entering or self._way is None:
                return None
            # The opening has done its work.
            self._entering, self._way.opening = None, None
            self._way.gradients = {}
            mine = {key: group for key, group in self._built.items() if key in entering.wanted.values()}
            self._built = {key: group for key, group in self._built.items() if key not in mine}
            return mine

    # --- the way ----------------------------------------------------------------------------------------------

    def _walk(self, way: Way) -> None:
        """To the end of the way, or to its failure, of which the agent is told so that another one is made."""
        while not way.is_over:
            try:
                self._go(way)
            except ParametersError as exc:
                # Trying again is of no use. Who waits to be taken in cannot be in the job, and ends; the others
                # go on as they are until there is a generation without it.
                if self._role().holds_model:
                    number = way.adopted.generation.number
                    _log.warning("generation %s cannot be entered; training goes on as it is: %s", number, exc)
                else:
                    self.error = exc
                self._on_news()
                return
            except (HierAvgError, RuntimeError, OSError) as exc:
                if self._failed(way, exc):
                    return
                # Alone, there is nobody to make another generation for: it tries again.
                time.sleep(RETRY_S)
            except Exception:  # noqa: BLE001 - whatever it is, it must not end here unseen
                # An error of ours. The others would wait for this rank, which waits too; started anew it joins.
                number = way.adopted.generation.number
                _log.exception("this worker cannot follow to generation %s: its agent starts it anew", number)
                os._exit(EXIT_CRASHED)
            else:
                return

    def _failed(self, way: Way, error: Exception) -> bool:
        """Report what this rank has not and others may have. False if there is nothing to report."""
        with self.changed:
            is_over = way.is_over
            # The opening that was posted binds nobody any more.
            way.opening = None
            way.state, way.is_state_asked = None, False
            self._drop_gradients(way)
            self.changed.notify_all()
        self._on_news()
        if is_over:
            return True
        number = way.adopted.generation.number
        _log.warning("the ranks of generation %s could not be connected; they try again: %s", number, error)
        wanted = [*self._engine.own_keys(way.adopted.plan, rank=way.rank, keys=way.adopted.keys).values()]
        missing = [key for key in wanted if key not in (*self._engine.keys, *self._built)]
        # With all groups there it was the opening that failed: the widest group stands for it.
        for key in missing or wanted[-1:]:
            self._on_broken(key)
        return bool(wanted)

    def _go(self, way: Way) -> None:
        plan, number = way.adopted.plan, way.adopted.generation.number
        store = GroupStore(self._reach(way), f"/generation/{number}/", is_over=lambda: way.is_over)
        wanted = self._engine.own_keys(plan, rank=way.rank, keys=way.adopted.keys)
        self._drop(way, lambda key: key not in wanted.values())
        for key, level in self._meet(way, store, wanted).items():
            group = self._engine.build(
                plan,
                rank=way.rank,
                level=level,
                key=key,
                store=store,
                addresses=way.adopted.generation.addresses,
            )
            with self.changed:
                if not way.is_over:
                    self._built[key] = group
                    continue
            group.close()
            return
        store.set(f"built/{way.rank}", self._role().to_json())
        names = [f"built/{rank}" for rank in range(plan.world_size)]
        texts = store.await_all(names, timeout_s=OPENING_TIMEOUT_S)
        roles = [read_role(text.decode()) for text in texts]
        state = self._bring_state(way, store, wanted, sources_of(roles))
        missing = missing_gradients(plan, roles, rank=way.rank, wanted=wanted)
        self._build_missing_gradients(way, store, missing)
        opening = self._ask(way)
        if opening is None:
            return
        store.set(f"opening/{way.rank}", opening.to_json())
        names = [f"opening/{rank}" for rank in range(plan.world_size)]
        texts = store.await_all(names, timeout_s=OPENING_TIMEOUT_S)
        entry = entry_of([read_opening(text.decode()) for text in texts])
        with self.changed:
            if not way.is_over:
                self._entering = Entering(way.adopted, way.rank, wanted, entry, dict(way.gradients), state)
                self.changed.notify_all()
        self._on_news()

    def _meet(
        self, way: Way, store: GroupStore, wanted: Mapping[str, GroupKey]
    ) -> dict[GroupKey, PlannedLevel]:
        """Wait for everybody on this way; the groups that have to be built then."""
        plan, tensors = way.adopted.plan, "\n".join(self._engine.tensors)
        keys = [key.name for key in (*self._engine.living_keys, *self._built)]
        model = hashlib.sha256(tensors.encode()).hexdigest()
        store.set(f"arrived/{way.rank}", Arrival(self._role().holds_model, model, tuple(keys)).to_json())
        names = [f"arrived/{rank}" for rank in range(plan.world_size)]
        texts = store.await_all(names, timeout_s=OPENING_TIMEOUT_S)
        arrivals = [read_arrival(text.decode()) for text in texts]
        reference, strangers = reference_of(arrivals), strangers_of(arrivals)
        if strangers and way.rank == reference:
            store.set("tensors", tensors)
        if way.rank in strangers:
            theirs = store.await_all(["tensors"], timeout_s=OPENING_TIMEOUT_S)[0].decode()
            raise _another_model(tensors, theirs, of=plan.seat(reference).node_id)
        if strangers:
            node_ids = sorted({plan.seat(rank).node_id for rank in strangers})
            _log.warning("nodes with another model than the job's are left out: %s", ", ".join(node_ids))
            # They end, and then there is a generation without them.
            self._await_end(way)
        missing = missing_groups(plan, arrivals, rank=way.rank, wanted=wanted)
        self._drop(way, lambda key: key in missing)
        return missing

    def _await_end(self, way: Way) -> None:
        deadline_s = time.monotonic() + OPENING_TIMEOUT_S
        with self.changed:
            while not way.is_over:
                if not self.changed.wait(max(0.0, deadline_s - time.monotonic())):
                    break
        raise RuntimeError("some nodes have another model than the job's")

    def _bring_state(
        self, way: Way, store: GroupStore, wanted: Mapping[str, GroupKey], sources: Sequence[int]
    ) -> StateTaken | None:
        """Take part in bringing optimizer state to those who are new; what there is for this rank, if it is."""
        plan, rank = way.adopted.plan, way.rank
        key = wanted.get(plan.levels[-1].name) if plan.levels else None
        if key is None or not sources:
            return None
        if rank in sources and not self._ask_state(way):
            return None

        def build(flat: FlatModel) -> AveragingGroup:
            return self._engine.build(
                plan,
                rank=rank,
                level=plan.levels[-1],
                key=key,
                store=store,
                addresses=way.adopted.generation.addresses,
                flat=flat,
            )

        def note(group: AveragingGroup) -> None:
            with self.changed:
                way.passing = group
                if way.is_over:
                    group.cut()

        copied, way.state = way.state, None
        try:
            return bring_state(
                copied,
                store=store,
                rank=rank,
                sources=sources,
                partners=self._engine.partners(plan, rank=rank, level=plan.levels[-1]),
                parameters=self._parameters,
                build=build,
                on_built=note,
            )
        finally:
            way.passing = None

    def _ask_state(self, way: Way) -> bool:
        """Have the training thread copy its optimizer's state; False if the way is over before."""
        deadline_s = time.monotonic() + OPENING_TIMEOUT_S
        with self.changed:
            way.is_state_asked = True
            self.changed.notify_all()
            self._on_news()
            while way.state is None and not way.is_over:
                if not self.changed.wait(max(0.0, deadline_s - time.monotonic())):
                    raise RuntimeError("the training loop made no step in time")
            way.is_state_asked = False
            return not way.is_over

    def _build_missing_gradients(
        self, way: Way, store: GroupStore, missing: Mapping[GroupKey, PlannedLevel]
    ) -> None:
        for key, level in missing.items():
            group = self._engine.build_gradients(
                way.adopted.plan,
                rank=way.rank,
                level=level,
                key=key,
                store=store,
                addresses=way.adopted.generation.addresses,
            )
            with self.changed:
                way.gradients[key] = group
                if way.is_over:
                    self._drop_gradients(way)

    def _drop_gradients(self, way: Way) -> None:
        while way.gradients:
            way.gradients.popitem()[1].close()

    def _ask(self, way: Way) -> Opening | None:
        """Say where this rank stands; None if the way is over before that is known."""
        deadline_s = time.monotonic() + OPENING_TIMEOUT_S
        with self.changed:
            while not way.is_over:
                way.opening = self._open_way(way.adopted.generation.kind)
                if way.opening is not None:
                    self.changed.notify_all()
                    return way.opening
                if not self.changed.wait(max(0.0, deadline_s - time.monotonic())):
                    raise RuntimeError("a round that was cut did not end in time")
            return None

    def _reach(self, way: Way) -> EmbeddedKeyValue:
        """The generation's group store; the connection is kept while it is the same."""
        where = way.follow.address, way.follow.port
        with self.changed:
            if way.is_over:
                # The connection is a newer way's by now.
                raise RuntimeError("nobody needs this any more")
            if self._store is None or self._store[0] != where:
                before, self._store = self._store, (where, EmbeddedKeyValue(*where, run_id="groups"))
                if before is not None:
                    before[1].close()
            return self._store[1]

    def _drop(self, way: Way, is_gone: Callable[[GroupKey], bool]) -> None:
        """Close what was built for generations that were never entered, unless a newer way works on it."""
        with self.changed:
            gone = [] if way.is_over else [key for key in self._built if is_gone(key)]
            groups = [self._built.pop(key) for key in gone]
        for group in groups:
            group.close()


def _another_model(mine: str, theirs: str, *, of: str) -> DifferentTensorsError:
    differing = first_difference(mine.split("\n"), theirs.split("\n"))
    here, there = differing or ("the same", "the same")
    return DifferentTensorsError(
        Problem(
            f"this worker's model is not the job's: the first difference is {here} here and {there} on {of}",
            "run the same script with the same settings on every node; the job goes on without this node",
        )
    )
