"""Group keys: what is kept, what is never used twice. The stories are in the scenarios."""

import pytest

from elastic_hieravg.plan import GroupKey, Hierarchy, Member, Node, Topology, difference, first_keys, fit

HIERARCHY = Hierarchy.parse("node=4,global=16")
NODES = [Node("a", 2), Node("b", 2)]


def test_a_key_never_comes_back_though_the_digest_does() -> None:
    first = fit(HIERARCHY, Topology(NODES), generation=1)
    alone = fit(HIERARCHY, Topology(NODES[:1]), generation=2)
    again = fit(HIERARCHY, Topology(NODES), generation=3)
    lost = difference(first, alone, keys=first_keys(first))
    back = difference(alone, again, keys=lost.keys)
    assert again.digest == first.digest
    gone = {group.key for group in lost.gone}
    assert len(gone) == 2
    assert not gone & set(back.keys)
    assert not {key.name for key in gone} & {key.name for key in back.keys}


def test_a_group_that_serves_two_levels_has_one_key() -> None:
    nodes = [Node("a", 2, {"zone": "z1"}), Node("b", 2, {"zone": "z2"}), Node("c", 2, {"zone": "z2"})]
    plan = fit(Hierarchy.parse("node=2,zone=4,global=8"), Topology(nodes))
    assert [len(level.groups) for level in plan.levels] == [3, 2, 1]
    # The group of node a is also the group of zone z1.
    assert len(first_keys(plan)) == 5


def test_the_names_of_keys_differ_by_generation_and_by_incarnation() -> None:
    members = (Member("a", "x", 0), Member("b", "y", 0))
    names = {
        GroupKey(members, 1).name,
        GroupKey(members, 2).name,
        GroupKey((members[0], Member("b", "z", 0)), 1).name,
    }
    assert len(names) == 3
    assert GroupKey(members, 1).name == "1-a3949f0efbb1a773c945d878"


def test_a_report_about_a_group_that_is_gone_changes_nothing() -> None:
    first = fit(HIERARCHY, Topology(NODES), generation=1)
    second = fit(HIERARCHY, Topology(NODES), generation=2)
    stale = GroupKey((Member("z", "", 0), Member("z", "", 1)), 0)
    change = difference(first, second, keys=first_keys(first), broken=[stale])
    assert change.new == change.gone == ()


def test_a_plan_cannot_follow_a_later_one_nor_keys_of_another() -> None:
    first = fit(HIERARCHY, Topology(NODES), generation=1)
    with pytest.raises(AssertionError, match="generations only grow"):
        difference(first, first, keys=first_keys(first))
    with pytest.raises(AssertionError, match="every group of the plan before has a key"):
        difference(first, fit(HIERARCHY, Topology(NODES), generation=2), keys=())
