"""Many calls and many models: nothing is left behind, nothing is kept alive, and failures are shared."""

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from elastic_hieravg import compat
from elastic_hieravg.compat import engine
from tests.averaging.ranks import Died, Rank, Ranks
from tests.compat.worlds import answers_of, error_of, filled, values, world

# A round in flight elsewhere in the process (gloo's, the allocator's) may add or drop one.
SLACK = 2


def held() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": threading.active_count() + len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def many_calls(rank: Rank) -> tuple[dict[str, int], dict[str, int]]:
    with world(rank):
        model = net()
        averager = compat.PeriodicModelAverager(period=2)
        for _ in range(4):
            averager.average_parameters(model.parameters())
        before = held()
        for step in range(400):
            for index, parameter in enumerate(model.parameters()):
                # Now and then another choice of parameters, and now and then none that all agree on.
                has_gradient = index != step % 7 and (step % 5 or rank.rank)
                parameter.grad = torch.ones_like(parameter) if has_gradient else None
            averager.average_parameters(model.parameters())
        assert averager.step == 404
        return before, held()


def many_models(rank: Rank, are_kept: bool) -> tuple[dict[str, int], dict[str, int], int, int]:
    """20 models one after the other, kept or dropped, with as many as fit before."""
    with world(rank) as group:
        kept: list[nn.Module] = []
        references = []

        def use(count: int) -> None:
            for _ in range(count):
                model = net()
                compat.average_parameters(model.parameters(), None)
                compat.average_parameters(model.parameters(), None)
                references.append(weakref.ref(model[0].weight))  # type: ignore[index]
                if are_kept:
                    kept.append(model)

        use(engine.LISTS_KEPT_MAX if are_kept else 1)
        before = held()
        use(20)
        # Shared memory stays with the models that live in it.
        after = held()
        num_alive = sum(reference() is not None for reference in references)
        return before, after, num_alive, len(engine._ENGINES[group]._known)


def test_two_hundred_rounds_leave_nothing_behind(ranks: Ranks) -> None:
    for before, after in answers_of(ranks, many_calls, world_size=2):
        assert all(after[name] <= before[name] + SLACK for name in before), (before, after)


def test_models_that_are_gone_are_not_kept_alive(ranks: Ranks) -> None:
    for before, after, num_alive, num_known in answers_of(ranks, many_models, False, world_size=2):
        assert all(after[name] <= before[name] + SLACK for name in before), (before, after)
        # The last one is still held by the frame that made it.
        assert num_alive <= 1
        assert num_known <= 1


def test_many_models_that_live_share_a_bounded_number_of_connections(ranks: Ranks) -> None:
    for before, after, num_alive, num_known in answers_of(ranks, many_models, True, world_size=2):
        assert after["threads"] <= before["threads"] + SLACK
        # One mapping for each living model, with its descriptor: its parameters.
        assert after["descriptors"] <= before["descriptors"] + 20 + SLACK
        assert after["mappings"] <= before["mappings"] + 20 + SLACK
        assert (num_alive, num_known) == (20 + engine.LISTS_KEPT_MAX, engine.LISTS_KEPT_MAX)


def after_the_world(rank: Rank) -> tuple[dict[str, int], dict[str, int]]:
    before: dict[str, int] = {}
    for life in range(4):
        with world(rank, f"life {life}"):
            model = net()
            compat.average_parameters(model.parameters(), None)
            compat.average_parameters(model.parameters(), dist.new_group(list(range(rank.world_size))))
        before = before or held()
    return before, held()


def test_a_process_group_that_is_gone_leaves_nothing(ranks: Ranks) -> None:
    for before, after in answers_of(ranks, after_the_world, world_size=2):
        assert all(after[name] <= before[name] + SLACK for name in before), (before, after)


def converted(rank: Rank) -> list[torch.dtype]:
    with world(rank):
        model = net()
        compat.average_parameters(model.parameters(), None)
        found = []
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            model.to(dtype)
            for parameter in model.parameters():
                parameter.data.fill_(float(rank.rank))
            compat.average_parameters(model.parameters(), None)
            assert all(bool((parameter == 0.5).all()) for parameter in model.parameters())
            found.append(next(model.parameters()).dtype)
        return found


def test_a_model_may_change_its_type_between_rounds(ranks: Ranks) -> None:
    for found in answers_of(ranks, converted, world_size=2):
        assert found == [torch.float64, torch.bfloat16, torch.float32]


def forgotten_by_one(rank: Rank) -> list[float]:
    """One rank has forgotten the model: all connect anew."""
    with world(rank) as group:
        parameter = filled(rank.rank)
        found = []
        for _ in range(3):
            parameter.data.fill_(float(rank.rank))
            compat.average_parameters(iter([parameter]), None)
            found.append(float(parameter.detach()[0]))
            if rank.rank == 1:
                mine = engine._ENGINES[group]
                mine._forget(next(iter(mine._known)))
        return found


def test_ranks_that_remember_different_models_average_all_the_same(ranks: Ranks) -> None:
    for found in answers_of(ranks, forgotten_by_one, world_size=3):
        assert found == [1.0] * 3


def not_the_same_model(rank: Rank) -> tuple[str, str, list[Tensor], float]:
    with world(rank):
        parameters = [filled(rank.rank), filled(rank.rank, size=(6 if rank.rank == 1 else 5,))]
        name, text, _ = error_of(lambda: compat.average_parameters(iter(parameters), None))
        unchanged = values(parameters)
        # The ranks failed together and go on together.
        good = filled(rank.rank)
        compat.average_parameters(iter([good]), None)
        return name, text, unchanged, float(good.detach()[0])


def test_ranks_with_different_models_get_an_error_and_go_on(ranks: Ranks) -> None:
    for rank, (name, text, unchanged, good) in enumerate(answers_of(ranks, not_the_same_model, world_size=3)):
        assert name == "DifferentTensorsError"
        assert "the first difference is parameter 1" in text
        assert all(bool((tensor == rank).all()) for tensor in unchanged)
        assert good == 1.0


def one_cannot(rank: Rank) -> tuple[str, float]:
    with world(rank):
        parameter = filled(rank.rank)
        odd: Any = torch.empty(5, device="meta") if rank.rank == 1 else parameter
        _, text, _ = error_of(lambda: compat.average_parameters(iter([odd]), None))
        compat.average_parameters(iter([parameter]), None)
        return text, float(parameter.detach()[0])


def test_a_model_that_cannot_be_averaged_on_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    answers = answers_of(ranks, one_cannot, world_size=3)
    for rank, (text, mean) in enumerate(answers):
        expected = "has no values yet" if rank == 1 else "the parameters of rank 1 cannot be averaged"
        assert expected in text
        assert mean == 1.0


def not_finite(rank: Rank) -> list[Tensor]:
    with world(rank):
        parameter = filled(float("nan") if rank.rank == 1 else rank.rank)
        compat.average_parameters(iter([parameter]), None)
        return values([parameter])


def test_a_rank_that_is_not_finite_is_healed_where_torch_spreads_it(ranks: Ranks) -> None:
    for (parameter,) in answers_of(ranks, not_finite, world_size=3):
        assert torch.equal(parameter, torch.ones(5))


def one_dies(rank: Rank) -> tuple[list[tuple[str, str]], list[Tensor]]:
    dist.init_process_group("gloo", store=rank.store("w"), rank=rank.rank, world_size=rank.world_size)
    parameter = filled(rank.rank)
    compat.average_parameters(iter([parameter]), None)
    if rank.rank == 1:
        os._exit(7)
    parameter.data.fill_(float(rank.rank))
    errors = [error_of(lambda: compat.average_parameters(iter([parameter]), None)) for _ in range(2)]
    dist.destroy_process_group()
    return [(name, text) for name, text, _ in errors], values([parameter])


def test_a_rank_that_dies_is_an_error_with_every_parameter_as_it_was(ranks: Ranks) -> None:
    first, second, third = ranks.call(one_dies, world_size=3)
    assert second == Died(7)
    for rank, (errors, (parameter,)) in ((0, first), (2, third)):
        assert [name for name, _ in errors] == ["PeerLostError"] * 2
        assert "an averaging in it failed before" in errors[1][1]
        assert bool((parameter == rank).all())


def outside(rank: Rank) -> tuple[float, float]:
    with world(rank):
        pair, alone = dist.new_group([0, 1]), dist.new_group([rank.rank], use_local_synchronization=True)
        parameter = filled(rank.rank)
        compat.average_parameters(iter([parameter]), alone)
        own = float(parameter.detach()[0])
        compat.average_parameters(iter([parameter]), pair)
        return own, float(parameter.detach()[0])


@pytest.mark.parametrize("world_size", [3])
def test_outsiders_and_loners_keep_what_they_have(ranks: Ranks, world_size: int) -> None:
    for rank, found in enumerate(answers_of(ranks, outside, world_size=world_size)):
        assert found == (rank, 0.5 if rank < 2 else rank)
