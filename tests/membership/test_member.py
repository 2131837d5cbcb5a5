"""A member where the store's answers go wrong: what it wanted to say is said in the end."""

from itertools import count

import pytest

from elastic_hieravg.membership.decisions import Policy
from elastic_hieravg.membership.kv import Entry, Snapshot, Write
from elastic_hieravg.membership.member import Member
from elastic_hieravg.membership.messages import (
    Answer,
    Applied,
    Candidate,
    Failed,
    Grant,
    Granted,
    LeaseOver,
    Refresh,
    Refreshed,
    Refused,
    Request,
    Unknown,
)
from elastic_hieravg.membership.records import Bounds, Job, NodeRecord, NodeState, read_bounds, read_suspicion
from elastic_hieravg.plan import Hierarchy, Node

RUN = "/hieravg/run/"
BOUNDS = f"{RUN}bounds"
SUSPICION = f"{RUN}suspicions/b"


class Store:
    """Just enough of a store: what a member writes is there, unless an answer says otherwise."""

    def __init__(self, hierarchy: str = "global=8") -> None:
        names = map(str, count())
        job = Job(1, 4, Hierarchy.parse(hierarchy))
        self.member = Member(
            Candidate("a", 1, {}, "h1", 1),
            run_id="run",
            policy=Policy(job),
            lease_ttl_s=3.0,
            new_incarnation=lambda: f"a{next(names)}",
        )
        peer = NodeRecord(Node("b", 1, {}, "b0"), NodeState.READY, "h2", 2)
        self.entries = {
            f"{RUN}job": Entry(job.to_json(), 1, 7),
            f"{RUN}nodes/b": Entry(peer.to_json(), 1, 8),
        }
        self.revision = 1
        self.now_s = 0.0

    def tell(self) -> None:
        self.member.see(self.now_s, Snapshot(dict(self.entries), self.revision))

    def take(self, request: Request) -> Answer:
        if isinstance(request, Grant):
            return Granted(9)
        if isinstance(request, Refresh):
            return Refreshed()
        self.revision += 1
        for put in request.puts:
            self.entries[put.key] = Entry(put.value, self.revision, put.lease_id)
        for key in request.deletes:
            self.entries.pop(key, None)
        return Applied(self.revision)

    def step(self) -> Request | None:
        """One request and its answer, if the member has anything to ask."""
        self.now_s += 0.5
        self.tell()
        request = self.member.next(self.now_s)
        if request is not None:
            self.member.answer(self.now_s, self.take(request))
        return request


def accusation_of(store: Store) -> Write:
    """The next accusation that the member wants to write, not answered yet."""
    request = write_of(store, SUSPICION)
    assert request is not None, "it accuses nobody"
    return request


def write_of(store: Store, key: str) -> Write | None:
    """The next write of a key that the member wants to make, not answered yet; None if it wants none."""
    for _ in range(20):
        store.now_s += 0.5
        store.tell()
        request = store.member.next(store.now_s)
        if isinstance(request, Write) and key in [put.key for put in request.puts]:
            return request
        if request is not None:
            store.member.answer(store.now_s, store.take(request))
    return None


@pytest.fixture
def store() -> Store:
    opened = Store()
    opened.tell()
    opened.member.ready()
    for _ in range(5):
        opened.step()
    assert opened.member.is_registered
    opened.member.suspect(opened.now_s, "b0", why="its process ended", turn=0)
    return opened


@pytest.mark.parametrize(
    "answer", [Unknown(), Refused(), LeaseOver()], ids=lambda answer: type(answer).__name__
)
def test_an_accusation_that_did_not_arrive_is_made_again(store: Store, answer: Answer) -> None:
    accusation_of(store)
    store.member.answer(store.now_s, answer)
    again = accusation_of(store)
    (put,) = again.puts
    assert read_suspicion(put.value).incarnation == "b0"


def test_an_accusation_that_was_refuted_is_not_made_again(store: Store) -> None:
    store.member.answer(store.now_s, store.take(accusation_of(store)))
    store.tell()
    # The accused takes it away, and goes on.
    del store.entries[SUSPICION]
    store.revision += 1
    with pytest.raises(AssertionError, match="accuses nobody"):
        accusation_of(store)


def test_an_accusation_somebody_else_made_is_left_to_them(store: Store) -> None:
    mine = accusation_of(store)
    store.take(mine)
    store.member.answer(store.now_s, Refused())
    with pytest.raises(AssertionError, match="accuses nobody"):
        accusation_of(store)


@pytest.mark.parametrize(
    "answer", [Unknown(), Refused(), LeaseOver()], ids=lambda answer: type(answer).__name__
)
def test_bounds_that_did_not_arrive_are_written_again(store: Store, answer: Answer) -> None:
    store.member.change_bounds(Bounds(2, 8))
    assert write_of(store, BOUNDS) is not None
    store.member.answer(store.now_s, answer)
    again = write_of(store, BOUNDS)
    assert again is not None
    (put,) = again.puts
    assert read_bounds(put.value) == Bounds(2, 8)
    # With the job's own lease: they are the job's, not this node's.
    assert put.lease_id == 7


def test_bounds_are_said_once_and_others_words_count_as_well(store: Store) -> None:
    store.member.change_bounds(Bounds(2, 8))
    mine = write_of(store, BOUNDS)
    assert mine is not None
    store.member.answer(store.now_s, store.take(mine))
    store.tell()
    assert store.member.policy.job.bounds == Bounds(2, 8)
    store.revision += 1
    store.entries[BOUNDS] = Entry(Bounds(1, 3).to_json(), store.revision, 7)
    assert write_of(store, BOUNDS) is None
    assert store.member.policy.job.bounds == Bounds(1, 3)


def test_bounds_that_somebody_else_wrote_first_are_not_written_again(store: Store) -> None:
    store.member.change_bounds(Bounds(2, 8))
    store.revision += 1
    store.entries[BOUNDS] = Entry(Bounds(2, 8).to_json(), store.revision, 7)
    assert write_of(store, BOUNDS) is None
    store.revision += 1
    store.entries[BOUNDS] = Entry(Bounds(1, 3).to_json(), store.revision, 7)
    assert write_of(store, BOUNDS) is None


def test_a_generation_is_written_only_under_the_bounds_it_was_decided_on(store: Store) -> None:
    store.entries[BOUNDS] = Entry(Bounds(1, 2).to_json(), store.revision, 7)
    write = write_of(store, f"{RUN}generation")
    assert write is not None
    assert write.guards[BOUNDS] == store.entries[BOUNDS].revision


def test_nodes_of_which_none_can_be_in_the_job_are_told_why_and_nobody_plans_without_nodes() -> None:
    store = Store("zone=4,global=8")
    store.tell()
    store.member.ready()
    for _ in range(20):
        store.step()
    assert store.member.is_over
    assert {key for key in store.entries if "refusals" in key} == {f"{RUN}refusals/a", f"{RUN}refusals/b"}
    failed = [notice for notice in store.member.notices if isinstance(notice, Failed)]
    assert ["level zone is unknown" in str(notice.error) for notice in failed] == [True]
