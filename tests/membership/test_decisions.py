"""What an agent decides on what it sees: every action with its reason, and every bound."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from elastic_hieravg.errors import InputError
from elastic_hieravg.membership.decisions import (
    SETTLE_TIMES_MAX,
    TURNS_MAX,
    Action,
    Decision,
    Live,
    Loss,
    Policy,
    View,
    decide,
    has_lost_member,
    num_restart_wanted,
)
from elastic_hieravg.membership.records import Closing, Generation, Job, Kind, Mode, NodeRecord, NodeState
from elastic_hieravg.plan import Hierarchy, Node

NOW_S = 1000.0
HIERARCHY = Hierarchy.parse("global=8")
JOINING, READY, LEAVING = NodeState.JOINING, NodeState.READY, NodeState.LEAVING


def policy(nodes_min: int = 1, nodes_max: int = 8, mode: Mode = Mode.IN_PLACE, **times_s: float) -> Policy:
    settings: dict[str, Any] = {"loss_settle_s": 0.2, "join_settle_s": 1.0, "turn_s": 0.25, **times_s}
    return Policy(Job(nodes_min, nodes_max, HIERARCHY, mode), **settings)


def node(node_id: str) -> Node:
    """A node; a prime stands for another start of it."""
    return Node(node_id.strip("'"), 1, {}, f"incarnation-{node_id}")


def live(
    node_id: str, ago_s: float = 100.0, *, state: NodeState = READY, entered: int = 1, asked: int = 0
) -> Live:
    return Live(NodeRecord(node(node_id), state, "h", 1, entered=entered, asked=asked), NOW_S - ago_s)


def generation(members: str, *, number: int = 1, hold: str = "") -> Generation:
    nodes = tuple(map(node, members.split()))
    return Generation(number, Kind.START, "test", nodes, {}, "digest", (number,), hold, "writer")


def lost(ago_s: float = 10.0, *, on_purpose: bool = False, why: str = "its lease ended") -> Loss:
    return Loss("incarnation", NOW_S - ago_s, why, on_purpose)


def view(nodes: dict[str, Live] | str, members: str = "", *, me: str = "a", **rest: Any) -> View:
    """What `me` sees; nodes given by their names alone have been ready for long."""
    seen = {each: live(each) for each in nodes.split()} if isinstance(nodes, str) else nodes
    return View(node(me), seen, generation(members) if members else None, **rest)


DEFAULT = policy()


@dataclass(frozen=True)
class Case:
    name: str
    view: View
    action: Action
    reason: str
    policy: Policy = DEFAULT
    again_s: float = math.inf
    members: str = ""
    kind: Kind | None = None


def check(case: Case) -> None:
    found = decide(NOW_S, view=case.view, policy=case.policy)
    assert (found.action, found.reason) == (case.action, case.reason)
    if case.action is Action.WAIT:
        assert found.again_s == pytest.approx(case.again_s)
    assert (found.proposal is not None) == (case.action is Action.REPLAN)
    if found.proposal is not None:
        assert (" ".join(found.proposal.node_ids), found.proposal.kind) == (case.members, case.kind)
        assert found.proposal.reason == found.reason


def pytest_cases(*cases: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


# --- the start ----------------------------------------------------------------------------------------------

PAUSED_S = NOW_S - 5.0


@pytest_cases(
    Case(
        "too few",
        view("a b", paused_since_s=PAUSED_S),
        Action.WAIT,
        "2 of at least 3 nodes",
        policy(3, pause_s=60.0),
        again_s=PAUSED_S + 60.0,
    ),
    Case(
        "one is alive and not ready",
        view({"a": live("a", 10.0), "b": live("b", state=JOINING)}),
        Action.WAIT,
        "b is alive and not ready yet",
        policy(start_wait_s=60.0),
        again_s=NOW_S + 50.0,
    ),
    Case(
        "those who are not ready are not waited for any longer",
        view({"a": live("a", 60.0), "b": live("b", state=JOINING)}),
        Action.REPLAN,
        "a is ready",
        policy(start_wait_s=60.0),
        members="a",
        kind=Kind.START,
    ),
    Case(
        "settling for more",
        view({"a": live("a", 0.9), "b": live("b", 0.4)}),
        Action.WAIT,
        "2 nodes ready of 8; settling for 0.6 s more",
        again_s=NOW_S + 0.6,
    ),
    Case(
        "settling is over in the end, whoever comes",
        view({"a": live("a", SETTLE_TIMES_MAX * 1.0), "b": live("b", 0.0)}),
        Action.REPLAN,
        "a, b are ready",
        members="a b",
        kind=Kind.START,
    ),
    Case(
        "nobody is waited for above the maximum, and names count as people do",
        view({each: live(each, 0.0) for each in ("n10", "n2", "n1")}, me="n1"),
        Action.REPLAN,
        "n1, n2 are ready",
        policy(1, 2),
        members="n1 n2",
        kind=Kind.START,
    ),
    Case(
        "who leaves does not start",
        view({"a": live("a"), "b": live("b", state=LEAVING)}),
        Action.REPLAN,
        "a is ready",
        members="a",
        kind=Kind.START,
    ),
)
def test_starts(case: Case) -> None:
    check(case)


# --- losses -------------------------------------------------------------------------------------------------


@pytest_cases(
    Case(
        "a loss settles",
        view("a b", "a b c", lost={"c": lost(0.1)}),
        Action.WAIT,
        "c is lost; settling for 0.1 s more",
        again_s=NOW_S + 0.1,
    ),
    Case(
        "each loss waits for the next",
        view("a", "a b c", lost={"b": lost(0.3), "c": lost(0.1)}),
        Action.WAIT,
        "b, c are lost; settling for 0.1 s more",
        again_s=NOW_S + 0.1,
    ),
    Case(
        "but not for ever",
        view("a", "a b c", lost={"b": lost(SETTLE_TIMES_MAX * 0.2), "c": lost(0.0)}),
        Action.REPLAN,
        "lost b: its lease ended; c: its lease ended",
        members="a",
        kind=Kind.LOSS,
    ),
    Case(
        "who leaves on purpose is not waited for",
        view("a b", "a b c", lost={"c": lost(0.0, on_purpose=True, why="it left on purpose")}),
        Action.REPLAN,
        "lost c: it left on purpose",
        members="a b",
        kind=Kind.LOSS,
    ),
    Case(
        "a newcomer does not come with a loss",
        view("a b d", "a b c", lost={"c": lost()}),
        Action.REPLAN,
        "lost c: its lease ended",
        members="a b",
        kind=Kind.LOSS,
    ),
    Case(
        "many losses are not all named",
        view("a", "a b c d e f g", lost={each: lost(why="gone") for each in "bcdefg"}),
        Action.REPLAN,
        "lost b: gone; c: gone; d: gone; e: gone; f: gone and 1 more",
        members="a",
        kind=Kind.LOSS,
    ),
    Case(
        "everybody lost and nobody there yet",
        view({"a'": live("a'", state=JOINING)}, "a b", me="a'", lost={"a": lost(), "b": lost()}),
        Action.WAIT,
        "0 of at least 1 nodes",
    ),
    Case(
        "everybody lost and started anew",
        view({"a": live("a'"), "b": live("b'")}, "a b", me="a'", lost={"a": lost(), "b": lost()}),
        Action.REPLAN,
        "lost a: its lease ended; b: its lease ended; nobody was left",
        members="a b",
        kind=Kind.START,
    ),
)
def test_losses(case: Case) -> None:
    check(case)


def test_below_the_minimum_the_job_holds() -> None:
    found = decide(NOW_S, view=view("a", "a b", lost={"b": lost()}), policy=policy(2))
    assert found.proposal is not None
    assert found.proposal.hold == "1 of at least 2 nodes"
    held = replace(view("a", "a", paused_since_s=NOW_S - 1.0), generation=generation("a", hold="1 of 2"))
    waiting = decide(NOW_S, view=held, policy=policy(2, pause_s=60.0))
    assert (waiting.action, waiting.reason) == (Action.WAIT, "generation 1 holds: 1 of 2")
    assert waiting.again_s == NOW_S + 59.0


@pytest.mark.parametrize(("ago_s", "action"), [(59.9, Action.WAIT), (60.0, Action.STOP)])
def test_a_pause_has_a_bound(ago_s: float, action: Action) -> None:
    seen = view("a", paused_since_s=NOW_S - ago_s)
    found = decide(NOW_S, view=seen, policy=policy(2, pause_s=60.0))
    assert found.action is action
    if action is Action.STOP:
        assert found.reason == "the job could not run for 60 s (join_timeout): 1 of at least 2 nodes"


# --- the row of writers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("me", "due_s"),
    [
        ("c", 0.0),  # members first, in rank order
        ("a", 0.25),
        ("b", 0.5),  # then who is ready, by name
        ("n2", 0.75),
        ("n10", 1.0),
    ],
)
def test_writers_stand_in_a_row(me: str, due_s: float) -> None:
    seen = view("n10 n2 a b c", "c x a", me=me, lost={"x": lost(0.2, why="gone")})
    early, late = (decide(NOW_S + due_s + shift_s, view=seen, policy=policy()) for shift_s in (-0.01, 0.01))
    if due_s:
        assert (early.action, early.reason) == (Action.WAIT, "lost x: gone; the turn of c")
        assert early.again_s == pytest.approx(NOW_S + due_s)
    assert late.action is Action.REPLAN


def test_nobody_waits_longer_than_the_last_turn() -> None:
    names = [f"n{index}" for index in range(20)]
    seen = view(" ".join(names), "n0 x", me=names[-1], lost={"x": lost(0.2)})
    assert decide(NOW_S, view=seen, policy=policy()).again_s == pytest.approx(NOW_S + TURNS_MAX * 0.25)


def test_who_leaves_or_is_not_ready_does_not_write() -> None:
    nodes = {"a": live("a"), "b": live("b", state=LEAVING), "c": live("c", state=JOINING)}
    for me in "bc":
        seen = view(nodes, "a b", me=me, lost={"b": lost(on_purpose=True, why="left")})
        found = decide(NOW_S, view=seen, policy=policy())
        assert (found.action, found.reason) == (Action.WAIT, "lost b: left; a may write the next generation")


# --- growth, rebuilding, staying ----------------------------------------------------------------------------


@pytest_cases(
    Case("nothing to do", view("a b", "a b"), Action.KEEP, "generation 1 has all its 2 nodes"),
    Case(
        "a newcomer waits for others",
        view({**view("a").nodes, "b": live("b", 0.25)}, "a"),
        Action.WAIT,
        "b is ready to join; settling for 0.8 s more",
        again_s=NOW_S + 0.75,
    ),
    Case("a newcomer joins", view("a b", "a"), Action.REPLAN, "b joined", members="a b", kind=Kind.JOIN),
    Case(
        "no more come than there is room for, by name",
        view("a c2 c10 b", "a"),
        Action.REPLAN,
        "b, c2 joined",
        policy(1, 3),
        members="a b c2",
        kind=Kind.JOIN,
    ),
    Case(
        "with the room filled nobody waits for others",
        view({**view("a").nodes, "b": live("b", 0.0)}, "a"),
        Action.REPLAN,
        "b joined",
        policy(1, 2),
        members="a b",
        kind=Kind.JOIN,
    ),
    Case(
        "above the maximum they are spares",
        view("a b c d", "a b"),
        Action.KEEP,
        "2 nodes spare: the job has its 2 nodes",
        policy(1, 2),
    ),
    Case(
        "who is not ready does not join",
        view({**view("a").nodes, "b": live("b", state=JOINING)}, "a"),
        Action.KEEP,
        "generation 1 has all its 1 node",
    ),
    Case(
        "one growth at a time",
        view({"a": live("a"), "b": live("b", entered=0), "c": live("c")}, "a b"),
        Action.WAIT,
        "b not yet in generation 1",
    ),
    Case(
        "a broken group waits for a death to show",
        view("a b", "a b", broken=("g1",), broken_since_s=NOW_S - 0.1),
        Action.WAIT,
        "a group failed and nobody is lost; settling for 0.1 s more",
        again_s=NOW_S + 0.1,
    ),
    Case(
        "a broken group is built anew before anybody joins",
        view("a b c", "a b", broken=("g1", "g2"), broken_since_s=NOW_S - 1.0),
        Action.REPLAN,
        "2 groups failed and nobody was lost",
        members="a b",
        kind=Kind.REBUILD,
    ),
)
def test_stays_grows_and_rebuilds(case: Case) -> None:
    check(case)


def test_a_closed_job_stops_whatever_else_there_is() -> None:
    seen = view("a", "a b", lost={"b": lost()}, closing=Closing(True, "all done"))
    assert decide(NOW_S, view=seen, policy=policy()) == Decision(Action.STOP, "the job is closed: all done")


# --- restarts, the TorchElastic way -------------------------------------------------------------------------

RESTART = policy(2, 3, Mode.RESTART, stop_s=60.0, start_wait_s=60.0)


@pytest_cases(
    Case("nothing to do", view("a b", "a b"), Action.KEEP, "generation 1 has all its members", RESTART),
    Case(
        "a spare changes nothing",
        view("a b c d", "a b c"),
        Action.KEEP,
        "generation 1 has all its members, 1 node spare",
        RESTART,
    ),
    Case(
        "everybody who lives has to come first",
        view("a b", "a b c", lost={"c": lost(10.0)}),
        Action.WAIT,
        "a, b still run the generation before",
        RESTART,
        again_s=NOW_S + 50.0,
    ),
    Case(
        "for a newcomer too",
        view({**view("a b").nodes, "c": live("c", 10.0)}, "a b"),
        Action.WAIT,
        "a, b still run the generation before",
        RESTART,
        again_s=NOW_S + 50.0,
    ),
    Case(
        "a loss settles once all have come",
        view({"a": live("a'"), "b": live("b'")}, "a b c", me="a'", lost={each: lost(0.1) for each in "abc"}),
        Action.WAIT,
        "a, b, c are lost; settling for 0.1 s more",
        RESTART,
        again_s=NOW_S + 0.1,
    ),
    Case(
        "who lives and is not ready is waited for",
        view(
            {"a": live("a'"), "b": live("b'"), "d": live("d", state=JOINING)},
            "a b",
            me="a'",
            lost={each: lost() for each in "ab"},
        ),
        Action.WAIT,
        "d is alive and not ready yet",
        # From the first sign of the change on.
        policy(2, 3, Mode.RESTART, start_wait_s=150.0),
        again_s=NOW_S - 100.0 + 150.0,
    ),
    Case(
        "all have come, one is lost",
        view({"a": live("a'"), "b": live("b'")}, "a b c", me="a'", lost={each: lost() for each in "abc"}),
        Action.REPLAN,
        "lost c: its lease ended",
        RESTART,
        members="a b",
        kind=Kind.RESTART,
    ),
    Case(
        "too few have come",
        view({"a": live("a'")}, "a b", me="a'", lost={each: lost() for each in "ab"}),
        Action.WAIT,
        "1 of at least 2 nodes",
        RESTART,
    ),
    Case(
        "one that does not stop is left behind in the end",
        view(
            {"a": live("a'"), "b": live("b"), "c": live("c'")},
            "a b c",
            me="a'",
            lost={each: lost(60.0) for each in "ac"},
        ),
        Action.REPLAN,
        "a, c are ready",
        RESTART,
        members="a c",
        kind=Kind.RESTART,
    ),
    Case(
        "a spare steps in",
        view(
            {"a": live("a'"), "b": live("b'"), "d": live("d")},
            "a b c",
            me="a'",
            lost={x: lost() for x in "abc"},
        ),
        Action.REPLAN,
        "lost c: its lease ended",
        RESTART,
        members="a b d",
        kind=Kind.RESTART,
    ),
)
def test_restarts(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (view("a b"), 1),  # there is no generation yet
        (view("a b", "b"), 1),  # it does not hold this node
        (view("a b", "a b"), 0),
        (view("a b", "a b c", lost={"c": lost(0.1)}), 0),  # not settled
        (view("a b", "a b c", lost={"c": lost(0.2)}), 1),
        (view("a b", "a b c", lost={"c": lost(0.0, on_purpose=True)}), 1),
        (view({**view("a b").nodes, "c": live("c", 0.9)}, "a b"), 0),
        (view({**view("a b").nodes, "c": live("c", 1.0)}, "a b"), 1),
        (view("a b c d", "a b c"), 0),  # a spare
        (view("a b d e", "a b c", lost={"c": lost()}), 3),
        (view({**view("a").nodes, "b": live("b'")}, "a b", lost={"b": lost()}), 2),
    ],
)
def test_counts_the_changes_that_call_for_a_restart(seen: View, wanted: int) -> None:
    assert num_restart_wanted(NOW_S, view=seen, policy=RESTART) == wanted


def test_a_loss_is_one_once_it_is_settled() -> None:
    for loss, is_lost in ((lost(0.1), False), (lost(0.2), True), (lost(0.0, on_purpose=True), True)):
        assert has_lost_member(NOW_S, view=view("a", "a b", lost={"b": loss}), policy=policy()) is is_lost
    assert not has_lost_member(NOW_S, view=view("a b", "a b"), policy=policy())


@pytest.mark.parametrize(
    ("times_s", "message"),
    [
        ({"loss_settle_s": -1.0}, "loss_settle_s is -1.0"),
        ({"join_settle_s": math.inf}, "join_settle_s is inf"),
        ({"pause_s": math.nan}, "pause_s is nan"),
        ({"turn_s": 5.0, "pause_s": 5.0}, "the job would end before anybody's turn"),
    ],
)
def test_rejects_times_that_are_none(times_s: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        policy(**times_s)  # type: ignore[arg-type]
