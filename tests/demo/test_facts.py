"""What the demo makes of its workers' lines, and that each promise can be broken."""

import dataclasses

import pytest

from elastic_hieravg.demo.facts import Fault, Kind, Run, broken_promises, find_facts, loss_points, summary
from tests.demo.runs import STEP_S, hurt_run, run_of, worker


def broken(run: Run) -> tuple[str, ...]:
    return broken_promises(find_facts(run))


def test_a_run_in_which_everything_held_has_a_fact_a_line() -> None:
    facts = find_facts(hurt_run())
    assert broken_promises(facts) == ()
    assert summary(facts) == (
        "node killed: a, the others averaged without it after 0.5 s, in again 1.0 s after it was started again",
        "node frozen: b, the others averaged without it after 0.5 s, in again 0.5 s after it was thawed",
        "node joined: c, in 0.7 s after its start",
        "node asked to leave: a, the others averaged without it after 0.5 s",
        "steps lost by survivors: 0",
        "restarts of survivors: 0",
        "replicas identical: yes",
        "global rounds compared: 25",
        "steps lost by the node asked to leave: 0",
        # Two of a's, which had its last round after step 16.
        "steps lost with the killed and the frozen node: 2",
        "longest gap of a survivor: 0.30 s, when a was killed",
        "goodput: 69%",
        "steps: 100",
        "loss at the start: 0.61",
        "loss at the end: 0.04",
        "seconds: 10.5",
    )


def test_a_job_that_nothing_is_done_to_has_all_its_time() -> None:
    facts = find_facts(run_of(worker("a", 1, range(1, 101)), worker("b", 2, range(1, 101))))
    assert facts.goodput_ratio == pytest.approx(0.8, abs=0.01)
    assert facts.gap.seconds == pytest.approx(STEP_S)
    assert not [line for line in summary(facts) if "steps lost" in line and "survivors" not in line]


@pytest.mark.parametrize(
    ("steps", "count"),
    [([1, 2, 3, 5, 6], 1), ([1, 2, 9], 6), ([1, 2, 2, 3], 1), ([4, 5, 1], 5), ([7, 8, 9], 0)],
)
def test_steps_that_are_missing_or_made_twice_are_lost(steps: list[int], count: int) -> None:
    run = run_of(worker("a", 1, steps), worker("b", 2, range(1, 101)))
    assert find_facts(run).num_lost_steps == count
    assert (f"survivors lost or repeated {count} steps" in broken(run)) is bool(count)


def test_a_frozen_node_misses_steps_once_and_nobody_else_does() -> None:
    jumps = worker("a", 1, [1, 2, 3, 40, 41, 42])
    faults = [Fault(Kind.FROZEN, "a", 0.35, 0.5, 0.4, 0.4)]
    other = worker("b", 2, range(1, 43))
    assert find_facts(run_of(jumps, other, faults=faults)).num_lost_steps == 0
    assert find_facts(run_of(jumps, other)).num_lost_steps == 36
    # Not twice, not before, and not because of another node's.
    twice = worker("a", 1, [1, 2, 3, 40, 41, 50])
    assert find_facts(run_of(twice, other, faults=faults)).num_lost_steps == 8
    late = [dataclasses.replace(faults[0], at_s=5.0, healed_s=6.0)]
    assert find_facts(run_of(jumps, other, faults=late)).num_lost_steps == 36
    others = [dataclasses.replace(faults[0], node="b")]
    assert find_facts(run_of(jumps, other, faults=others)).num_lost_steps == 36


def test_workers_that_the_demo_did_not_start_are_restarts() -> None:
    workers = [worker("a", 1, range(1, 9)), worker("a", 2, range(9, 101)), worker("b", 3, range(1, 101))]
    workers[0].end_digest = ""
    assert broken(run_of(*workers)) == ("1 workers of survivors started anew",)
    assert broken(run_of(*workers, starts={"a": 2, "b": 1})) == ()


def test_replicas_have_to_be_alike_after_every_round_and_at_the_end() -> None:
    run = run_of(worker("a", 1, range(1, 101)), worker("b", 2, range(1, 101)))
    assert broken(run) == ()
    wrong = dataclasses.replace(run.workers[1].rounds[4], digest="other")
    run.workers[1].rounds[4] = wrong
    assert broken(run) == ("replicas differ after the round of step 20 in generation 1",)
    assert "replicas identical: no" in summary(find_facts(run))


@pytest.mark.parametrize(
    ("end", "told"), [("other", "at the end"), ("", "at the end: 1 workers of 2 told theirs")]
)
def test_replicas_that_end_differently_or_not_at_all_are_found(end: str, told: str) -> None:
    run = run_of(worker("a", 1, range(1, 101)), worker("b", 2, range(1, 101), end=end))
    assert broken(run) == (f"replicas differ {told}",)


def test_steps_of_a_leaver_that_are_in_no_average_are_lost() -> None:
    leaver = worker("a", 1, range(1, 15), end="")
    fault = Fault(Kind.LEFT, "a", 1.2, 2.0, 1.5)
    run = run_of(leaver, worker("b", 2, range(1, 101)), faults=[fault], exits={"a": 143, "b": 0})
    assert broken(run) == ("2 steps of the node that was asked to leave are in no average",)


def test_exit_codes_are_as_they_should_be() -> None:
    workers = worker("a", 1, range(1, 101)), worker("b", 2, range(1, 101), end="")
    run = run_of(*workers, exits={"a": 0, "b": 1})
    assert broken(run) == ("agents ended with other exit codes than they should: {'b': 1}",)


def test_the_loss_has_to_fall() -> None:
    run = run_of(worker("a", 1, range(1, 3)), worker("b", 2, range(1, 3)))
    assert broken(run) == ("the loss did not fall: 1.67 to 1.67",)


def test_the_longest_gap_is_of_survivors_and_says_what_went_on() -> None:
    waits = worker("a", 1, range(1, 9))
    waits.steps += worker("a", 1, range(9, 17), at_s=3.0).steps
    frozen = worker("b", 2, range(1, 5))
    frozen.steps += worker("b", 2, range(5, 9), at_s=9.0).steps
    faults = [Fault(Kind.FROZEN, "b", 0.45, 9.5, 3.0, 9.0)]
    gap = find_facts(run_of(waits, frozen, faults=faults)).gap
    assert gap.during == "when b was frozen"
    assert gap.seconds == pytest.approx(2.3)
    gap = find_facts(run_of(waits, frozen)).gap
    assert gap.during == ""
    assert gap.seconds == pytest.approx(8.7)


def test_a_loss_is_the_mean_of_all_workers_over_some_steps() -> None:
    points = loss_points([worker("a", 1, range(1, 33)), worker("b", 2, range(1, 33), at_s=1.0)])
    assert [step for _, step, _ in points] == [16, 32]
    assert points[0][0] == pytest.approx(2.6)
    assert points[0][2] == pytest.approx(sum(4.0 / (1 + step) for step in range(1, 17)) / 16)
