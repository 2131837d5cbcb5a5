"""When a worker hangs: tables and properties of its pulse, without a clock."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_hieravg.agent.hangs import FLOOR_S, LOOK_S, STEPS, AwakeClock, Pulse

seconds = st.floats(0.001, 1000.0)


def test_who_never_reported_does_not_hang() -> None:
    assert not Pulse(1.0).hangs(1e9)


def test_hangs_after_the_time_that_was_asked_for() -> None:
    pulse = Pulse(5.0)
    pulse.report(100.0, step=1, is_excused=False)
    assert not pulse.hangs(105.0)
    assert pulse.hangs(105.1)


def test_the_same_step_again_is_no_progress() -> None:
    pulse = Pulse(5.0)
    for now_s in (100.0, 102.0, 104.0, 106.0):
        pulse.report(now_s, step=1, is_excused=False)
    assert pulse.stands_still_s(106.0) == 6.0
    assert pulse.hangs(106.0)


def test_a_step_is_progress() -> None:
    pulse = Pulse(5.0)
    pulse.report(100.0, step=1, is_excused=False)
    pulse.report(104.0, step=2, is_excused=False)
    assert not pulse.hangs(108.0)


def test_an_excuse_begins_the_time_anew() -> None:
    pulse = Pulse(5.0)
    pulse.report(100.0, step=1, is_excused=False)
    pulse.report(104.0, step=1, is_excused=True)
    pulse.report(107.0, step=1, is_excused=True)
    assert not pulse.hangs(108.0)
    pulse.report(109.0, step=1, is_excused=False)
    assert not pulse.hangs(113.9)
    assert pulse.hangs(114.1)


def test_who_says_nothing_at_all_hangs_with_an_excuse_too() -> None:
    pulse = Pulse(5.0)
    pulse.report(100.0, step=1, is_excused=True)
    assert pulse.hangs(105.1)


@given(step_s=seconds, num_steps=st.integers(1, 100))
def test_own_measure_is_its_slowest_step_many_times_and_never_below_the_floor(
    step_s: float, num_steps: int
) -> None:
    pulse = Pulse()
    for step in range(num_steps + 1):
        pulse.report(step * step_s, step=step, is_excused=False)
    assert pulse.limit_s() >= FLOOR_S
    assert pulse.limit_s() >= 0.99 * STEPS * step_s
    assert not pulse.hangs((num_steps + 0.99 * STEPS) * step_s)
    assert pulse.hangs(num_steps * step_s + 1.01 * max(FLOOR_S, STEPS * step_s) + 0.01)


def test_several_steps_between_two_reports_share_the_time() -> None:
    pulse = Pulse()
    pulse.report(0.0, step=0, is_excused=False)
    pulse.report(100.0, step=20, is_excused=False)
    assert pulse.limit_s() == STEPS * 5.0


@given(gaps=st.lists(seconds, max_size=20))
def test_a_clock_that_slept_counts_little_of_it(gaps: list[float]) -> None:
    clock, now_s, awake_s = AwakeClock(), 0.0, 0.0
    clock.read(now_s)
    for gap_s in gaps:
        now_s, before_s = now_s + gap_s, awake_s
        awake_s = clock.read(now_s)
        assert 0 <= awake_s - before_s <= LOOK_S + 1e-9
