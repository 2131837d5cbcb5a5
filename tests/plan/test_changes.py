"""Group keys: what is kept, what is never used twice. The stories are in the scenarios."""

from dataclasses import replace

import pytest

from elastic_hieravg.plan import (
    GroupKey,
    Hierarchy,
    Member,
    Node,
    Topology,
    change_text,
    difference,
    first_keys,
    fit,
)
from elastic_hieravg.plan.text import GROUPS_SHOWN_MAX

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


def test_a_group_that_is_gone_tells_all_levels_it_served() -> None:
    nodes = [Node("a", 2, {"zone": "z1"}), Node("b", 2, {"zone": "z2"}), Node("c", 2, {"zone": "z2"})]
    hierarchy = Hierarchy.parse("node=2,zone=4,global=8")
    before = fit(hierarchy, Topology(nodes))
    after = fit(hierarchy, Topology(nodes[1:]), generation=2)
    change = difference(before, after, keys=first_keys(before))
    assert [(group.ranks, group.levels) for group in change.gone] == [
        ((0, 1), ("node", "zone")),
        ((0, 1, 2, 3, 4, 5), ("global",)),
    ]


def test_many_groups_of_one_kind_hide_none_of_another() -> None:
    nodes = [Node(f"n{index}", 2) for index in range(20)]
    restarted = [replace(node, incarnation="again") for node in nodes[:10]]
    before = fit(HIERARCHY, Topology(nodes))
    after = fit(HIERARCHY, Topology([*restarted, *nodes[10:]]), generation=2)
    change = difference(before, after, keys=first_keys(before))
    lines = change_text(change).splitlines()[1:]
    for word, groups in (("kept", change.kept), ("new", change.new), ("gone", change.gone)):
        assert len(groups) > GROUPS_SHOWN_MAX
        told = [line.split(maxsplit=1)[1] for line in lines if line.split()[0] == word]
        assert told[GROUPS_SHOWN_MAX:] == [f"and {len(groups) - GROUPS_SHOWN_MAX} more"]
    assert len(lines) == 3 * (GROUPS_SHOWN_MAX + 1)


def test_one_loss_among_many_nodes_is_told_whole() -> None:
    nodes = [Node(f"n{index}", 2) for index in range(12)]
    before, after = fit(HIERARCHY, Topology(nodes)), fit(HIERARCHY, Topology(nodes[:-1]), generation=2)
    assert change_text(difference(before, after, keys=first_keys(before))).splitlines()[-5:] == [
        "  kept  {14-15}      node    built in generation 1",
        "  kept  and 3 more",
        "  new   {0-21}       global  built in generation 2",
        "  gone  was {22-23}  node    built in generation 1",
        "  gone  was {0-23}   global  built in generation 1",
    ]


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
