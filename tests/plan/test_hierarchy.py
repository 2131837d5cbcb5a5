"""Hierarchies: what is read, and everything that is refused, with its words."""

import pytest

from elastic_hieravg.errors import HierarchyError
from elastic_hieravg.plan import Hierarchy, Level


def test_parse_reads_levels_innermost_first() -> None:
    hierarchy = Hierarchy.parse(" node=4, topology.kubernetes.io/zone=16 ,global=64")
    assert hierarchy.levels == (
        Level("node", 4),
        Level("topology.kubernetes.io/zone", 16),
        Level("global", 64),
    )
    assert hierarchy.labels() == ("topology.kubernetes.io/zone",)
    assert Hierarchy.parse(str(hierarchy)) == hierarchy


def test_global_alone_is_a_hierarchy() -> None:
    assert Hierarchy.parse("global=1").levels == (Level("global", 1),)


def test_from_group_sizes_keeps_torchs_meaning() -> None:
    hierarchy = Hierarchy.from_group_sizes({4: 8, 16: 32})
    assert hierarchy.levels == (Level("size-8", 4), Level("global", 16))
    assert hierarchy.levels[0].group_size == 8
    assert hierarchy.world_size == 32


@pytest.mark.parametrize(
    ("text", "found", "hint"),
    [
        ("", "the hierarchy is empty", "write level=period_steps"),
        ("  ", "the hierarchy is empty", "write level=period_steps"),
        ("node", "'node' is not a level", "for example node=4"),
        ("node=", "'node=' is not a level", "for example node=4"),
        ("=4", "'=4' is not a level", "for example node=4"),
        ("node=4.5,global=9", "'node=4.5' is not a level", "for example node=4"),
        ("node=four,global=9", "'node=four' is not a level", "for example node=4"),
        ("node=4,,global=8", "a comma without a level", "for example node=4"),
        ("node=4,global=8,", "a comma without a level", "for example node=4"),
        ("no de=4,global=8", "'no de=4' is not a level", "for example node=4"),
        ("node=4:,global=8", "'node=4:' is not a level", "for example node=4"),
        (f"global={'9' * 30}", "is not a level", "for example node=4"),
        ("global=64:int8:overlap", "level global has the option int8", "write global=64"),
        ("node=0,global=8", "level node has the period 0", "1 or more"),
        ("node=-4,global=8", "level node has the period -4", "1 or more"),
        ("node=8,global=8", "level global has the period 8, not longer than the 8 of node", "16 or another"),
        ("node=16,zone=4,global=64", "level zone has the period 4, not longer than the 16", "32 or another"),
        (
            "node=4,global=18",
            "the period 18, not a multiple of the 4 of node",
            "give global the period 16 or 20",
        ),
        ("node=4,global=6", "the period 6, not a multiple of the 4 of node", "give global the period 8"),
        ("node=4,zone=16", "the hierarchy has no level global, only node and zone", "end with global"),
        ("global=4,node=8", "level node comes after global", "global last"),
        ("node=4,global=8,zone=16", "level zone comes after global", "global last"),
        ("zone=4,node=8,global=16", "level node comes after zone", "node before any label"),
        ("node=2,node=4,global=8", "level node is written 2 times, with the periods 2 and 4", "once"),
        (
            ",".join(f"l{index}={2**index}" for index in range(16)) + f",global={2**16}",
            "the hierarchy has 17 levels",
            "16 at most",
        ),
        ("size-0=2,global=8", "level size-0 has groups of 0 ranks", "at least one rank"),
        ("size-8=2,size-4=4,global=8", "groups of 4 ranks, not larger than the 8", "for example 16"),
        ("size-4=2,size-6=4,global=8", "groups of 6 ranks, not a multiple of the 4", "for example 8"),
    ],
)
def test_rejects_text_that_contradicts_itself(text: str, found: str, hint: str) -> None:
    with pytest.raises(HierarchyError) as error:
        Hierarchy.parse(text)
    assert any(found in problem.message and hint in problem.hint for problem in error.value.problems), (
        error.value
    )


def test_reports_everything_wrong_at_once() -> None:
    with pytest.raises(HierarchyError, match="4 problems") as error:
        Hierarchy.parse("node=4,node=6,zone=7")
    text = str(error.value)
    assert "level node is written 2 times" in text
    assert "has no level global" in text
    assert "level node has the period 6, not a multiple of the 4" in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({}, "the group sizes are {}"),
        ([(4, 8)], "the group sizes are [(4, 8)]"),
        ({"4": 8}, "hold '4': 8, which are not whole numbers"),
        ({4: True}, "hold 4: True, which are not whole numbers"),
        ({4: 0, 8: 2}, "period 4 has groups of 0 ranks"),
        ({0: 2, 8: 4}, "level size-2 has the period 0"),
        ({16: 2, 4: 4}, "has the period 4, not longer than the 16"),
        ({4: 8, 16: 8}, "groups of 8 ranks, not larger than the 8"),
        ({4: 8, 16: 20}, "groups of 20 ranks, not a multiple of the 8"),
        ({2: 8, 4: 4, 8: 16}, "groups of 4 ranks, not larger than the 8"),
    ],
)
def test_rejects_group_sizes_that_make_no_hierarchy(sizes: dict[int, int], found: str) -> None:
    with pytest.raises(HierarchyError) as error:
        Hierarchy.from_group_sizes(sizes)
    assert any(found in problem.message for problem in error.value.problems), error.value


def test_rejects_levels_given_in_code() -> None:
    with pytest.raises(HierarchyError, match="has no levels"):
        Hierarchy(())
    with pytest.raises(HierarchyError, match="level name 'my zone' is not a name"):
        Hierarchy((Level("my zone", 2), Level("global", 4)))
    with pytest.raises(HierarchyError, match="the period True"):
        Hierarchy((Level("global", True),))
