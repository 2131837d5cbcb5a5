"""Optimizer state that comes to a newcomer, over real processes: bitwise what it should be."""

import contextlib
import copy
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.optim import Optimizer

from elastic_hieravg.averaging.flat import FlatModel
from elastic_hieravg.averaging.rounds import AveragingGroup
from elastic_hieravg.errors import HierAvgError, ParametersError
from elastic_hieravg.membership.embedded import EmbeddedKeyValue, EmbeddedServer
from elastic_hieravg.rendezvous.group_store import GroupStore
from elastic_hieravg.worker.optimizer_state import (
    StateTaken,
    bring_state,
    copy_state,
    parameters_of,
    take_state,
)
from tests.averaging.ranks import Died, Rank, Ranks
from tests.averaging.test_averager import answers_of

NEWCOMER = 1
WORLD = 3
NUM_STEPS = 4
CUT_AFTER_S = 0.2
State = dict[str, Any]


class Net(nn.Module):
    """`frozen` never has a gradient; `rare` has one on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.linear = nn.Linear(4, 5)
        self.frozen = nn.Parameter(torch.ones(3))
        self.rare = nn.Parameter(torch.ones(2))

    def forward(self, images: Tensor, *, with_rare: bool) -> Tensor:
        found: Tensor = self.linear(self.conv(images).mean((2, 3))).square().sum()
        return found + (self.rare * images.mean()).sum() if with_rare else found


def two_groups(net: Net) -> Optimizer:
    own: dict[str, Any] = {"params": [net.rare, net.frozen], "lr": 0.5, "betas": (0.5, 0.7)}
    rest: dict[str, Any] = {"params": [*net.conv.parameters(), *net.linear.parameters()]}
    return torch.optim.AdamW([rest, own], lr=0.01, amsgrad=True)


MAKERS: dict[str, Callable[[Net], Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
    "adam in double": lambda net: torch.optim.Adam(net.double().parameters(), lr=0.01),
    "adam, lr a tensor": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1), foreach=False),
    "adamw in two groups": two_groups,
    "nadam": lambda net: torch.optim.NAdam(net.parameters(), lr=0.01),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.01),
    "lbfgs": lambda net: torch.optim.LBFGS(net.linear.parameters(), max_iter=2, history_size=2),
}


def train(net: Net, optimizer: Optimizer, seed: int, *, num_steps: int = NUM_STEPS) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = net.linear.weight.dtype
    for _ in range(num_steps):
        images = torch.randn(6, 3, 4, 4, generator=generator).to(dtype)

        def closure(images: Tensor = images) -> float:
            optimizer.zero_grad()
            loss: Tensor = net(images, with_rare=seed == 0)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        optimizer.step(closure)


def state_of(optimizer: Optimizer) -> State:
    state: State = copy.deepcopy(optimizer.state_dict())
    return state


def travel(
    rank: Rank,
    port: int,
    optimizer: Optimizer | None,
    *,
    step: int,
    sources: list[int],
    on_build: Callable[[], None] = lambda: None,
    on_built: Callable[[AveragingGroup], None] = lambda _: None,
) -> StateTaken | None:
    with contextlib.closing(EmbeddedKeyValue("127.0.0.1", port, run_id="groups")) as kv:
        store = GroupStore(kv, f"/{rank.scope}/")
        copied = copy_state(optimizer, step=step) if rank.rank in sources else None

        def build(flat: FlatModel) -> AveragingGroup:
            on_build()
            return AveragingGroup(
                flat,
                PrefixStore("beside", store),
                level="global",
                index=rank.rank,
                peers=rank.peers("a", "a", "b"),
            )

        taken = bring_state(
            copied,
            store=store,
            rank=rank.rank,
            sources=sources,
            partners=range(rank.world_size),
            parameters=parameters_of(optimizer) if optimizer else [],
            build=build,
            on_built=on_built,
        )
    assert (taken is None) == (rank.rank in sources)
    return taken


def brought(
    rank: Rank, port: int, name: str, sources: list[int], newcomer_steps: int
) -> tuple[State, State, float]:
    """The optimizer's state before and after; rank 2 is a step ahead of rank 0, and all enter at step 7."""
    net = Net()
    optimizer = MAKERS[name](net)
    num_steps = NUM_STEPS + (rank.rank == 2) if rank.rank in sources else newcomer_steps
    train(net, optimizer, rank.rank, num_steps=num_steps)
    if rank.rank in sources:
        optimizer.param_groups[0]["weight_decay"] = 0.25 + rank.rank
    before = state_of(optimizer)
    taken = travel(rank, port, optimizer, step=num_steps, sources=sources)
    if taken is not None:
        take_state(optimizer, taken, step=7)
    after = state_of(optimizer)
    # A newcomer goes on with it as if it had always been there.
    train(net, optimizer, rank.rank, num_steps=1)
    return before, after, float(sum(each.sum() for each in net.parameters()))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = EmbeddedServer("127.0.0.1", 0, run_id="groups")
    yield server.port
    server.close()


def check(new: State, low: State, high: State) -> None:
    """What a newcomer has to have if the holders' states are these, of steps 4 and 5, and it enters at 7."""
    assert str(new["param_groups"]) == str(low["param_groups"])
    assert new["state"].keys() == low["state"].keys() | high["state"].keys()
    for index, entries in new["state"].items():
        sources = [each["state"][index] for each in (low, high) if index in each["state"]]
        assert entries.keys() == sources[0].keys()
        for name, value in entries.items():
            olds = [source[name] for source in sources]
            assert (value.shape, value.dtype) == (olds[0].shape, olds[0].dtype)
            if name == "step":
                # Whoever has a step less copied a step earlier.
                ahead = {id(low): 3, id(high): 2}
                reached = [
                    each["state"][index][name] + ahead[id(each)]
                    for each in (low, high)
                    if index in each["state"]
                ]
                assert torch.equal(value, max(reached))
            elif len(olds) == 1:
                assert torch.equal(value, olds[0])
            else:
                assert torch.equal(value, (olds[0] + olds[1]) / 2)
                assert value.stride() == olds[0].stride()


@pytest.mark.parametrize("newcomer_steps", [0, 2])
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "lbfgs"])
def test_a_newcomer_has_the_mean_of_the_moments_and_the_holders_step(
    ranks: Ranks, port: int, name: str, newcomer_steps: int
) -> None:
    answers = answers_of(ranks.call(brought, port, name, [0, 2], newcomer_steps, world_size=WORLD))
    (low, low_after, _), (_, new, total), (high, high_after, _) = answers
    check(new, low, high)
    # Whoever holds the model keeps its own state.
    assert str((low, high)) == str((low_after, high_after))
    assert math.isfinite(total), "the newcomer's next step spoilt its model"
    if "adam" in name:
        # Frozen on all ranks, and rare on rank 0 only.
        assert len(new["state"]) == len(high["state"]) + 1 == 5


def test_state_that_cannot_travel_stays_behind_whole(ranks: Ranks, port: int) -> None:
    answers = answers_of(ranks.call(brought, port, "lbfgs", [0, 2], 0, world_size=WORLD))
    assert answers[0][0]["state"], "there is state that could have gone along"
    assert not answers[NEWCOMER][1]["state"]


def test_when_the_job_starts_everybody_has_the_lowest_ranks_optimizer(ranks: Ranks, port: int) -> None:
    answers = answers_of(ranks.call(brought, port, "adam", [0], 1, world_size=WORLD))
    (low, _, _), (_, second, _), (_, third, _) = answers
    assert str(second) == str(third)
    assert second["state"][2]["step"] == low["state"][2]["step"] + 3
    assert torch.equal(second["state"][2]["exp_avg"], low["state"][2]["exp_avg"])


def spoilt(rank: Rank, port: int) -> list[float]:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.full((4,), float("nan") if rank.rank == 2 else 3.0)
    optimizer.step()
    taken = travel(rank, port, optimizer, step=1, sources=[0, 2])
    if taken is not None:
        take_state(optimizer, taken, step=1)
    found: list[float] = optimizer.state[parameter]["momentum_buffer"].tolist()
    return found


def test_state_that_is_not_finite_does_not_count(ranks: Ranks, port: int) -> None:
    answers = answers_of(ranks.call(spoilt, port, world_size=WORLD))
    assert answers[NEWCOMER] == answers[0] == [3.0] * 4


def unlike(rank: Rank, port: int, kind: str) -> str:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    if kind == "groups" and rank.rank == NEWCOMER:
        optimizer = torch.optim.Adam([{"params": [each]} for each in parameters])
    else:
        optimizer = torch.optim.Adam(parameters[: 1 if kind == "parameters" and rank.rank == NEWCOMER else 2])
    for each in parameters:
        each.grad = torch.ones(2)
    optimizer.step()
    taken = travel(rank, port, optimizer, step=1, sources=[0, 2])
    try:
        if taken is not None:
            take_state(optimizer, taken, step=1)
    except ParametersError as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize("kind", ["groups", "parameters"])
def test_another_optimizer_is_an_error_for_the_newcomer_only(ranks: Ranks, port: int, kind: str) -> None:
    answers = answers_of(ranks.call(unlike, port, kind, world_size=WORLD))
    assert answers[0] == answers[2] == ""
    assert "on other ranks" in answers[NEWCOMER]
    assert "hint: make the same optimizer" in answers[NEWCOMER]


def without(rank: Rank, port: int) -> bool:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = None if rank.rank == 0 else torch.optim.Adam([parameter])
    taken = travel(rank, port, optimizer, step=1, sources=[0, 2] if rank.world_size == 3 else [0])
    take_state(optimizer, taken or StateTaken(), step=1)
    return True


def test_holders_without_an_optimizer_have_nothing_to_give(ranks: Ranks, port: int) -> None:
    assert answers_of(ranks.call(without, port, world_size=2)) == [True] * 2


def dying(rank: Rank, port: int) -> tuple[str, float]:
    """Rank 2 dies after it has told what state it has."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()

    def die(_: AveragingGroup) -> None:
        if rank.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    started_s = time.monotonic()
    try:
        travel(rank, port, optimizer, step=1, sources=[0, 2], on_built=die)
    except HierAvgError as exc:
        return type(exc).__name__, time.monotonic() - started_s
    return "", 0.0


def test_a_holder_that_dies_on_the_way_ends_it_for_all(ranks: Ranks, port: int) -> None:
    *others, died = ranks.call(dying, port, world_size=WORLD)
    assert died == Died(-signal.SIGKILL)
    for name, seconds in answers_of(others):
        assert name == "PeerLostError"
        assert seconds < 30


def cut(rank: Rank, port: int) -> str:
    """Rank 0 takes no part in the round, until the others are told that nobody needs it any more."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()

    def cut_it(group: AveragingGroup) -> None:
        group.cut()
        rank.store("cut").set(str(rank.rank), "")

    def stop(group: AveragingGroup) -> None:
        if rank.rank == 0:
            rank.store("cut").wait(["1", "2"])
            group.cut()
        else:
            threading.Timer(CUT_AFTER_S, cut_it, [group]).start()

    try:
        travel(rank, port, optimizer, step=1, sources=[0, 2], on_built=stop)
    except HierAvgError as exc:
        return type(exc).__name__
    return ""


def test_the_way_can_be_cut_from_another_thread(ranks: Ranks, port: int) -> None:
    assert answers_of(ranks.call(cut, port, world_size=WORLD)) == ["PeerLostError"] * WORLD
