"""A round's store: what torch's agent is told when the round ends under it."""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from elastic_hieravg.rendezvous.round_store import ASSIGNED_RANKS, ROLE_INFO, RoundStore, cut_connections

PATIENCE_S = 60.0
ROLE = {"role": "default", "rank": 0, "local_world_size": 2}


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def opened(server: TCPStore, *, rank: int = 0, is_over: bool = True) -> RoundStore:
    timeout = timedelta(seconds=PATIENCE_S)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return RoundStore(client, rank=rank, world_size=3, await_end=lambda: is_over)


def test_it_is_a_store_like_any_other(server: TCPStore) -> None:
    store = opened(server)
    store.set("a", "1")
    assert store.get("a") == b"1"
    store.multi_set(["b", "c"], ["2", "3"])
    assert store.multi_get(["a", "b", "c"]) == [b"1", b"2", b"3"]
    assert store.add("n", 2) == 2
    assert store.check(["a", "b"])
    assert not store.check(["missing"])
    assert store.compare_set("a", "1", "4") == b"4"
    store.wait(["a"], timedelta(seconds=PATIENCE_S))
    assert store.delete_key("a")
    assert store.num_keys() >= 3


def cut_while(store: RoundStore, server: TCPStore, call: Any) -> list[Any]:
    """What a call that waits for somebody who never comes ends with, when the round is cut."""
    found: list[Any] = []

    def wait() -> None:
        try:
            found.append(call())
        except (RuntimeError, KeyError) as exc:
            found.append(exc)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    # Cut as often as it takes: the first one may come before the call has begun to wait.
    for _ in range(int(PATIENCE_S / 0.1)):
        cut_connections("127.0.0.1", server.port)
        waiting.join(0.1)
        if not waiting.is_alive():
            return found
    raise AssertionError("the call still waits")


def test_a_wait_for_a_lost_nodes_role_ends_with_one_like_this_nodes(server: TCPStore) -> None:
    store = opened(server)
    store.set(f"{ROLE_INFO}0", json.dumps(ROLE))
    (roles,) = cut_while(store, server, lambda: store.multi_get([f"{ROLE_INFO}{rank}" for rank in range(3)]))
    assert [json.loads(role) for role in roles] == [{**ROLE, "rank": rank} for rank in range(3)]


def test_a_wait_for_ranks_from_a_lost_rank_0_ends_with_ranks_of_a_uniform_world(server: TCPStore) -> None:
    store = opened(server, rank=2)
    store.set(f"{ROLE_INFO}2", json.dumps({**ROLE, "rank": 2}))
    (ranks,) = cut_while(store, server, lambda: store.get(f"{ASSIGNED_RANKS}2"))
    assert json.loads(ranks) == [4, 6, 4, 6]


def test_other_keys_are_not_made_up(server: TCPStore) -> None:
    store = opened(server)
    store.set(f"{ROLE_INFO}0", json.dumps(ROLE))
    (error,) = cut_while(store, server, lambda: store.get("something else"))
    assert isinstance(error, KeyError)


def test_an_error_in_a_round_that_goes_on_is_an_error(server: TCPStore) -> None:
    store = opened(server, is_over=False)
    store.set(f"{ROLE_INFO}0", json.dumps(ROLE))
    (error,) = cut_while(store, server, lambda: store.get(f"{ROLE_INFO}1"))
    assert isinstance(error, RuntimeError)


def test_cutting_leaves_everybody_elses_connections_alone(server: TCPStore) -> None:
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = opened(other)
    cut_connections("127.0.0.1", server.port)
    cut_connections("nowhere.invalid", other.port)
    store.set("a", "1")
    assert store.get("a") == b"1"
