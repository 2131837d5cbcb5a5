"""A rank whose loop ends before the others': its empty steps lead to the same end, and are no work."""

from collections.abc import Iterator

import pytest

from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.catalogue import Cause
from elastic_hieravg.metrics.samples import Samples
from tests.worker.lone_rank import PERIOD, LoneRank, lone_rank

STEP_S = 0.5
AFTER_S = 30.0
NUM_STEPS = 2


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[LoneRank]:
    with lone_rank(monkeypatch, clock=clock) as rank:
        yield rank


def measured(rank: LoneRank) -> Samples:
    return rank.tally.samples(rank=0, generation=0, step=0, state="", values={})


def test_empty_steps_lead_to_the_end_and_are_not_counted_as_work(rank: LoneRank, clock: Clock) -> None:
    began_s = clock.now_s
    rank.tally.begin()
    rank.begin()
    for _ in range(NUM_STEPS - 1):
        clock.now_s += STEP_S
        rank.averager.step(num_samples=8)
    clock.now_s += AFTER_S
    rank.averager.finish()
    # They are there for the way to the last round only.
    assert rank.engine.step_count == PERIOD
    assert rank.averager.step_count == NUM_STEPS
    assert rank.averager.is_ended
    assert rank.outcomes() == ["committed"]
    samples = measured(rank)
    assert samples.counters[names.STEPS, ()] == NUM_STEPS
    assert samples.counters[names.SAMPLES, ()] == 1 + 8
    assert samples.counters[names.PRODUCTIVE_SECONDS, ()] == pytest.approx(STEP_S)
    assert sum(samples.distributions[names.STEP_SECONDS, ()].counts) == NUM_STEPS
    assert samples.counters[names.BADPUT_SECONDS, (Cause.QUIET,)] == pytest.approx(AFTER_S)
    assert clock.now_s - began_s == pytest.approx(STEP_S + AFTER_S)


def test_a_step_over_no_samples_is_a_step(rank: LoneRank) -> None:
    """A script may make one: only those that are made for it at the end are none."""
    rank.begin()
    rank.averager.step(num_samples=0)
    assert measured(rank).counters[names.STEPS, ()] == 2


def test_the_job_s_step_never_goes_back(rank: LoneRank) -> None:
    """The end was agreed, and this loop goes on all the same: what it trained then counts behind it too."""
    rank.engine.is_other_ending = True
    rank.begin()
    while rank.averager.step_count < PERIOD:
        rank.averager.step()
    assert rank.averager.is_ended
    rank.averager.step()
    assert rank.averager.step_count == PERIOD + 1
    rank.averager.finish()
    assert rank.averager.step_count == PERIOD + 1
