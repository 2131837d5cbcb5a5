"""What ranks tell each other, and what follows from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_hieravg.averaging.header import Header, Verdict, agree
from elastic_hieravg.plan.hierarchy import LEVELS_MAX

SAMPLES = st.floats(0, 1e12)


def header(samples: float, *, holds_model: bool = True, step: int = 1) -> Header:
    return Header(b"s" * 16, 1, step, 0, holds_model, (samples,))


@pytest.mark.parametrize(
    ("samples", "holders", "nonfinite", "shares"),
    [
        # By samples.
        ((1, 3), (0, 1), (), (0.25, 0.75)),
        ((0, 5), (0, 1), (), (0, 1)),
        # A joiner brings nothing and holds nothing.
        ((2, 2, 0), (0, 1), (), (0.5, 0.5, 0)),
        # Not finite: counts nothing.
        ((1, 1, 2), (0, 1, 2), (2,), (0.5, 0.5, 0)),
        # Nobody trained: those that hold the model count alike.
        ((0, 0, 0), (0, 2), (), (0.5, 0, 0.5)),
        ((0, 0, 0), (0, 2), (0,), (0, 0, 1)),
        # Nobody holds the model: the lowest rank.
        ((0, 0, 0), (), (), (1, 0, 0)),
        # No holder is finite: nobody.
        ((1, 1), (0, 1), (0, 1), (0, 0)),
        ((0, 0), (1,), (1,), (0, 0)),
        # Whoever trained is not finite, another holder is.
        ((4, 0), (0, 1), (0,), (0, 1)),
    ],
)
def test_shares(
    samples: tuple[float, ...], holders: tuple[int, ...], nonfinite: tuple[int, ...], shares: tuple[float, ...]
) -> None:
    headers = [header(count, holds_model=index in holders) for index, count in enumerate(samples)]
    assert agree(headers, nonfinite=nonfinite).shares == shares


def test_a_rank_without_the_model_follows_the_others_steps() -> None:
    ahead = header(0, holds_model=False, step=500)
    assert agree([ahead, header(1, step=30), header(1, step=28)]).step == 30
    # Nobody has the model: who has come farthest.
    assert agree([ahead, header(0, holds_model=False, step=0)]).step == 500


def test_the_largest_step_and_the_mean_of_the_wider_counters_hold_for_all() -> None:
    headers = [
        Header(b"s" * 16, 1, step, 0, True, samples)
        for step, samples in ((7, (1.0, 10.0, 4.0)), (9, (2.0, 30.0, 6.0)))
    ]
    agreement = agree(headers)
    assert agreement.step == 9
    assert agreement.mean_samples == (20.0, 5.0)


@given(
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.booleans(),
    st.lists(SAMPLES, min_size=1, max_size=LEVELS_MAX),
)
def test_headers_round_trip(
    signature: bytes, round_index: int, step: int, holds_model: bool, samples: list[float]
) -> None:
    sent = Header(signature, round_index, step, 3, holds_model, tuple(samples))
    assert Header.decode(sent.encode().ljust(256, b"\0")) == sent


@given(st.booleans(), SAMPLES, SAMPLES)
def test_verdicts_round_trip(is_finite: bool, difference: float, size: float) -> None:
    sent = Verdict(is_finite, difference, size)
    assert Verdict.decode(sent.encode().ljust(256, b"\0")) == sent
