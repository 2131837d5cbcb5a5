"""Decisions about a round that somebody asks for before it leaves."""

from elastic_hieravg.membership.decisions import Action
from elastic_hieravg.membership.records import Kind
from tests.membership.test_decisions import NOW_S, Case, check, live, lost, pytest_cases, view


@pytest_cases(
    Case(
        "who is about to leave gets its round before anybody joins",
        view({"a": live("a"), "b": live("b", asked=1), "c": live("c")}, "a b"),
        Action.REPLAN,
        "b asks for a round before leaving",
        members="a b",
        kind=Kind.ROUND,
    ),
    Case(
        "a round is given once",
        view({"a": live("a"), "b": live("b", asked=0)}, "a b"),
        Action.KEEP,
        "generation 1 has all its 2 nodes",
    ),
    Case(
        "a loss comes before a round",
        view({"a": live("a"), "b": live("b", asked=1)}, "a b c", lost={"c": lost()}),
        Action.REPLAN,
        "lost c: its lease ended",
        members="a b",
        kind=Kind.LOSS,
    ),
    Case(
        "others write the round in their turn",
        view({"a": live("a"), "b": live("b", 0.1, asked=1)}, "a b", me="b"),
        Action.WAIT,
        "b asks for a round before leaving; the turn of a",
        again_s=NOW_S + 0.15,
    ),
)
def test_a_round_is_given_once_and_after_a_loss(case: Case) -> None:
    check(case)
