"""Errors as people read them: everything found, up to a bound."""

import pytest

from elastic_hieravg.errors import PROBLEMS_SHOWN_MAX, InputError, Problem


def numbered(count: int) -> list[Problem]:
    return [Problem(f"problem {index}", f"hint {index}") for index in range(1, count + 1)]


def test_one_problem_is_told_with_its_hint() -> None:
    assert str(InputError(*numbered(1))) == "problem 1\n\nhint: hint 1"


@pytest.mark.parametrize(
    ("count", "ending"),
    [
        (2, "2. problem 2\n\nhint: hint 2"),
        (
            PROBLEMS_SHOWN_MAX,
            f"{PROBLEMS_SHOWN_MAX}. problem {PROBLEMS_SHOWN_MAX}\n\nhint: hint {PROBLEMS_SHOWN_MAX}",
        ),
        (PROBLEMS_SHOWN_MAX + 3, f"hint: hint {PROBLEMS_SHOWN_MAX}\n\n... and 3 more"),
    ],
)
def test_many_problems_are_counted_and_the_last_ones_left_out(count: int, ending: str) -> None:
    error = InputError(*numbered(count))
    assert str(error).startswith(f"{count} problems\n\n1. problem 1\n\nhint: hint 1")
    assert str(error).endswith(ending)
    assert str(error).count("hint: ") == min(count, PROBLEMS_SHOWN_MAX)
    assert len(error.problems) == count


def test_an_error_names_a_problem() -> None:
    with pytest.raises(AssertionError, match="at least one problem"):
        InputError()
