"""How ranks agree on the step at which they enter a generation."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_hieravg.errors import DocumentError
from elastic_hieravg.membership.opening import Opening, entry_of, read_opening

names = st.text(min_size=1)
openings = st.builds(
    Opening,
    st.integers(0, 10**9),
    holds_model=st.booleans(),
    wants_round=st.booleans(),
    committed=st.dictionaries(names, st.integers(0, 10**9), max_size=3),
    worked=st.integers(0, 3),
)


@given(opening=openings)
def test_an_opening_goes_there_and_back(opening: Opening) -> None:
    assert read_opening(opening.to_json()) == opening


@pytest.mark.parametrize("text", ["", "{}", "[]", "1", '{"step": 1}'])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(DocumentError):
        read_opening(text)


@pytest.mark.parametrize("committed", ['["x a"]', '["1"]', "[1]", '"1 a"', '["-1 a"]'])
def test_rounds_that_are_none_are_refused(committed: str) -> None:
    text = f'{{"step":1,"worked":0,"holds_model":1,"wants_round":0,"committed":{committed}}}'
    with pytest.raises(DocumentError):
        read_opening(text)


@given(given_openings=st.lists(openings, min_size=1, max_size=6), seed=st.integers())
def test_everybody_comes_to_the_same_entry(given_openings: list[Opening], seed: int) -> None:
    shuffled = random.Random(seed).sample(given_openings, len(given_openings))
    assert entry_of(shuffled) == entry_of(given_openings)


@given(given_openings=st.lists(openings, min_size=1, max_size=6))
def test_nobody_who_holds_the_model_has_passed_the_entry(given_openings: list[Opening]) -> None:
    entry = entry_of(given_openings)
    is_held = any(opening.holds_model and not opening.worked for opening in given_openings)
    holders = [opening for opening in given_openings if opening.holds_model and is_held]
    assert all(opening.step <= entry.step for opening in holders)
    # And nobody waits for longer than it takes the one who is furthest.
    survivors = [opening for opening in given_openings if 0 < opening.worked == entry.owners]
    assert all(opening.step <= entry.step for opening in survivors)
    assert entry.step in [opening.step for opening in holders or survivors or given_openings]
    assert entry.is_ownerless == (not holders)
    assert entry.owners == (0 if holders else max(opening.worked for opening in given_openings))


def test_who_regained_the_model_and_who_has_not_yet_are_alike() -> None:
    """A generation came to nothing after one of two had seen its entry."""
    entry = entry_of([Opening(30, holds_model=True, worked=7), Opening(28, holds_model=False, worked=7)])
    assert (entry.step, entry.owners) == (30, 7)


def test_the_models_of_those_count_who_were_taken_out_last() -> None:
    """One was cut off in generation 4 and has made steps by itself; the others went on to generation 7."""
    stale = Opening(99, holds_model=False, worked=4)
    others = [Opening(20, holds_model=False, worked=7), Opening(22, holds_model=False, worked=7)]
    entry = entry_of([stale, *others, Opening(0, holds_model=False)])
    assert (entry.step, entry.is_ownerless, entry.owners) == (22, True, 7)


@given(given_openings=st.lists(openings, min_size=1, max_size=6))
def test_there_is_a_round_if_anybody_needs_one(given_openings: list[Opening]) -> None:
    needed = any(opening.wants_round or not opening.holds_model for opening in given_openings)
    assert entry_of(given_openings).is_round_wanted == needed


@given(given_openings=st.lists(openings, min_size=1, max_size=6), name=names, number=st.integers(1, 10**9))
def test_a_result_counts_if_anybody_took_it(given_openings: list[Opening], name: str, number: int) -> None:
    taken = any((opening.committed or {}).get(name, 0) >= number for opening in given_openings)
    assert entry_of(given_openings).was_committed(name, number) == taken
