"""A thousand simulated runs that keep every promise, and broken protocols that do not.

`make soak` runs more, from a random seed: `RUNS=20000 SEED=7 pytest tests/membership/test_simulation.py`.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic_hieravg.membership import decisions, member, mirror, opening, proposing
from elastic_hieravg.membership.decisions import Policy, View
from elastic_hieravg.membership.kv import Write
from elastic_hieravg.membership.records import Generation, Kind, Mode
from elastic_hieravg.plan import difference
from tests.membership import nemesis, simulated_ranks
from tests.membership.nemesis import run
from tests.membership.simulation import Story, ViolationError

FIRST_SEED = int(os.environ.get("SEED", "0"))
NUM_SMALL = int(os.environ.get("RUNS", "1000"))
NUM_LARGE = 50
LARGE = 50
BATCH = 100
# A broken protocol is found by one of so many runs.
MUTANT_RUNS = 400


def settings_of(seed: int) -> dict[str, Any]:
    """Three to eight agents, every fourth run under restart membership."""
    return {"num_agents": 3 + seed % 6, "mode": Mode.RESTART if seed % 4 == 0 else Mode.IN_PLACE}


def check(stories: Sequence[Story]) -> Counter[str]:
    """Every run had a fault; all of them together, counted by kind."""
    for story in stories:
        assert sum(story.faults.values()) > 0, "a run without a fault shows nothing"
    return sum((story.faults for story in stories), Counter())


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SMALL, BATCH))
def test_small_clusters_keep_every_promise(first: int) -> None:
    stories = [run(seed, **settings_of(seed)) for seed in range(first, first + BATCH)]
    faults = check(stories)
    kinds = {method.__name__ for method in nemesis.KINDS} | {
        "header missed",
        "opening missed",
        nemesis.FENCED_WRITING,
    }
    assert faults.keys() == kinds, kinds - faults.keys()
    assert {kind for story in stories for kind in story.generations} == set(Kind)
    assert sum(story.entered_together for story in stories) > 100
    assert sum(story.fenced for story in stories) > 20
    assert sum(story.rounds for story in stories) > 1000


def test_large_clusters_keep_every_promise() -> None:
    stories = [
        run(seed, num_agents=LARGE, mode=Mode.RESTART if seed % 4 == 0 else Mode.IN_PLACE)
        for seed in range(FIRST_SEED, FIRST_SEED + NUM_LARGE)
    ]
    check(stories)
    assert sum(story.rounds for story in stories) > LARGE


def test_a_seed_tells_the_same_story_again() -> None:
    assert run(7, **settings_of(7)) == run(7, **settings_of(7))
    assert run(7, **settings_of(7)).log != run(13, **settings_of(13)).log


def test_a_failing_run_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemesis, "HEALED_S", 0.0)
    monkeypatch.setattr(nemesis, "_disagreement", lambda _: "never satisfied")
    with pytest.raises(ViolationError, match="never satisfied") as failed:
        run(5, num_agents=3)
    assert "replay: tests.membership.nemesis.run(5, num_agents=3, mode=Mode.IN_PLACE)" in str(failed.value)


# --- broken protocols -----------------------------------------------------------------------------------------


def write_without_comparing(write: Write, mirrored: mirror.Mirror) -> Write:
    guards = {key: each for key, each in write.guards.items() if key != mirrored.keys.generation}
    return replace(write, guards=guards)


def break_compare_and_set(patch: pytest.MonkeyPatch) -> None:
    """The generation is written without looking whether somebody wrote one since."""
    real = proposing.generation_write
    patch.setattr(
        member,
        "generation_write",
        lambda mirrored, proposal, **others: write_without_comparing(
            real(mirrored, proposal, **others), mirrored
        ),
    )


def break_fence(patch: pytest.MonkeyPatch) -> None:
    """A node that is out writes all the same."""
    real = proposing.guards_of

    def without_own(mirrored: mirror.Mirror, *keys: str) -> dict[str, int]:
        return {key: each for key, each in real(mirrored, *keys).items() if "/nodes/" not in key}

    patch.setattr(proposing, "guards_of", without_own)


def break_counter(patch: pytest.MonkeyPatch) -> None:
    """Numbers are taken from the store alone, so they begin again when it forgets."""
    patch.setattr(
        proposing,
        "next_number",
        lambda mirrored: 1 + (mirrored.generation.number if mirrored.generation else 0),
    )


def break_rebuilding(patch: pytest.MonkeyPatch) -> None:
    """A group is kept because its members are the same, though it was reported broken."""
    real = difference
    patch.setattr(
        proposing, "difference", lambda before, after, *, keys, broken: real(before, after, keys=keys)
    )


def break_one_growth_at_a_time(patch: pytest.MonkeyPatch) -> None:
    real = decisions._grow

    def impatient(now_s: float, view: View, policy: Policy, generation: Generation) -> object:
        nodes = {
            node_id: replace(live, record=replace(live.record, entered=generation.number))
            for node_id, live in view.nodes.items()
        }
        return real(now_s, replace(view, nodes=nodes), policy, generation)

    patch.setattr(decisions, "_grow", impatient)


def break_refuting(patch: pytest.MonkeyPatch) -> None:
    """The accused does not speak up."""
    patch.setattr(member.Member, "_refute", lambda _: None)


def break_shrinking_alone(patch: pytest.MonkeyPatch) -> None:
    """A loss takes newcomers in with it."""
    real = decisions._shrink

    def greedy(now_s: float, view: View, policy: Policy, generation: Generation) -> object:
        choice = real(now_s, view, policy, generation)
        if isinstance(choice, decisions._Due) and choice.proposal.kind is Kind.LOSS:
            joining = [each for each in decisions._newcomers(view, generation) if each not in (view.lost or {})]
            room = max(0, policy.job.nodes_max - len(choice.proposal.node_ids))
            node_ids = (*choice.proposal.node_ids, *joining[:room])
            hold = "" if len(node_ids) >= policy.job.nodes_min else choice.proposal.hold
            return replace(choice, proposal=replace(choice.proposal, node_ids=node_ids, hold=hold))
        return choice

    patch.setattr(decisions, "_shrink", greedy)


def break_agreeing_on_a_step(patch: pytest.MonkeyPatch) -> None:
    """Everybody enters where it stands, not where all can."""
    real = opening.entry_of
    patch.setattr(
        simulated_ranks,
        "entry_of",
        lambda openings: replace(real(openings), step=min(opening.step for opening in openings)),
    )


def break_waking(patch: pytest.MonkeyPatch) -> None:
    """A rank that waits for somebody who is gone is not woken, and gives no place to wait up."""
    patch.setattr(simulated_ranks, "replaced_keys", lambda *_: [])
    patch.setattr(simulated_ranks, "ROUND_TIMEOUT_S", 1e6)


def break_following_bounds(patch: pytest.MonkeyPatch) -> None:
    """Who runs and must not, or holds and need not, goes on like that."""
    patch.setattr(decisions, "_is_other_hold", lambda *_: False)


@pytest.mark.parametrize(
    ("mutate", "found"),
    [
        (break_compare_and_set, "two plans for generation|is followed by"),
        (break_fence, "was written by a node that is out"),
        (break_counter, "no agreement|goes back to generation|which is well"),
        (break_rebuilding, "no rounds|no agreement"),
        (break_one_growth_at_a_time, "growth while .* is not in generation"),
        (break_refuting, "drops .*, which is well"),
        (break_shrinking_alone, "both shrinks and grows"),
        (break_agreeing_on_a_step, "enters generation .* at step"),
        (break_waking, "no agreement|no rounds"),
        (break_following_bounds, "no agreement"),
    ],
)
def test_a_broken_protocol_is_found(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], found: str
) -> None:
    mutate(monkeypatch)
    for seed in range(MUTANT_RUNS):
        violation = violation_of(seed)
        if violation is not None:
            assert re.search(found, str(violation).splitlines()[0]), violation
            return
    raise AssertionError(f"{MUTANT_RUNS} runs did not find it")


def violation_of(seed: int) -> ViolationError | None:
    try:
        run(seed, **settings_of(seed))
    except ViolationError as violation:
        return violation
    return None
