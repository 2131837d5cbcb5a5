"""How the workers of an attempt meet at a store that earlier attempts used, and what follows from it."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from elastic_hieravg.config import Asked, RestartPlace, WorkerPlace, read_worker_place
from elastic_hieravg.errors import MembershipError, TopologyError, UsageError
from elastic_hieravg.worker.attempt import Holding, newest, read_holding
from elastic_hieravg.worker.meeting import Attendant, Meeting, attempt_store, check_alike, exchange, meet
from elastic_hieravg.worker.snapshots import Moment

PATIENCE_S = 60.0
ASKED = Asked("node=2,global=8", 0, "repair")


class Meetings:
    """A store that outlives attempts, as torch's agent keeps one, and a client of it for every worker."""

    def __init__(self) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pool = ThreadPoolExecutor(16)

    def client(self) -> Store:
        timeout = timedelta(seconds=PATIENCE_S)
        return TCPStore("127.0.0.1", self.server.port, is_master=False, wait_for_workers=False, timeout=timeout)

    def start(self, me: Attendant, *, world_size: int, timeout_s: float = PATIENCE_S) -> "Future[Meeting]":
        return self._pool.submit(meet, self.client(), me, world_size=world_size, timeout_s=timeout_s)

    def meet_all(self, names: Sequence[str]) -> list[Meeting]:
        futures = [self.start(one(rank, name), world_size=len(names)) for rank, name in enumerate(names)]
        return [future.result(PATIENCE_S) for future in futures]

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def meetings() -> "Meetings":
    return Meetings()


def one(rank: int, name: str, *, seen: int = 0) -> Attendant:
    return Attendant(rank, rank, 0, 1, name, {"host": name}, "127.0.0.1", seen)


def test_all_of_an_attempt_meet_under_a_name_of_their_own(meetings: Meetings) -> None:
    found = meetings.meet_all("abc")
    assert len({meeting.name for meeting in found}) == 1
    assert [each.node_name for each in found[1].attendants] == ["a", "b", "c"]
    meetings.close()


def test_what_earlier_attempts_wrote_is_never_taken(meetings: Meetings) -> None:
    """Attempt after attempt at one store, with another number of ranks, rank 0 first or last."""
    names = set()
    for attempt, size in enumerate((3, 3, 2, 4, 4)):
        found: dict[int, Future[Meeting]] = {}
        order = list(range(size))
        for rank in order if attempt % 2 else reversed(order):
            found[rank] = meetings.start(one(rank, f"{attempt}-{rank}"), world_size=size)
            # The others have the time to find the words of the attempt before.
            time.sleep(0.05)
        for future in found.values():
            meeting = future.result(PATIENCE_S)
            assert [each.node_name for each in meeting.attendants] == [f"{attempt}-{rank}" for rank in order]
            names.add((attempt, meeting.name))
    assert len(names) == len({name for _, name in names}) == 5
    meetings.close()


def test_a_worker_left_over_from_before_is_not_believed(meetings: Meetings) -> None:
    """It waits for its own rank 0, which is gone, and answers the new one's word. It cannot be both."""
    left_over = meetings.start(one(1, "old"), world_size=2, timeout_s=2.0)
    time.sleep(0.1)
    new = [meetings.start(one(rank, "new"), world_size=2, timeout_s=4.0) for rank in (0, 1)]
    taken = {}
    for name, future in (("old", left_over), ("new 0", new[0]), ("new 1", new[1])):
        try:
            taken[name] = future.result(PATIENCE_S).attendants[1].node_name
        except MembershipError:
            taken[name] = "did not meet"
    # Whoever answered last is in; the other one is told so, and nobody believes to be what he is not.
    assert sorted([taken["old"], taken["new 1"]]) in (["did not meet", "new"], ["did not meet", "old"])
    assert taken["new 0"] in ("new", "old")
    meetings.close()


def test_somebody_who_does_not_come_is_an_error_with_the_setting_to_change(meetings: Meetings) -> None:
    with pytest.raises(MembershipError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        meet(meetings.client(), one(0, "a"), world_size=2, timeout_s=0.2)
    with pytest.raises(MembershipError, match="did not meet"):
        meet(meetings.client(), one(1, "b"), world_size=2, timeout_s=0.2)
    meetings.close()


def test_texts_are_exchanged_by_rank(meetings: Meetings) -> None:
    first = meetings.meet_all("ab")
    results: dict[int, list[str]] = {}

    def run(rank: int) -> None:
        results[rank] = exchange(meetings.client(), first[rank], "key", f"text {rank}", rank=rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == {0: ["text 0", "text 1"], 1: ["text 0", "text 1"]}
    # Under the attempt's name only.
    second = meetings.meet_all("ab")
    assert not attempt_store(meetings.client(), second[0]).check(["key/0"])
    meetings.close()


# --- what follows from who is there -------------------------------------------------------------------------


def meeting_of(*nodes: tuple[str, int, dict[str, str]]) -> Meeting:
    """Nodes in the order of torchrun's groups: name, slots, labels."""
    attendants: list[Attendant] = []
    for group, (name, slots, labels) in enumerate(nodes):
        for local_rank in range(slots):
            attendants.append(
                Attendant(len(attendants), group, local_rank, slots, name, labels, f"10.0.0.{group}", group)
            )
    return Meeting("there", tuple(attendants))


def test_ranks_follow_the_plan_not_torchrun() -> None:
    meeting = meeting_of(("b", 1, {"zone": "z2"}), ("a", 2, {"zone": "z2"}), ("c", 2, {"zone": "z1"}))
    plan = meeting.plan(ASKED)
    ranks = {
        (each.node_name, each.local_rank): meeting.rank_in(
            plan, group_rank=each.group_rank, local_rank=each.local_rank
        )
        for each in meeting.attendants
    }
    assert ranks == {("c", 0): 0, ("c", 1): 1, ("a", 0): 2, ("a", 1): 3, ("b", 0): 4}
    assert meeting.addresses() == {"b": "10.0.0.0", "a": "10.0.0.1", "c": "10.0.0.2"}
    assert plan.generation == 3


def test_agents_of_one_host_are_told_apart() -> None:
    plan = meeting_of(("host", 1, {}), ("host", 2, {}), ("other", 1, {})).plan(ASKED)
    assert [node.node_id for node in plan.topology.nodes] == ["host-0", "host-1", "other"]


def test_a_hierarchy_that_does_not_fit_is_an_error_under_strict() -> None:
    strict = Asked("size-2=2,global=8", 0, "strict")
    with pytest.raises(TopologyError, match="2"):
        meeting_of(("a", 3, {})).plan(strict)


def test_all_have_to_ask_for_the_same() -> None:
    check_alike(["a", "a"])
    with pytest.raises(UsageError, match="rank 0 asks for a and rank 2 for b"):
        check_alike(["a", "a", "b"])


@pytest.mark.parametrize(
    ("holdings", "wanted"),
    [
        ([None, None], None),
        ([(8, 1, "a"), None], (8, 1, "a")),
        ([(8, 1, "a"), (16, 1, "a"), (8, 1, "a")], (16, 1, "a")),
        # Two worlds that went on apart came to the same step: more ranks decide, then the later generation.
        ([(16, 9, "a"), (16, 2, "b"), (16, 2, "b")], (16, 2, "b")),
        ([(16, 1, "a"), (16, 2, "b")], (16, 2, "b")),
    ],
)
def test_the_newest_step_wins(
    holdings: list[tuple[int, int, str] | None], wanted: tuple[int, int, str] | None
) -> None:
    values = [Holding(Moment(*each) if each else None) for each in holdings]
    assert [read_holding(value.to_json()) for value in values] == values
    for order in (values, values[::-1]):
        assert newest(order) == (Moment(*wanted) if wanted else None)


# --- what torchrun left in the environment ------------------------------------------------------------------

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
}


def test_a_workers_place_under_torchrun() -> None:
    ours = {"HIERAVG_NODE_ID": "n1", "HIERAVG_LABELS": "zone=z", "HIERAVG_HIERARCHY": "global=4"}
    place = read_worker_place({**TORCHRUN, **ours, "HIERAVG_WARMUP_STEPS": "3", "HIERAVG_ON_MISFIT": "strict"})
    assert isinstance(place, RestartPlace)
    assert (place.rank, place.local_rank, place.group_rank, place.restart_count) == (5, 1, 1, 2)
    assert place.asked == Asked("global=4", 3, "strict")
    assert place.labels["zone"] == "z"
    plain = read_worker_place(TORCHRUN)
    assert isinstance(plain, RestartPlace)
    assert plain == replace(place, asked=plain.asked, labels=plain.labels, node_name=plain.node_name)
    assert plain.asked.on_misfit == "repair"
    assert read_worker_place({}) == WorkerPlace()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"RANK": "x"}, "'RANK': 'x'"),
        ({"MASTER_ADDR": ""}, "'MASTER_ADDR': ''"),
        ({"HIERAVG_WARMUP_STEPS": "-1"}, "HIERAVG_WARMUP_STEPS is '-1'"),
        ({"HIERAVG_ON_MISFIT": "maybe"}, "HIERAVG_ON_MISFIT is 'maybe'"),
    ],
)
def test_a_place_that_cannot_be_read_is_an_error_with_what_was_found(
    change: dict[str, str], found: str
) -> None:
    with pytest.raises(UsageError) as error:
        read_worker_place({**TORCHRUN, **change})
    assert found in error.value.problems[0].message
