"""A live node stays in the job: its owner may be stuck and its machine busy. And nothing outlives its owner."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from elastic_hieravg.errors import Problem, TopologyError
from elastic_hieravg.membership import service
from elastic_hieravg.membership.decisions import Policy
from elastic_hieravg.membership.kv import KeyValue
from elastic_hieravg.membership.memory import MemoryKeyValue
from elastic_hieravg.membership.messages import Adopted, Candidate, Failed, Fenced, Notice
from elastic_hieravg.membership.records import Closing, Job
from elastic_hieravg.membership.service import Membership, Observe, StoreAway, StoreBack
from elastic_hieravg.plan import Hierarchy
from tests.membership.agents import agent_processes
from tests.membership.etcd_servers import etcd_cluster

PATIENCE_S = 60.0
LEASE_TTL_S = 2.0
NUM_BUSY = 10
BUSY_S = 8.0

_runs = count()


def opened(
    kv: KeyValue, node_id: str, *, observe: Observe = lambda _: None, lease_ttl_s: float = LEASE_TTL_S
) -> Membership:
    return Membership(
        kv,
        Candidate(node_id, 1, {}, "127.0.0.1", 0),
        run_id="run",
        policy=Policy(Job(1, 4, Hierarchy.parse("global=8")), join_settle_s=0.2),
        lease_ttl_s=lease_ttl_s,
        observe=observe,
    )


def await_members(membership: Membership, *node_ids: str) -> int:
    """The number of the generation of exactly these nodes, once it is adopted."""

    def is_adopted(status: service.Status) -> bool:
        adopted = status.adopted
        return adopted is not None and [node.node_id for node in adopted.generation.members] == [*node_ids]

    assert membership.wait(is_adopted, timeout_s=PATIENCE_S), membership.status
    assert membership.status.adopted is not None
    return membership.status.adopted.generation.number


def test_a_node_whose_owner_is_stuck_keeps_its_lease() -> None:
    kv = MemoryKeyValue()
    stuck, ended = threading.Event(), threading.Event()
    notices: list[Notice | StoreAway | StoreBack] = []

    def observe(notice: Notice | StoreAway | StoreBack) -> None:
        notices.append(notice)
        if isinstance(notice, Adopted) and not stuck.is_set():
            stuck.set()
            # Nothing is said to it, and it says nothing, for twice as long as its lease lives.
            time.sleep(2 * LEASE_TTL_S)
            ended.set()

    with opened(kv, "a", observe=observe) as first, opened(kv, "b") as second:
        for each in (first, second):
            each.ready()
        number = await_members(second, "a", "b")
        assert stuck.wait(PATIENCE_S)
        while not ended.wait(0.05):
            assert not second.has_lost_member()
        await_members(first, "a", "b")
        assert second.status.newest_number == number
    assert not [notice for notice in notices if isinstance(notice, Fenced)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_node_that_nobody_drives_any_more_is_out() -> None:
    def observe(notice: Notice | StoreAway | StoreBack) -> None:
        raise ZeroDivisionError

    kv = MemoryKeyValue()
    with opened(kv, "a", observe=observe) as first, opened(kv, "b") as second:
        for each in (first, second):
            each.ready()
        assert first.wait(lambda status: status.error is not None, timeout_s=PATIENCE_S)
        assert "ended the thread that follows the membership" in str(first.status.error)
        await_members(second, "b")


def test_an_error_of_ours_in_the_driving_thread_says_itself_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TopologyError(Problem("rack r1 is in more than one zone", "correct the labels"))

    monkeypatch.setattr("elastic_hieravg.membership.member.decide", fail)
    told: list[Notice | StoreAway | StoreBack] = []
    with opened(MemoryKeyValue(), "a", observe=told.append) as membership:
        membership.ready()
        assert membership.wait(lambda status: status.error is not None, timeout_s=PATIENCE_S)
        # Longer than it takes to notice that nobody drives any more.
        time.sleep(2 * LEASE_TTL_S)
        assert isinstance(membership.status.error, TopologyError)
    assert [notice for notice in told if isinstance(notice, Failed)] == [Failed(membership.status.error)]


def test_the_jobs_records_live_on_however_long_the_nodes_leases_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # As with leases of an hour, in seconds.
    monkeypatch.setattr(service, "JOB_TTL_S", 0.6)
    monkeypatch.setattr("elastic_hieravg.membership.member.JOB_TTL_S", 2.0)
    kv = MemoryKeyValue()
    with opened(kv, "a", lease_ttl_s=600.0) as membership:
        membership.ready()
        await_members(membership, "a")
        end_s = time.monotonic() + 3 * 2.0
        while time.monotonic() < end_s:
            assert {"/hieravg/run/job", "/hieravg/run/generation"} <= kv.get("/hieravg/run/").entries.keys()
            time.sleep(0.1)


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """A machine that has other things to do."""
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(num_processes)]
    try:
        yield
        assert all(process.poll() is None for process in processes), "the machine was not busy"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_no_live_node_is_dropped_by_a_busy_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        config = {"run_id": f"busy-{next(_runs)}", "endpoints": cluster.endpoints, "lease_ttl_s": 3.0}
        with agent_processes("abcd", **config) as agents:
            for agent in agents.values():
                agent.tell("ready")
            for agent in agents.values():
                number = agent.hear_adopted(*"abcd")["number"]
                agent.tell(f"enter {number}")
            with busy(NUM_BUSY):
                time.sleep(BUSY_S)
                for agent in agents.values():
                    agent.tell("status")
                    agent.hear(lambda said: said["told"] == "status")
            heard = [said for agent in agents.values() for said in agent.heard]
    num_drops = sum(said["told"] == "fenced" or said.get("number", number) != number for said in heard)
    assert num_drops == 0, heard


def test_nothing_runs_on_after_closing_or_a_start_that_failed() -> None:
    before = threading.active_count()
    kv = MemoryKeyValue()
    with opened(kv, "a") as membership:
        membership.ready()
        await_members(membership, "a")
    with pytest.raises(TopologyError, match="is not a name"):
        opened(kv, "not a name")
    assert threading.active_count() == before


def test_an_end_that_could_not_be_written_is_told() -> None:
    kv = MemoryKeyValue()
    with opened(kv, "a") as first:
        first.ready()
        await_members(first, "a")
        # Its name is taken by somebody who lives: it is out.
        with opened(kv, "a") as second:
            assert second.wait(lambda status: status.error is not None, timeout_s=PATIENCE_S)
            assert not second.end_job(Closing(True, "done"), timeout_s=1.0)
        assert first.status.ended is None
        assert first.end_job(Closing(True, "done"), timeout_s=PATIENCE_S)
        assert first.status.ended == Closing(True, "done")
