"""Decisions while the bounds change: who is held, who is set free, who may join, and who is left alone."""

from dataclasses import replace

import pytest

from elastic_hieravg.errors import InputError
from elastic_hieravg.membership.decisions import Action, disagreement
from elastic_hieravg.membership.records import Bounds, Job, Kind, Mode
from tests.membership.test_decisions import (
    HIERARCHY,
    NOW_S,
    Case,
    check,
    generation,
    live,
    lost,
    policy,
    pytest_cases,
    view,
)

LONG_AGO_S = NOW_S - 100.0
SHORT = "2 of at least 3 nodes"


@pytest_cases(
    Case(
        "more nodes are needed than there are: it holds",
        view("a b", "a b", bounds_since_s=LONG_AGO_S),
        Action.REPLAN,
        "the job has 3 to 4 nodes now",
        policy=policy(3, 4),
        members="a b",
        kind=Kind.BOUNDS,
    ),
    Case(
        "fewer nodes are needed: it is set free",
        replace(view("a b", "a b", bounds_since_s=LONG_AGO_S), generation=generation("a b", hold=SHORT)),
        Action.REPLAN,
        "the job has 2 to 4 nodes now",
        policy=policy(2, 4),
        members="a b",
        kind=Kind.BOUNDS,
    ),
    Case(
        "it holds, and fewer nodes than before are still too few",
        replace(
            view("a b", "a b", paused_since_s=NOW_S), generation=generation("a b", hold="2 of at least 4 nodes")
        ),
        Action.WAIT,
        "generation 1 holds: 2 of at least 4 nodes",
        policy=policy(3, 4),
        again_s=NOW_S + 600.0,
    ),
    Case(
        "a plan that does not fit holds whatever the bounds are",
        replace(
            view("a b", "a b", paused_since_s=NOW_S), generation=generation("a b", hold="level size-8: no")
        ),
        Action.WAIT,
        "generation 1 holds: level size-8: no",
        policy=policy(1, 4),
        again_s=NOW_S + 600.0,
    ),
    Case(
        "others write it in their turn",
        view("a b", "a b", me="b", bounds_since_s=NOW_S - 0.1),
        Action.WAIT,
        "the job has 3 to 4 nodes now; the turn of a",
        policy=policy(3, 4),
        again_s=NOW_S + 0.15,
    ),
    Case(
        "a loss comes first, and holds by the bounds of now",
        view({"a": live("a"), "b": live("b")}, "a b c", lost={"c": lost()}, bounds_since_s=LONG_AGO_S),
        Action.REPLAN,
        "lost c: its lease ended",
        policy=policy(3, 4),
        members="a b",
        kind=Kind.LOSS,
    ),
    Case(
        "a spare joins when there is room for it",
        view("a b c", "a b", bounds_since_s=LONG_AGO_S),
        Action.REPLAN,
        "c joined",
        policy=policy(1, 3),
        members="a b c",
        kind=Kind.JOIN,
    ),
    Case(
        "nobody is sent away when there is room for fewer",
        view("a b c", "a b c", bounds_since_s=LONG_AGO_S),
        Action.KEEP,
        "generation 1 has all its 3 nodes",
        policy=policy(1, 2),
    ),
    Case(
        "nobody is taken in above the maximum",
        view("a b c d", "a b c", bounds_since_s=LONG_AGO_S),
        Action.KEEP,
        "1 node spare: the job has its 2 nodes",
        policy=policy(1, 2),
    ),
)
def test_bounds_that_change(case: Case) -> None:
    check(case)


def test_node_that_follows_bounds_is_not_refused_for_them() -> None:
    asked, job = Job(1, 4, HIERARCHY), Job(2, 8, HIERARCHY)
    assert disagreement(asked, job, follows_bounds=True) is None
    problem = disagreement(asked, job, follows_bounds=False)
    assert problem is not None
    assert problem.message == (
        "this node asks for --nnodes minimum 1, --nnodes maximum 4, "
        "and the job runs with --nnodes minimum 2, --nnodes maximum 8"
    )


def test_node_that_follows_bounds_is_refused_for_everything_else() -> None:
    problem = disagreement(
        Job(1, 4, HIERARCHY, Mode.RESTART), Job(2, 8, HIERARCHY, Mode.IN_PLACE), follows_bounds=True
    )
    assert problem is not None
    assert (
        problem.message
        == "this node asks for --membership restart, and the job runs with --membership in-place"
    )


@pytest.mark.parametrize(("nodes_min", "nodes_max"), [(0, 1), (3, 2)])
def test_bounds_that_cannot_be_are_refused(nodes_min: int, nodes_max: int) -> None:
    with pytest.raises(InputError, match="the minimum of nodes is"):
        Bounds(nodes_min, nodes_max)
