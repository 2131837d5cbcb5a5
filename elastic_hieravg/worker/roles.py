"""What each rank tells all others once its groups for a generation are built, and what follows from it.

Values and their JSON. Invariant: from the same roles every rank builds the same further groups.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic_hieravg.averaging.gradients import gradient_levels
from elastic_hieravg.plan import GroupKey, Plan, PlannedLevel
from elastic_hieravg.plan.document import Fields, canonical_json, parse_json


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
    """The ranks whose state newcomers get; none if nobody is new. When the job starts, the lowest rank's."""
    holders = [rank for rank, role in enumerate(roles) if role.holds_model]
    return [] if len(holders) == len(roles) else holders or [0]


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
