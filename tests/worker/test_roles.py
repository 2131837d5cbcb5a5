"""What follows from what all ranks tell of themselves: whose state travels, and which groups are built."""

import pytest

from elastic_hieravg.errors import DocumentError
from elastic_hieravg.plan import GroupKey, Hierarchy, Node, Plan, Topology, first_keys, fit
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

HOLDS, LACKS = Role(5, holds_model=True), Role(0, holds_model=False)


@pytest.mark.parametrize(
    ("roles", "sources"),
    [
        ([HOLDS, HOLDS], []),
        ([HOLDS, LACKS, HOLDS], [0, 2]),
        ([LACKS, HOLDS], [1]),
        # The job starts.
        ([LACKS, LACKS], [0]),
        # Nobody holds the model; one has come far.
        ([LACKS, Role(7, holds_model=False)], [1]),
    ],
)
def test_state_comes_from_those_who_hold_the_model(roles: list[Role], sources: list[int]) -> None:
    assert sources_of(roles) == sources


def test_a_role_is_read_as_it_was_written() -> None:
    role = Role(7, holds_model=True, is_hooked=True, gradients=("1-ab", "2-cd"), is_ending=True)
    assert read_role(role.to_json()) == role
    with pytest.raises(DocumentError, match="a role has no 'step'"):
        read_role("{}")


def planned(warmup_steps: int) -> tuple[Plan, dict[int, dict[str, GroupKey]]]:
    """Nodes of 2, 2 and 1; for each rank the keys of its groups that have company."""
    nodes = [Node("a", 2), Node("b", 2), Node("c", 1)]
    plan = fit(Hierarchy.parse("node=4,global=16"), Topology(nodes), warmup_steps=warmup_steps)
    by_size = {len(key.members): key for key in first_keys(plan)}
    own: dict[int, dict[str, GroupKey]] = {}
    for rank in range(plan.world_size):
        seat = plan.seat(rank)
        own[rank] = {"global": by_size[5]}
        for key in first_keys(plan):
            if len(key.members) == 2 and key.members[0].node_id == seat.node_id:
                own[rank]["node"] = key
    return plan, own


def levels_built(plan: Plan, own: dict[int, dict[str, GroupKey]], roles: list[Role]) -> list[list[str]]:
    return [
        [level.name for level in missing_gradients(plan, roles, rank=rank, wanted=own[rank]).values()]
        for rank in range(plan.world_size)
    ]


def test_without_a_hook_no_groups_for_gradients_are_built() -> None:
    plan, own = planned(warmup_steps=100)
    assert levels_built(plan, own, [HOLDS] * 5) == [[]] * 5


def test_one_hook_has_everybody_build_and_the_world_only_during_warm_up() -> None:
    plan, own = planned(warmup_steps=5)
    roles = [Role(4, holds_model=True, is_hooked=True), HOLDS, HOLDS, HOLDS, LACKS]
    # Rank 4 is alone on its node. Rank 0 still has a step of the warm-up to make.
    assert levels_built(plan, own, roles) == [["node", "global"]] * 4 + [["global"]]
    roles[0] = Role(5, holds_model=True, is_hooked=True)
    assert levels_built(plan, own, roles) == [["node"]] * 4 + [[]]


def test_a_group_that_one_member_lacks_is_built_by_all_of_them() -> None:
    plan, own = planned(warmup_steps=0)
    roles = [
        Role(9, holds_model=True, is_hooked=True, gradients=(own[rank]["node"].name,)) if rank < 4 else HOLDS
        for rank in range(5)
    ]
    assert levels_built(plan, own, roles) == [[]] * 5
    roles[3] = Role(9, holds_model=True, is_hooked=True)
    assert levels_built(plan, own, roles) == [[], [], ["node"], ["node"], []]


def test_nobody_waits_for_the_gradients_of_a_loop_that_has_ended() -> None:
    plan, own = planned(warmup_steps=100)
    hooked = Role(9, holds_model=True, is_hooked=True)
    roles = [hooked, Role(9, holds_model=True, is_hooked=True, is_ending=True), hooked, hooked, hooked]
    # Rank 1 is in the world, and on rank 0's node.
    assert levels_built(plan, own, roles) == [[], [], ["node"], ["node"], []]


# --- before any group is built --------------------------------------------------------------------------------


def test_an_arrival_is_read_as_it_was_written() -> None:
    arrival = Arrival(holds_model=True, model="ab", keys=("1-ab", "2-cd"))
    assert read_arrival(arrival.to_json()) == arrival
    with pytest.raises(DocumentError, match="an arrival has no 'holds_model'"):
        read_arrival("{}")


@pytest.mark.parametrize(
    ("models", "holders", "reference", "strangers"),
    [
        ("xxx", (0, 1, 2), 0, []),
        # The job starts: the lowest rank's model is the job's.
        ("xyx", (), 0, [1]),
        ("yxx", (), 0, [1, 2]),
        # A newcomer is the stranger, whatever its rank.
        ("yxx", (1, 2), 1, [0]),
    ],
)
def test_the_job_s_model_is_that_of_those_who_hold_it(
    models: str, holders: tuple[int, ...], reference: int, strangers: list[int]
) -> None:
    arrivals = [Arrival(rank in holders, model) for rank, model in enumerate(models)]
    assert reference_of(arrivals) == reference
    assert strangers_of(arrivals) == strangers


def test_a_group_is_built_by_all_its_members_if_one_lacks_it() -> None:
    plan, own = planned(warmup_steps=0)
    names = {key.name for keys in own.values() for key in keys.values()}
    everything = Arrival(True, "x", tuple(sorted(names)))
    world = own[0]["global"].name
    without_world = Arrival(True, "x", tuple(sorted(names - {world})))
    nothing = Arrival(False, "x")

    def built(arrivals: list[Arrival]) -> list[list[str]]:
        return [
            [level.name for level in missing_groups(plan, arrivals, rank=rank, wanted=own[rank]).values()]
            for rank in range(plan.world_size)
        ]

    assert built([everything] * 5) == [[]] * 5
    assert built([everything] * 4 + [without_world]) == [["global"]] * 5
    # Rank 1 of the first node was half way when another generation came: its neighbour builds once more.
    assert built([everything, nothing, everything, everything, everything]) == [
        ["node", "global"],
        ["node", "global"],
        ["global"],
        ["global"],
        ["global"],
    ]
