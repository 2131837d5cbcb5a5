"""What each rank tells all others on its way into a generation, and what follows from it.

Values and their JSON. An arrival comes first, before any group is built; a role once the groups are there.
Invariant: from the same arrivals and roles every rank builds the same groups.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic_hieravg.averaging.gradients import gradient_levels
from elastic_hieravg.plan import GroupKey, Plan, PlannedLevel
from elastic_hieravg.plan.document import Fields, canonical_json, parse_json


@dataclass(frozen=True, slots=True)
class Arrival:
    """`model`: the signature of its tensors. `keys` names the keys of the groups it has already."""

    holds_model: bool
    model: str
    keys: tuple[str, ...] = ()

    def to_json(self) -> str:
        return canonical_json(
            {"holds_model": int(self.holds_model), "model": self.model, "keys": list(self.keys)}
        )


def read_arrival(text: str) -> Arrival:
    """What `to_json` wrote; anything else is a `DocumentError`."""
    fields = Fields(parse_json(text, where="an arrival"), where="an arrival")
    arrival = Arrival(
        holds_model=bool(fields.number("holds_model")),
        model=fields.text("model"),
        keys=tuple(str(name) for _, name in fields.items("keys")),
    )
    fields.close()
    return arrival


def reference_of(arrivals: Sequence[Arrival]) -> int:
    """The rank whose model is the job's: the first that holds it, or the lowest when the job starts."""
    return next((rank for rank, arrival in enumerate(arrivals) if arrival.holds_model), 0)


def strangers_of(arrivals: Sequence[Arrival]) -> list[int]:
    """The ranks whose model is another one than the job's."""
    model = arrivals[reference_of(arrivals)].model
    return [rank for rank, arrival in enumerate(arrivals) if arrival.model != model]


def missing_groups(
    plan: Plan, arrivals: Sequence[Arrival], *, rank: int, wanted: Mapping[str, GroupKey]
) -> dict[GroupKey, PlannedLevel]:
    """The groups that this rank builds: those that one of its members lacks. All of them build it, or none."""
    return {
        wanted[level.name]: level
        for level in plan.levels
        if level.name in wanted
        and not all(wanted[level.name].name in arrivals[member].keys for member in level.group_of(rank))
    }


@dataclass(frozen=True, slots=True)
class Role:
    """`is_hooked`: it averages gradients. `gradients` names the keys of its groups that can do so.

    `is_ending`: its training loop has ended, so there are no gradients of it any more.
    """

    step: int
    holds_model: bool
    is_hooked: bool = False
    gradients: tuple[str, ...] = ()
    is_ending: bool = False

    def to_json(self) -> str:
        flags = {name: int(getattr(self, name)) for name in ("holds_model", "is_hooked", "is_ending")}
        return canonical_json({"step": self.step, **flags, "gradients": list(self.gradients)})


def read_role(text: str) -> Role:
    """What `to_json` wrote; anything else is a `DocumentError`."""
    fields = Fields(parse_json(text, where="a role"), where="a role")
    role = Role(
        fields.number("step"),
        holds_model=bool(fields.number("holds_model")),
        is_hooked=bool(fields.number("is_hooked")),
        gradients=tuple(str(name) for _, name in fields.items("gradients")),
        is_ending=bool(fields.number("is_ending")),
    )
    fields.close()
    return role


def sources_of(roles: Sequence[Role]) -> list[int]:
    """The ranks whose state newcomers get; none if nobody is new.

    If nobody holds the model, those that stand at the highest step, and the lowest rank when the job starts.
    """
    holders = [rank for rank, role in enumerate(roles) if role.holds_model]
    step = max((role.step for role in roles), default=0)
    first = [rank for rank, role in enumerate(roles) if role.step == step] if step else [0]
    return [] if len(holders) == len(roles) else holders or first


def missing_gradients(
    plan: Plan, roles: Sequence[Role], *, rank: int, wanted: Mapping[str, GroupKey]
) -> dict[GroupKey, PlannedLevel]:
    """The groups for gradients that this rank builds. All members of a group build it, or none does."""
    if not any(role.is_hooked for role in roles):
        return {}
    # The slowest rank decides: it may need the world when the others do no more.
    steps = [role.step for role in roles if role.holds_model]
    levels = gradient_levels(plan, wanted, is_warmup=plan.is_warmup(min(steps, default=0) + 1))
    members = {key: [roles[member] for member in level.group_of(rank)] for key, level in levels.items()}
    return {
        key: level
        for key, level in levels.items()
        # Who has ended would be waited for in vain.
        if not _have(key, members[key]) and not any(role.is_ending for role in members[key])
    }


def _have(key: GroupKey, roles: Collection[Role]) -> bool:
    return all(key.name in role.gradients for role in roles)
