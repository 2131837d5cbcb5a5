"""A round in doubt, whose result others may have taken: it is told once, as what became of it."""

from collections.abc import Iterator

import pytest

from elastic_hieravg.membership.local import Stop
from elastic_hieravg.membership.opening import Opening
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.worker import averager as averager_module
from tests.worker.lone_rank import OLD, PERIOD, RESULT, Fate, LoneRank, lone_rank, wait_for


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoneRank]:
    """The first round that it makes leaves it in doubt."""
    with lone_rank(monkeypatch) as rank:
        rank.begin()
        rank.engine.fates = [Fate.IN_DOUBT]
        yield rank
        assert rank.engine.num_faults == 1


def opening(rank: LoneRank, step: int, *, is_taken: bool, worked: int = 0) -> Opening:
    """What the other rank says. The round in doubt was the first of the group that was there."""
    (key,) = rank.keys
    committed = {key.name: int(is_taken)}
    return Opening(step, holds_model=not worked, wants_round=True, committed=committed, worked=worked)


def train(rank: LoneRank, *, until: int) -> None:
    while rank.averager.step_count < until:
        rank.averager.step()


def counted(rank: LoneRank) -> dict[str, float]:
    samples = rank.tally.samples(rank=0, generation=0, step=0, state="", values={})
    return {labels[1]: n for (name, labels), n in samples.counters.items() if name == names.ROUNDS and n}


@pytest.mark.parametrize("their_step", [PERIOD, PERIOD + 1])
def test_a_round_that_others_took_is_told_as_committed_and_as_nothing_else(
    rank: LoneRank, their_step: int
) -> None:
    """The other rank waits at the same boundary, or it has gone on."""
    theirs = opening(rank, their_step, is_taken=True)
    rank.when_waiting(lambda: rank.follow(theirs=theirs))
    train(rank, until=PERIOD)
    assert rank.value == RESULT
    train(rank, until=PERIOD + 1)
    # The second is the one with which the next generation begins.
    assert rank.outcomes() == ["committed"] * 2
    assert [done.step for done in rank.rounds] == [PERIOD, their_step]
    assert counted(rank) == {"committed": 2}
    assert rank.entered == {1: 1, 2: their_step}
    averager = rank.averager
    assert (averager.num_committed, averager.num_retried, averager.num_skipped) == (2, 0, 0)


def test_how_far_apart_replicas_were_is_not_known_of_a_round_that_was_in_doubt(rank: LoneRank) -> None:
    theirs = opening(rank, PERIOD + 1, is_taken=True)
    rank.when_waiting(lambda: rank.follow(theirs=theirs))
    train(rank, until=PERIOD)
    assert rank.outcomes() == ["committed"]
    samples = rank.tally.samples(rank=0, generation=0, step=0, state="", values={})
    assert samples.gauges == {}


def test_a_round_that_nobody_took_has_failed_and_is_tried_again(rank: LoneRank) -> None:
    theirs = opening(rank, PERIOD, is_taken=False)
    values: list[float] = []
    rank.on_entered = lambda _: values.append(rank.value)
    rank.when_waiting(lambda: rank.follow(theirs=theirs))
    train(rank, until=PERIOD)
    assert values == [OLD]
    assert rank.outcomes() == ["failed", "committed"]
    averager = rank.averager
    assert (averager.num_committed, averager.num_retried, averager.num_skipped) == (1, 1, 0)


def test_a_round_of_which_nobody_says_anything_has_failed_and_is_skipped(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averager_module, "RETRY_WAIT_S", 0.01)
    train(rank, until=PERIOD)
    assert rank.value == OLD
    assert rank.outcomes() == ["failed", "skipped"]
    assert counted(rank) == {"failed": 1, "skipped": 1}


@pytest.mark.parametrize(("is_success", "outcomes"), [(True, ["committed"]), (False, ["failed", "skipped"])])
def test_the_end_of_the_job_tells_what_became_of_its_last_round(
    rank: LoneRank, is_success: bool, outcomes: list[str]
) -> None:
    train(rank, until=PERIOD - 1)
    rank.when_waiting(lambda: rank.averager.stop(Stop(is_success, "told by the test")))
    rank.averager.finish()
    assert rank.outcomes() == outcomes
    assert rank.value == (RESULT if is_success else OLD)


def test_an_end_that_was_agreed_in_a_round_in_doubt_is_everybodys(rank: LoneRank) -> None:
    """The other rank has had the last round of all: who learns that it took it has had it too."""
    rank.engine.is_other_ending = True
    theirs = opening(rank, PERIOD + 1, is_taken=True)
    rank.when_waiting(lambda: rank.follow(theirs=theirs))
    train(rank, until=PERIOD)
    assert rank.outcomes() == ["committed"]
    assert rank.averager.is_ended
    rank.averager.finish()
    assert rank.averager.step_count == PERIOD, "it would be another step and another model than the others'"


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_fence_leaves_a_round_in_doubt_until_others_can_be_asked(rank: LoneRank, is_taken: bool) -> None:
    """All were taken out at once while they lived. Who comes back hears what became of the round."""
    theirs = opening(rank, PERIOD + 1, is_taken=is_taken, worked=1)
    values: list[float] = []
    told_before: list[str] = []
    rank.on_entered = lambda _: values.append(rank.value)

    def go_and_come_back() -> None:
        rank.averager.fence()
        wait_for("it is out", lambda: not rank.averager._holds_model)
        told_before.extend(rank.outcomes())
        rank.follow(theirs=theirs, incarnations=("a2", "b2"))

    rank.when_waiting(go_and_come_back)
    train(rank, until=PERIOD + 1)
    assert values == [RESULT if is_taken else OLD]
    assert told_before == [], "nobody knew yet what became of it"
    # The second is the one with which the next generation begins.
    assert rank.outcomes() == ["committed" if is_taken else "failed", "committed"]
    assert rank.entered == {1: 1, 2: PERIOD + 1}
