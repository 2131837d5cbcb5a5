"""What a worker counts, against a clock that the tests move."""

import pytest

from elastic_hieravg.errors import DocumentError
from elastic_hieravg.events import Outcome, RoundDone
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.catalogue import CATALOGUE, STEP_BUCKETS, Cause, Kind
from elastic_hieravg.metrics.samples import SERIES_MAX, LastRound, Samples, read_samples
from elastic_hieravg.metrics.tally import Tally


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tally(clock: Clock) -> Tally:
    return Tally(clock=clock, wall=lambda: 1e9, link_of=lambda _, link: f"{link}!")


def taken(tally: Tally) -> Samples:
    return tally.samples(rank=3, generation=2, step=17, state="training", values={"loss": 0.5})


def badput(samples: Samples) -> dict[str, float]:
    return {
        labels[0]: value for (name, labels), value in samples.counters.items() if name == names.BADPUT_SECONDS
    }


def test_every_second_goes_to_one_thing(tally: Tally, clock: Clock) -> None:
    clock.sleep(5.0)
    tally.resume(Cause.START)
    with tally.spending(Cause.AVERAGING):
        with tally.spending(Cause.RENDEZVOUS):
            clock.sleep(3.0)
            tally.round_done(RoundDone("global", 0, Outcome.COMMITTED, seconds=0.5, wait_seconds=0.2))
        clock.sleep(0.25)
    for _ in range(4):
        clock.sleep(1.0)
        tally.step(8)
    clock.sleep(0.5)
    with tally.spending(Cause.QUIET):
        clock.sleep(10.0)
    clock.sleep(0.5)
    tally.step(8)
    samples = taken(tally)
    assert samples.counters[names.PRODUCTIVE_SECONDS, ()] == pytest.approx(5.0)
    assert badput(samples) == pytest.approx(
        {"start": 5.0, "rendezvous": 2.5, "averaging": 0.3 + 0.25, "straggler": 0.2, "quiet": 10.0}
    )
    assert samples.counters[names.PRODUCTIVE_SECONDS, ()] + sum(badput(samples).values()) == pytest.approx(
        clock.now_s - 100.0
    )


def test_steps_and_samples_are_counted(tally: Tally, clock: Clock) -> None:
    for seconds in (0.0005, 0.02, 0.02, 500.0):
        clock.sleep(seconds)
        tally.step(4)
    samples = taken(tally)
    assert samples.counters[names.STEPS, ()] == 4
    assert samples.counters[names.SAMPLES, ()] == 16
    found = samples.distributions[names.STEP_SECONDS, ()]
    assert found.total == pytest.approx(500.0405)
    assert found.counts[0] == 1
    assert found.counts[STEP_BUCKETS.index(0.025)] == 2
    assert found.counts[-1] == 1


def test_a_step_that_takes_exactly_a_bound_is_within_it(tally: Tally, clock: Clock) -> None:
    clock.now_s = 0.0
    tally.resume(Cause.START)
    clock.sleep(0.25)
    tally.step(1)
    assert taken(tally).distributions[names.STEP_SECONDS, ()].counts[STEP_BUCKETS.index(0.25)] == 1


def test_rounds_are_counted_by_level_and_outcome(tally: Tally) -> None:
    tally.round_done(
        RoundDone(
            "zone",
            16,
            Outcome.COMMITTED,
            seconds=0.03,
            wait_seconds=0.01,
            sent_bytes=1000,
            link="network",
            divergence_ratio=0.02,
            num_nonfinite=1,
        )
    )
    tally.round_done(RoundDone("zone", 32, Outcome.FAILED, seconds=2.0))
    tally.round_done(RoundDone("zone", 32, Outcome.SKIPPED))
    samples = taken(tally)
    counters = samples.counters
    assert {labels: n for (name, labels), n in counters.items() if name == names.ROUNDS} == {
        ("zone", "committed"): 1,
        ("zone", "failed"): 1,
        ("zone", "skipped"): 1,
    }
    assert counters[names.COMM_BYTES, ("zone", "network!")] == 1000
    assert counters[names.EXPOSED_SECONDS, ("zone",)] == pytest.approx(2.03)
    assert counters[names.STRAGGLER_SECONDS, ("zone",)] == pytest.approx(0.01)
    assert counters[names.NONFINITE, ()] == 1
    assert samples.gauges[names.DIVERGENCE, ("zone",)] == 0.02
    assert sum(samples.distributions[names.ROUND_SECONDS, ("zone",)].counts) == 1, (
        "failed ones have no duration"
    )
    assert samples.rounds["zone"] == LastRound(32, 0.0, 0, "!", "skipped", 1e9)


def test_a_round_whose_divergence_is_not_known_leaves_what_was_known(tally: Tally) -> None:
    tally.round_done(RoundDone("zone", 16, Outcome.COMMITTED, divergence_ratio=0.02))
    tally.round_done(RoundDone("zone", 32, Outcome.COMMITTED))
    assert taken(tally).gauges[names.DIVERGENCE, ("zone",)] == 0.02


def test_every_outcome_is_there_from_the_first_round_on(tally: Tally) -> None:
    tally.round_done(RoundDone("node", 4, Outcome.COMMITTED))
    found = {labels: n for (name, labels), n in taken(tally).counters.items() if name == names.ROUNDS}
    assert found == {("node", outcome): float(outcome is Outcome.COMMITTED) for outcome in Outcome}


def test_what_is_told_is_what_is_read(tally: Tally, clock: Clock) -> None:
    clock.sleep(0.1)
    tally.step(1)
    tally.round_done(RoundDone("node", 1, Outcome.COMMITTED, seconds=0.1, sent_bytes=5, link="shm"))
    samples = taken(tally)
    assert read_samples(samples.to_json()) == samples


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_told(tally: Tally, value: float) -> None:
    samples = tally.samples(rank=0, generation=0, step=0, state="training", values={"loss": value})
    read = read_samples(samples.to_json())
    assert str(read.gauges[names.USER_VALUE, ("loss",)]) == str(value)


def test_all_that_workers_tell_is_in_the_catalogue(tally: Tally) -> None:
    committed = Outcome.COMMITTED
    tally.round_done(RoundDone("node", 1, committed, sent_bytes=5, link="shm", divergence_ratio=0.1))
    tally.step(1)
    samples = taken(tally)
    told = {name for name, _ in (*samples.counters, *samples.gauges, *samples.distributions)}
    assert told == {metric.name for metric in CATALOGUE if metric.is_of_worker}


@pytest.mark.parametrize(
    "change",
    [
        {"counters": [["hieravg_nonsense_total", [], 1]]},
        {"counters": [["hieravg_goodput_ratio", [], 1]]},
        {"counters": [["hieravg_steps_total", ["0"], 1]]},
        {"counters": [["hieravg_steps_total", [], -1]]},
        {"counters": [["hieravg_steps_total", [], "many"]]},
        {"counters": [["hieravg_samples_total", [], 1]] * (SERIES_MAX + 1)},
        {"counters": 5},
        {"step": None},
        {"distributions": [["hieravg_step_seconds", [], [1, 2], 3.0]]},
        {"rounds": [["node", 1]]},
    ],
)
def test_a_report_that_is_none_is_refused(change: dict[str, object]) -> None:
    import json

    document = json.loads(Samples().to_json()) | change
    with pytest.raises(DocumentError, match="report is not one"):
        read_samples(json.dumps(document))


def test_the_catalogue_keeps_to_the_conventions() -> None:
    for metric in CATALOGUE:
        assert metric.name.startswith("hieravg_")
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.name.endswith("_info") == (metric.kind is Kind.INFO)
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not {"job", "node", "instance", "step", "pid"} & set(metric.labels)
