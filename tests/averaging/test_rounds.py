"""A round against an exact oracle, on real processes, through every way of combining copies."""

import hashlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic_hieravg.averaging.flat import FlatModel
from elastic_hieravg.averaging.rounds import AveragingGroup, Contribution
from elastic_hieravg.events import RoundDone
from tests.averaging.ranks import Raised, Rank, Ranks

# Which node each rank is on: one node, a node each, two and two, three and one.
PLACES = ["aaaa", "abcd", "aabb", "aaab", "aa", "ab"]


def build(rank: Rank, tensors: list[Tensor], places: str) -> AveragingGroup:
    flat = FlatModel([f"tensor {index}" for index in range(len(tensors))], lambda: tensors)
    return AveragingGroup(
        flat,
        rank.store("group"),
        level="global",
        index=rank.rank,
        peers=rank.peers(*places),
        timeout_s=20,
        # A busy machine may take its time to start what is not measured yet.
        build_timeout_s=60,
    )


def values_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (size,), generator=generator).to(dtype)


def average_once(
    rank: Rank, places: str, sizes: tuple[int, ...], dtype: torch.dtype, weights: tuple[float, ...]
) -> tuple[list[Tensor], RoundDone]:
    tensors = [values_of(rank.rank, size, dtype) for size in sizes]
    group = build(rank, tensors, places)
    done, _ = group.run(Contribution(step=1, samples=(weights[rank.rank],)))
    group.close()
    return [tensor.clone() for tensor in tensors], done


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-6),
        (torch.float64, 1e-14),
        (torch.bfloat16, 2**-8),
        (torch.float16, 2**-11),
        (torch.complex64, 1e-6),
    ],
)
def test_the_weighted_mean_is_exact(ranks: Ranks, places: str, dtype: torch.dtype, tolerance: float) -> None:
    sizes, weights = (5, 300_001, 1, 0), (3.0, 0.5, 7.0, 2.0)
    answers = ranks.call(average_once, places, sizes, dtype, weights, world_size=len(places))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = sum(weights[: len(places)])
    for index, size in enumerate(sizes):
        copies = [values_of(rank, size, dtype).to(wide) for rank in range(len(places))]
        mean = sum(
            (weight / total * copy for weight, copy in zip(weights, copies, strict=False)), torch.zeros(size)
        )
        for tensors, _ in answers:
            # Relative to what was summed: where copies cancel, the mean is small and the rounding is not.
            size_of_sum = sum((copy.abs() for copy in copies), torch.zeros(size))
            assert bool(((tensors[index].to(wide) - mean).abs() <= tolerance * size_of_sum + 1e-30).all())
            assert torch.equal(tensors[index], answers[0][0][index])
    assert {done.link for _, done in answers} == {"shm" if set(places) == {"a"} else "network"}


@pytest.mark.parametrize("weights", [(3.0, 0.5, 7.0), (3.0, 0.0, 7.0), (0.0, 0.0, 2.0)])
def test_a_run_of_values_that_takes_many_turns_between_nodes_is_averaged_whole(
    ranks: Ranks, weights: tuple[float, ...]
) -> None:
    num_values = 2_000_003
    answers = ranks.call(average_once, "abc", (num_values,), torch.float32, weights, world_size=3)
    copies = [values_of(rank, num_values, torch.float32) for rank in range(3)]
    expected = sum((weight * copy for weight, copy in zip(weights, copies, strict=True)), torch.zeros(1))
    for (tensor,), _ in answers:
        torch.testing.assert_close(tensor, expected / sum(weights), rtol=1e-5, atol=1e-6)
        assert torch.equal(tensor, answers[0][0][0])


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.bool])
def test_whole_numbers_take_the_maximum_of_those_that_count(
    ranks: Ranks, places: str, dtype: torch.dtype
) -> None:
    weights = (0.0, 1.0, 2.0, 0.0)
    answers = ranks.call(average_once, places, (7, 2000), dtype, weights, world_size=len(places))
    counting = [rank for rank in range(len(places)) if weights[rank]]
    for index, size in enumerate((7, 2000)):
        copies = torch.stack([values_of(rank, size, dtype).to(torch.int64) for rank in counting])
        for tensors, _ in answers:
            assert torch.equal(tensors[index].to(torch.int64), copies.amax(dim=0))


def weight_zero_with_nan(rank: Rank, places: str) -> Tensor:
    tensor = torch.full((1000,), float("nan") if rank.rank == 1 else float(rank.rank))
    group = build(rank, [tensor], places)
    group.run(Contribution(step=1, samples=(0.0 if rank.rank == 1 else 1.0,)))
    group.close()
    return tensor.clone()


@pytest.mark.parametrize("places", PLACES)
def test_weight_zero_contributes_nothing_not_even_nan(ranks: Ranks, places: str) -> None:
    others = [rank for rank in range(len(places)) if rank != 1]
    for tensor in ranks.call(weight_zero_with_nan, places, world_size=len(places)):
        assert torch.allclose(tensor, torch.tensor(sum(others) / len(others)))


def nonfinite(rank: Rank, places: str, guilty: tuple[int, ...]) -> tuple[Tensor, RoundDone, RoundDone]:
    tensor = torch.full((300_000,), float(rank.rank))
    if rank.rank in guilty:
        tensor[123_456] = float("inf") if rank.rank % 2 else float("nan")
    group = build(rank, [tensor], places)
    done, _ = group.run(Contribution(step=1, samples=(1.0,)))
    again, _ = group.run(Contribution(step=2, samples=(1.0,)))
    group.close()
    return tensor.clone(), done, again


@pytest.mark.parametrize("places", PLACES)
def test_a_rank_that_is_not_finite_counts_nothing_and_is_healed(ranks: Ranks, places: str) -> None:
    others = [rank for rank in range(len(places)) if rank != 1]
    for tensor, done, again in ranks.call(nonfinite, places, (1,), world_size=len(places)):
        assert torch.allclose(tensor, torch.tensor(sum(others) / len(others)))
        assert (done.num_nonfinite, again.num_nonfinite) == (1, 0)
        assert done.outcome == "committed"


@pytest.mark.parametrize("places", ["aaaa", "abcd", "aabb"])
def test_if_no_rank_is_finite_the_round_is_skipped_and_nothing_changes(ranks: Ranks, places: str) -> None:
    answers = ranks.call(nonfinite, places, (0, 1, 2, 3), world_size=4)
    for rank, (tensor, done, _) in enumerate(answers):
        assert done.outcome == "skipped"
        assert done.num_nonfinite == 4
        assert bool((tensor[:123_456] == rank).all())


def overflowing(rank: Rank, places: str) -> tuple[Tensor, RoundDone]:
    tensor = torch.full((10,), 3e38 if rank.rank < 2 else -3e38)
    group = build(rank, [tensor], places)
    done, _ = group.run(Contribution(step=1, samples=(1.0,)))
    group.close()
    return tensor.clone(), done


@pytest.mark.parametrize("places", ["aaaa", "abcd", "aabb"])
def test_values_whose_squares_overflow_are_averaged_all_the_same(ranks: Ranks, places: str) -> None:
    for tensor, done in ranks.call(overflowing, places, world_size=4):
        assert (done.outcome, done.num_nonfinite) == ("committed", 0)
        assert torch.equal(tensor, torch.zeros(10))


def nobody_holds(rank: Rank, places: str, holders: tuple[int, ...]) -> Tensor:
    tensor = torch.full((10,), float(rank.rank))
    group = build(rank, [tensor], places)
    group.run(Contribution(step=1, samples=(0.0,), holds_model=rank.rank in holders))
    group.close()
    return tensor.clone()


@pytest.mark.parametrize(("holders", "value"), [((), 0.0), ((2,), 2.0), ((1, 2), 1.5)])
@pytest.mark.parametrize("places", ["aaaa", "abcd", "aabb"])
def test_without_weights_holders_count_and_without_holders_the_lowest_rank(
    ranks: Ranks, places: str, holders: tuple[int, ...], value: float
) -> None:
    for tensor in ranks.call(nobody_holds, places, holders, world_size=4):
        assert torch.equal(tensor, torch.full((10,), value))


def different_sets(rank: Rank, places: str) -> tuple[str, list[Tensor]]:
    tensors = [torch.full((10,), float(rank.rank)), torch.full((5 + (rank.rank == 1),), float(rank.rank))]
    group = build(rank, tensors, places)
    try:
        group.run(Contribution(step=1, samples=(1.0,)))
    except Exception as exc:  # noqa: BLE001 - the test looks at what it is
        group.close()
        return f"{type(exc).__name__}: {exc}", [tensor.clone() for tensor in tensors]
    raise AssertionError("ranks with different tensors averaged them")


@pytest.mark.parametrize("places", ["aaa", "abc", "aab"])
def test_ranks_with_different_tensors_get_an_error_that_names_the_first(ranks: Ranks, places: str) -> None:
    answers = ranks.call(different_sets, places, world_size=3)
    for rank, (error, tensors) in enumerate(answers):
        assert error.startswith(
            "DifferentTensorsError: ranks bring different tensors to a round of level global"
        )
        here, there = ("(6,)", "(5,)") if rank == 1 else ("(5,)", "(6,)")
        other = "rank 0" if rank == 1 else "rank 1"
        assert (
            f"tensor 1 {here} torch.float32 on this rank and tensor 1 {there} torch.float32 on {other}" in error
        )
        assert all(bool((tensor == rank).all()) for tensor in tensors)


def many_rounds(rank: Rank, places: str) -> list[str]:
    torch.manual_seed(rank.rank)
    tensors = [torch.randn(1000), torch.randn(10, 10), torch.randint(0, 9, (3,))]
    group = build(rank, tensors, places)
    checksums = []
    for step in range(20):
        tensors[0].add_(torch.randn(1000))
        group.run(Contribution(step=step, samples=(float(rank.rank + 1),)))
        content = b"".join(bytes(tensor.numpy().tobytes()) for tensor in tensors)
        checksums.append(hashlib.sha256(content).hexdigest())
    group.close()
    return checksums


@pytest.mark.parametrize("places", ["aaaa", "abcd", "aabb", "aaab"])
def test_after_every_round_all_replicas_are_bit_identical(ranks: Ranks, places: str) -> None:
    answers: list[Any] = ranks.call(many_rounds, places, world_size=4)
    assert not any(isinstance(answer, Raised) for answer in answers), answers
    assert answers == [answers[0]] * 4
    assert len(set(answers[0])) == 20


@st.composite
def stories(draw: st.DrawFn) -> tuple[str, list[tuple[list[int], str]], list[float]]:
    """Which node each rank is on, the shapes and types of its tensors, and everybody's weight."""
    places = draw(st.text("abc", min_size=2, max_size=4))
    shape = st.lists(st.integers(0, 40), max_size=3)
    dtype = st.sampled_from(["float32", "float64", "bfloat16", "float16", "int64", "bool", "complex64"])
    tensors = draw(st.lists(st.tuples(shape, dtype), min_size=1, max_size=4))
    weight = st.sampled_from([0.0, 1.0, 2.5, 1e9])
    weights = draw(st.lists(weight, min_size=len(places), max_size=len(places)))
    return places, tensors, weights


def tell(
    rank: Rank, places: str, forms: list[tuple[list[int], str]], weights: list[float]
) -> tuple[list[Tensor], list[Tensor]]:
    tensors = [
        values_of(rank.rank, int(torch.Size(shape).numel()), getattr(torch, dtype)).reshape(shape)
        for shape, dtype in forms
    ]
    before = [tensor.clone() for tensor in tensors]
    group = build(rank, tensors, places)
    group.run(Contribution(step=1, samples=(weights[rank.rank],)))
    group.close()
    return before, [tensor.clone() for tensor in tensors]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories())
def test_any_tensors_groups_and_weights_give_the_exact_mean(
    ranks: Ranks, story: tuple[str, list[tuple[list[int], str]], list[float]]
) -> None:
    places, forms, weights = story
    answers = ranks.call(tell, *story, world_size=len(places))
    counted = weights if any(weights) else [1.0] * len(places)
    for index, (_, dtype) in enumerate(forms):
        copies = [before[index] for before, _ in answers]
        results = [after[index] for _, after in answers]
        assert all(torch.equal(result, results[0]) for result in results)
        live = [(copy, weight) for copy, weight in zip(copies, counted, strict=True) if weight]
        if dtype in ("int64", "bool"):
            wanted = torch.stack([copy.to(torch.int64) for copy, _ in live]).amax(dim=0)
            assert torch.equal(results[0].to(torch.int64), wanted)
        else:
            wide = torch.complex128 if dtype == "complex64" else torch.float64
            exact = sum(copy.to(wide) * weight for copy, weight in live) / sum(counted)
            assert isinstance(exact, Tensor)
            largest = torch.stack([copy.abs().to(torch.float64) for copy, _ in live]).amax(dim=0)
            unit = torch.finfo(getattr(torch, dtype)).eps
            assert bool(((results[0].to(wide) - exact).abs() <= 4 * unit * largest).all())


def drifting(rank: Rank, places: str) -> tuple[float, float]:
    """The mean over the world before and after a global round, in float64."""
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(rank.rank))
    group = build(rank, [tensor], places)
    before = float(tensor.to(torch.float64).sum())
    group.run(Contribution(step=1, samples=(1.0,)))
    group.close()
    return before, float(tensor.to(torch.float64).sum())


@pytest.mark.parametrize("places", PLACES)
def test_a_global_round_preserves_the_mean_over_the_world(ranks: Ranks, places: str) -> None:
    answers = ranks.call(drifting, places, world_size=len(places))
    before = sum(each for each, _ in answers) / len(answers)
    for _, after in answers:
        assert after == pytest.approx(before, abs=1e-3)
