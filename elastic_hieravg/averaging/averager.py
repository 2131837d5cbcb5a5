"""The averager of a training loop: it counts steps and samples, and runs the widest level that is due.

It follows a plan and keeps the groups that a new plan keeps. It does not watch for lost ranks: a round that
fails raises, with every parameter as it was, and whoever knows the membership gives it a new plan.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed import PrefixStore, Store
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from elastic_hieravg.averaging.flat import FlatModel, check_slots, tensors_of
from elastic_hieravg.averaging.gradients import Company, GradientHook, average_gradients, gradient_levels
from elastic_hieravg.averaging.groups import Group
from elastic_hieravg.averaging.header import Agreement
from elastic_hieravg.averaging.mesh import peers_of
from elastic_hieravg.averaging.optimizers import on_each_step
from elastic_hieravg.averaging.rounds import TIMEOUT_S, AveragingGroup, Contribution
from elastic_hieravg.errors import InDoubtError, ParametersError, Problem
from elastic_hieravg.events import Observe, Outcome, RoundDone, ignore
from elastic_hieravg.plan import GroupKey, Member, Plan, PlannedLevel, first_keys

STATE_VERSION = 1


class HierarchicalAverager:
    """Averages a model over the groups of a plan. Making one is collective over the plan's ranks.

    `store`: any torch store that all ranks reach; keys are prefixed with the groups' keys. `addresses`: where
    each node is reached, the loopback if not given. `equalize`: begin with rank 0's model on every rank.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Tensor],
        *,
        plan: Plan,
        rank: int,
        store: Store,
        keys: Collection[GroupKey] | None = None,
        addresses: Mapping[str, str] | None = None,
        average_buffers: bool = True,
        equalize: bool = True,
        observe: Observe = ignore,
        timeout_s: float = TIMEOUT_S,
        build_timeout_s: float | None = None,
    ) -> None:
        self._flat = FlatModel(*tensors_of(model, average_buffers=average_buffers))
        self._store = store
        self._addresses = dict(addresses or {})
        self._observe = observe
        self._timeout_s = timeout_s
        self._build_timeout_s = build_timeout_s
        self._groups: dict[GroupKey, AveragingGroup] = {}
        self._step = self._trained = 0
        self._samples: dict[str, float] = {}
        self._new_samples = 0.0
        self._next_due: dict[str, int] = {}
        self._hook: GradientHook | None = None
        self._gradients: dict[GroupKey, Group] = {}
        self._in_doubt: tuple[GroupKey, PlannedLevel] | None = None
        self.agreed: Agreement | None = None
        self.adopt(plan, rank=rank, keys=first_keys(plan) if keys is None else keys)
        if equalize:
            self._equalize()

    @property
    def step_count(self) -> int:
        """Optimizer steps this rank has counted."""
        return self._step

    @property
    def trained_at_end(self) -> int:
        """The last step that anybody trained, as far as this rank was told by those whose loops had ended."""
        agreed = self.agreed
        return max(self._trained, agreed.trained) if agreed is not None and agreed.is_ending else self._trained

    @property
    def is_warmup(self) -> bool:
        """Whether the step that is being computed belongs to the warm-up."""
        return self.plan.is_warmup(self._step + 1)

    def step(self, num_samples: float = 1) -> RoundDone | None:
        """Count one optimizer step over so many samples; run the round that is due after it, if any."""
        if not 0 <= num_samples < math.inf:
            raise ParametersError(
                Problem(f"averager.step(num_samples={num_samples})", "give a number of samples, 0 or more")
            )
        self.count(num_samples)
        return self.run(self.due_level()) if self.is_due else None

    def average(self) -> RoundDone | None:
        """Run a global round now, whatever is due. Collective over all ranks."""
        return self.run(self.plan.levels[-1]) if self.plan.levels else None

    # --- one thing at a time, for whoever deals with lost ranks ---------------------------------------------

    def count(self, num_samples: float, *, is_empty: bool = False) -> None:
        """Count a step, and run nothing. An empty one is not trained: the rank only goes along."""
        self._step += 1
        self._trained = self._trained if is_empty else self._step
        self._new_samples += num_samples

    @property
    def is_due(self) -> bool:
        return self._step >= self._next_step

    def due_level(self) -> PlannedLevel:
        """The widest level that is due; only if one is."""
        if self.plan.is_warmup(self._step):
            return self.plan.levels[-1]
        return next(level for level in reversed(self.plan.levels) if self._next_due[level.name] <= self._step)

    def run(
        self, level: PlannedLevel, *, holds_model: bool = True, is_ending: bool = False
    ) -> RoundDone | None:
        """Run a round of a level now. Collective over this rank's group of the level.

        Who does not hold the model brings nothing, and leaves with the model and the others' step. After an
        `InDoubtError`, `settle` says whether the result counts.
        """
        self._count_samples()
        at = self.plan.levels.index(level)
        key = self._level_keys.get(level.name)
        if key is None:
            # Alone in its group: the average is there already.
            outer = tuple(self._samples[each.name] for each in self.plan.levels[at + 1 :])
            self.agreed = Agreement((1.0,), self._step, outer, self._trained, is_ending=is_ending)
            self._done(level, self.agreed)
            return None
        widening = self.plan.levels[at:]
        contribution = Contribution(
            step=self._step,
            samples=tuple(self._samples[each.name] if holds_model else 0.0 for each in widening),
            holds_model=holds_model,
            generation=self.plan.generation,
            trained=self._trained,
            is_ending=is_ending,
        )
        try:
            done, self.agreed = self._groups[key].run(contribution)
        except InDoubtError:
            self._in_doubt = key, level
            raise
        if not holds_model:
            self._step, self._trained, self._new_samples = self.agreed.step, self.agreed.trained, 0.0
        if done.outcome is Outcome.COMMITTED:
            self._done(level, self.agreed)
        else:
            self.skip(level, after_step=max(self._step, self.agreed.step))
        self._observe(done)
        return done

    def skip(self, level: PlannedLevel, *, after_step: int) -> None:
        """Do without a round of a level, until it is due again."""
        at = self.plan.levels.index(level)
        self._schedule(self.plan.levels[: at + 1], after_step=after_step)

    def build(
        self,
        plan: Plan,
        *,
        rank: int,
        level: PlannedLevel,
        key: GroupKey,
        store: Store,
        addresses: Mapping[str, str],
        flat: FlatModel | None = None,
    ) -> AveragingGroup:
        """Build this rank's group of a level. Collective over the group; any thread may call it.

        `flat`: average these tensors instead of the model, with the same ranks.
        """
        ranks = self.partners(plan, rank=rank, level=level)
        prefix = f"hieravg/{key.name}" if flat is None else f"hieravg/{key.name}/beside"
        if self._flat.is_sharded:
            prefix += f"/shard-{plan.seat(rank).local_rank}"
        return AveragingGroup(
            flat or self._flat,
            PrefixStore(prefix, store),
            level=level.name,
            index=ranks.index(rank),
            peers=peers_of(plan, ranks, addresses),
            timeout_s=self._timeout_s,
            build_timeout_s=self._build_timeout_s,
        )

    def rounds_committed(self) -> dict[str, int]:
        """For each of this rank's groups, by the name of its key, the last round whose result it took. Any
        thread may ask.
        """
        return {key.name: group.committed_index for key, group in list(self._groups.items())}

    @property
    def in_doubt(self) -> tuple[str, int] | None:
        """The group and the round whose result is kept until `settle`."""
        if self._in_doubt is None:
            return None
        key, _ = self._in_doubt
        return key.name, self._groups[key].round_index

    def settle(self, *, is_committed: bool) -> None:
        """Somebody took the result that is in doubt, or nobody did. Before the next `switch`."""
        assert self._in_doubt is not None, "nothing is in doubt"
        (key, level), self._in_doubt = self._in_doubt, None
        if is_committed:
            self.agreed = self._groups[key].take_result()
            self._done(level, self.agreed)

    def cut(self, keys: Collection[GroupKey]) -> None:
        """End the rounds of these groups, here and at their ranks. Any thread may call it."""
        for key in keys:
            group = self._groups.get(key)
            if group is not None:
                group.cut()
            gradients = self._gradients.get(key)
            if gradients is not None:
                gradients.cut()

    def key_of(self, level: PlannedLevel) -> GroupKey | None:
        """This rank's group of a level; None if it is alone there."""
        return self._level_keys.get(level.name)

    def is_over(self, level: PlannedLevel) -> bool:
        """Whether this rank's group of a level has failed."""
        key = self.key_of(level)
        return key is not None and self._groups[key].is_over

    @property
    def keys(self) -> tuple[GroupKey, ...]:
        """The groups of this rank."""
        return tuple(self._groups)

    @property
    def living_keys(self) -> tuple[GroupKey, ...]:
        return tuple(key for key, group in list(self._groups.items()) if not group.is_over)

    @property
    def tensors(self) -> tuple[str, ...]:
        """A line for each tensor of the model. Of a sharded one each rank has another part: nothing, then."""
        return () if self._flat.is_sharded else self._flat.lines

    def adopt(self, plan: Plan, *, rank: int, keys: Collection[GroupKey]) -> None:
        """Follow another plan from the next step on. Groups whose key is among `keys` as before are kept.

        If a new group cannot be built, the error leaves the plan and the groups of before in place.
        """
        wanted = self.own_keys(plan, rank=rank, keys=keys)
        built = self._build_missing(plan, rank, wanted)
        gradients = self._build_missing_gradients(plan, rank, wanted) if self._hook is not None else {}
        self.switch(plan, rank=rank, wanted=wanted, built=built, gradients=gradients)

    def switch(
        self,
        plan: Plan,
        *,
        rank: int,
        wanted: Mapping[str, GroupKey],
        built: Mapping[GroupKey, AveragingGroup],
        gradients: Mapping[GroupKey, Group] | None = None,
        after_step: int | None = None,
    ) -> None:
        """Follow another plan whose groups are there: those `built` for it, and those it keeps.

        `wanted` is what `own_keys` says. Groups it does not name are closed: this fences stale peers. What
        is due after `after_step`, the present one if not given, is run.
        """
        for again in [key for key in built if key in self._groups]:
            # A member did not have it any more: it was built anew.
            self._groups.pop(again).close()
        self._groups |= built
        for gone in [key for key in self._groups if key not in wanted.values()]:
            self._groups.pop(gone).close()
        self._count_samples()
        self.plan, self.rank = plan, rank
        self._level_keys = dict(wanted)
        self.use_gradients(gradients or {})
        # A level that was not there before has not averaged since the widest one did.
        widest = list(self._samples.values())[-1] if self._samples else 0.0
        self._samples = {level.name: self._samples.get(level.name, widest) for level in plan.levels}
        self._next_due = {}
        self._schedule(plan.levels, after_step=self._step if after_step is None else after_step)

    def attach(self, optimizer: Optimizer, *, num_samples: float | Callable[[], float] = 1) -> RemovableHandle:
        """Count every step the optimizer really makes. A step that AMP skipped is not counted."""
        return on_each_step(optimizer, self.step, num_samples=num_samples)

    # --- gradients ------------------------------------------------------------------------------------------

    def register_hook(self, ddp_model: nn.parallel.DistributedDataParallel) -> None:
        """Average the gradients of a DDP model too: over the world during warm-up, then over the innermost
        group. Collective over all ranks. DDP's own process group is not used for gradients any more.
        """
        built = self._build_missing_gradients(self.plan, self.rank, self._level_keys)
        self.hook(ddp_model, on_lost=lambda _key, _why: None)
        self.use_gradients(built)

    def hook(
        self, ddp_model: nn.parallel.DistributedDataParallel, *, on_lost: Callable[[GroupKey, str], None]
    ) -> None:
        """Put the hook on a model, with whatever groups for gradients there are. Not collective.

        `on_lost` is told the key of a group in which a bucket failed, and why, from any thread.
        """

        def tell(group: Group, why: str) -> None:
            for key in [key for key, each in list(self._gradients.items()) if each is group]:
                on_lost(key, why)

        self._hook = GradientHook(ddp_model.parameters(), is_warmup=lambda: self.is_warmup, on_lost=tell)
        ddp_model.register_comm_hook(self._hook, average_gradients)
        self.use_gradients({})
        self._schedule(self.plan.levels, after_step=self._step)

    @property
    def is_hooked(self) -> bool:
        return self._hook is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a backward pass waits for others' gradients at the moment."""
        return self._hook is not None and self._hook.is_waiting

    @property
    def num_local_gradients(self) -> int:
        """Backward passes that used this rank's own gradients because a group had failed."""
        return self._hook.num_local if self._hook else 0

    @property
    def gradient_keys(self) -> tuple[GroupKey, ...]:
        """The groups of this rank that can average gradients."""
        return tuple(key for key, group in self._gradients.items() if not group.is_over)

    def cut_gradients(self) -> None:
        """This rank makes no backward pass any more: who waits for its gradients goes on with its own."""
        for group in self._gradients.values():
            group.cut()

    def use_gradients(self, built: Mapping[GroupKey, Group]) -> None:
        """Average gradients over these groups too, from the next backward pass on. Only between steps."""
        wanted = self._level_keys.values()
        gone = [group for key, group in self._gradients.items() if key in built or key not in wanted]
        kept = {key: group for key, group in self._gradients.items() if key in wanted}
        self._gradients = kept | {key: group for key, group in built.items() if key in wanted}
        for group in gone:
            group.close()
        if self._hook is not None:
            levels = self.plan.levels
            alone = Company()
            self._hook.replace(
                self._company(levels[-1]) if levels else alone, self._company(levels[0]) if levels else alone
            )

    def build_gradients(
        self,
        plan: Plan,
        *,
        rank: int,
        level: PlannedLevel,
        key: GroupKey,
        store: Store,
        addresses: Mapping[str, str],
    ) -> Group:
        """Build a group for the gradients of a level. Collective over it; any thread may call it."""
        ranks = level.group_of(rank)
        return Group(
            PrefixStore(f"hieravg/{key.name}/gradients", store),
            index=ranks.index(rank),
            peers=peers_of(plan, ranks, addresses),
            timeout_s=self._timeout_s,
            build_timeout_s=self._build_timeout_s,
        )

    def _company(self, level: PlannedLevel) -> Company:
        key = self._level_keys.get(level.name)
        return Company(len(level.group_of(self.rank)), self._gradients.get(key) if key else None)

    def _build_missing_gradients(
        self, plan: Plan, rank: int, wanted: Mapping[str, GroupKey]
    ) -> dict[GroupKey, Group]:
        return {
            key: self.build_gradients(
                plan, rank=rank, level=level, key=key, store=self._store, addresses=self._addresses
            )
            for key, level in gradient_levels(plan, wanted, is_warmup=True).items()
            if key not in self._gradients
        }

    # --- its state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The step and the samples not yet averaged; the gradient hook goes by the same step."""
        self._count_samples()
        return {"version": STATE_VERSION, "step": self._step, "samples": dict(self._samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        step, samples = state.get("step"), state.get("samples")
        is_known = state.get("version") == STATE_VERSION and type(step) is int and isinstance(samples, Mapping)
        if not is_known:
            raise ParametersError(
                Problem(
                    f"the averager's state has version {state.get('version')!r}, step {step!r} "
                    f"and samples {samples!r}",
                    "load what state_dict() of an averager gave",
                )
            )
        assert type(step) is int
        assert isinstance(samples, Mapping)
        self._step = self._trained = step
        self._new_samples = 0.0
        self._samples = {level.name: float(samples.get(level.name, 0.0)) for level in self.plan.levels}
        self._schedule(self.plan.levels, after_step=self._step)

    def close(self) -> None:
        """Leave all groups. The model keeps its values and its place."""
        while self._groups:
            self._groups.popitem()[1].close()
        while self._gradients:
            self._gradients.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _done(self, level: PlannedLevel, agreement: Agreement) -> None:
        """The level's round was committed: what it stands for is counted from here on."""
        at = self.plan.levels.index(level)
        inner, outer = self.plan.levels[: at + 1], self.plan.levels[at + 1 :]
        self._samples |= {each.name: 0.0 for each in inner}
        self._samples |= dict(zip((each.name for each in outer), agreement.mean_samples, strict=True))
        self._schedule(inner, after_step=max(self._step, agreement.step))

    def _equalize(self) -> None:
        """One global round in which nobody holds the model yet: everybody gets the lowest rank's."""
        if self.plan.levels:
            self.run(self.plan.levels[-1], holds_model=False)

    def _schedule(self, levels: Iterable[PlannedLevel], *, after_step: int) -> None:
        for level in levels:
            self._next_due[level.name] = self.plan.next_due_step(level, after_step=after_step)
        first = min(self._next_due.values(), default=math.inf)
        # During warm-up every step ends with a global round, unless a gradient hook keeps ranks together.
        is_synchronous = self.plan.is_warmup(after_step + 1) and self.plan.levels and self._hook is None
        self._next_step = after_step + 1 if is_synchronous else first

    def _count_samples(self) -> None:
        if self._new_samples:
            self._samples = {name: samples + self._new_samples for name, samples in self._samples.items()}
            self._new_samples = 0.0

    def own_keys(self, plan: Plan, *, rank: int, keys: Collection[GroupKey]) -> dict[str, GroupKey]:
        """For each level the key of this rank's group, where it has company."""
        check_slots(self._flat, plan)
        key_of = {key.members: key for key in keys}
        nodes = {node.node_id: node for node in plan.topology.nodes}
        found = {}
        for level in plan.levels:
            seats = [plan.seat(member) for member in level.group_of(rank)]
            members = tuple(
                Member(seat.node_id, nodes[seat.node_id].incarnation, seat.local_rank) for seat in seats
            )
            if len(self.partners(plan, rank=rank, level=level)) > 1:
                found[level.name] = key_of[members]
        return found

    def partners(self, plan: Plan, *, rank: int, level: PlannedLevel) -> tuple[int, ...]:
        """The ranks of the level's group that hold the same tensors: those of the same slot, if sharded."""
        group = level.group_of(rank)
        if not self._flat.is_sharded:
            return group
        return tuple(other for other in group if plan.seat(other).local_rank == plan.seat(rank).local_rank)

    def _build_missing(
        self, plan: Plan, rank: int, wanted: Mapping[str, GroupKey]
    ) -> dict[GroupKey, AveragingGroup]:
        built: dict[GroupKey, AveragingGroup] = {}
        try:
            # Innermost first on every rank: no two ranks ever wait for each other in different groups.
            for level in plan.levels:
                key = wanted.get(level.name)
                if key is not None and key not in self._groups and key not in built:
                    built[key] = self.build(
                        plan, rank=rank, level=level, key=key, store=self._store, addresses=self._addresses
                    )
        except BaseException:
            for group in built.values():
                group.close()
            raise
        return built
