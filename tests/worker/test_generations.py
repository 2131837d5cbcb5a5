"""The way into a generation, behind the training loop's back: what it says, and how it ends."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic_hieravg.errors import ParametersError, Problem
from elastic_hieravg.membership.memory import MemoryKeyValue
from elastic_hieravg.membership.opening import Opening
from elastic_hieravg.worker import generations as generations_module
from elastic_hieravg.worker.doubt import GROUPS_REMEMBERED, Results
from tests.worker.lone_rank import PERIOD, LoneRank, lone_rank, wait_for

REFUSAL = ParametersError(Problem("the nodes have different numbers of slots", "do not shard the model"))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoneRank]:
    with lone_rank(monkeypatch) as rank:
        yield rank


def test_a_rank_that_waits_to_be_taken_in_is_told_that_its_tensors_cannot_be_averaged(rank: LoneRank) -> None:
    rank.engine.refusal = REFUSAL
    rank.follow(theirs=Opening(7, holds_model=True))
    wait_for("the refusal", lambda: rank.averager.generations.error is not None)
    with pytest.raises(ParametersError, match="different numbers of slots"):
        rank.averager.join()


def test_a_rank_with_the_model_goes_on_without_one_whose_tensors_cannot_be_averaged(
    rank: LoneRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.begin()
    rank.engine.refusal = REFUSAL
    rank.follow(theirs=Opening(7, holds_model=False))
    (thread,) = rank.averager.generations._threads[-1:]
    wait_for("the end of the way", lambda: not thread.is_alive())
    assert rank.averager.generations.error is None
    assert "generation 2 cannot be entered; training goes on as it is: the nodes have" in caplog.text
    rank.averager.step()
    # The next one is without it.
    rank.engine.refusal = None
    rank.follow(theirs=Opening(3, holds_model=True))
    rank.await_entry()
    rank.averager.step()
    assert rank.entered == {1: 1, 3: 3}


def test_a_way_that_is_over_leaves_the_newer_ones_connection_alone(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may be slow to begin, and each generation may have its store at another place."""
    rank.begin()
    generations = rank.averager.generations
    old = generations._way
    assert old is not None
    rank.follow(theirs=None)
    rank.await_posted()
    old.follow = replace(old.follow, port=2)
    opened: list[MemoryKeyValue] = []

    def open_another(*_: object, **__: object) -> MemoryKeyValue:
        opened.append(MemoryKeyValue())
        return opened[-1]

    monkeypatch.setattr(generations_module, "EmbeddedKeyValue", open_another)
    with pytest.raises(RuntimeError, match="nobody needs this any more"):
        generations._reach(old)
    assert opened == []
    rank.say_opening(Opening(2, holds_model=True))
    rank.await_entry()


def test_who_left_a_group_still_tells_whether_it_took_the_last_result(rank: LoneRank) -> None:
    """Somebody may be in doubt about that round who has not come to the generation between."""
    rank.begin()
    (first,) = rank.keys
    while rank.averager.step_count < PERIOD:
        rank.averager.step()
    for number in (2, 3):
        rank.follow(theirs=Opening(0, holds_model=True))
        rank.await_entry()
        committed = rank.own_opening().committed
        assert committed is not None
        assert committed[first.name] == 1, f"on the way to generation {number}"
        rank.averager.step()
    assert rank.entered == {1: 1, 2: PERIOD + 1, 3: PERIOD + 2}


def test_so_many_groups_are_remembered_and_no_more() -> None:
    results = Results()
    for number in range(2 * GROUPS_REMEMBERED):
        results.leave({f"group {number}": number})
    known = results.known({"now": 1})
    assert len(known) == GROUPS_REMEMBERED + 1
    assert known["now"] == 1
    assert known[f"group {2 * GROUPS_REMEMBERED - 1}"] == 2 * GROUPS_REMEMBERED - 1
    assert "group 0" not in known
