"""Where a rank waits between two steps: a boundary that it has named to the others is not left behind."""

from collections.abc import Iterator

import pytest

from elastic_hieravg.membership.opening import Opening
from elastic_hieravg.membership.records import Kind
from tests.worker.lone_rank import PERIOD, WITHIN_S, Fate, LoneRank, lone_rank, wait_for


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoneRank]:
    with lone_rank(monkeypatch) as rank:
        rank.begin()
        yield rank


@pytest.mark.parametrize("is_known", [True, False])
def test_a_boundary_that_is_named_while_a_wait_ends_is_not_left(rank: LoneRank, is_known: bool) -> None:
    """It enters generation 2 at the boundary where its round failed. The next one comes before it goes on."""
    there = Opening(PERIOD, holds_model=True)

    def follow_again(number: int) -> None:
        if number == 2:
            # As if the job's bounds changed: with the groups of before.
            rank.follow(theirs=there if is_known else None, kind=Kind.BOUNDS, keeps_group=True)
            if is_known:
                rank.await_entry()
            else:
                rank.await_posted()
                rank.say_opening(there)

    rank.on_entered = follow_again
    rank.engine.fates = [Fate.LOST]
    rank.when_waiting(lambda: rank.follow(theirs=there))
    while rank.averager.step_count < PERIOD + 1:
        rank.averager.step()
    assert rank.engine.num_faults == 1
    # Everybody enters a generation at the same step.
    assert rank.entered == {1: 1, 2: PERIOD, 3: PERIOD}


def test_time_that_is_up_does_not_end_a_wait_where_all_enter(rank: LoneRank) -> None:
    """What the others said comes after the last look, and before time is up."""
    boundary, step = rank.averager._boundary, rank.averager.step_count
    looks = []

    def look() -> bool:
        looks.append(1)
        if len(looks) == 1:
            rank.follow(theirs=Opening(step, holds_model=True))
            rank.await_entry()
            return False
        return rank.averager._enter_if_time(can_wait=True)

    assert boundary.wait(rank.averager.generations, look, timeout_s=0.0, can_enter=True)
    assert rank.entered == {1: 1, 2: step}
    assert len(looks) == 2


def test_time_that_is_up_ends_a_wait_where_nothing_was_said(rank: LoneRank) -> None:
    boundary = rank.averager._boundary
    assert not boundary.wait(rank.averager.generations, lambda: False, timeout_s=0.0, can_enter=True)
    assert not boundary.is_waiting


def test_what_was_seen_in_a_wait_is_looked_at_again_at_the_next_boundary(rank: LoneRank) -> None:
    """The others enter one step later: the rank goes on to meet them, and must not miss them there."""
    averager, boundary = rank.averager, rank.averager._boundary
    boundary.has_news = False
    rank.follow(theirs=Opening(2, holds_model=True))
    rank.await_entry()
    wait_for("the news of it", lambda: boundary.has_news)
    looks = iter([False])
    assert boundary.wait(
        averager.generations,
        lambda: next(looks, averager._has_passed()),
        timeout_s=WITHIN_S,
        can_enter=True,
    )
    averager.step()
    assert rank.entered == {1: 1, 2: 2}
