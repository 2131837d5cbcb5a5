"""One running job for each store, and every fault of DESIGN section 7 in turn.

Each test begins and ends with nodes a, b and c of two ranks in the job, so that they can run in any order.
"""

import math
import time
from collections.abc import Iterator

import pytest

from elastic_hieravg.membership.mirror import Keys
from elastic_hieravg.worker.boundary import RETRY_WAIT_S
from tests.elastic.jobs import RunningJob, alive
from tests.membership.etcd_servers import EtcdCluster, etcd_cluster

# So long may c stand still; the others' measure is their own.
HANG_TIMEOUT_S = 4.0
QUIET_S = 5.5
# Longer than a lease.
FROZEN_S = 5.0
# Longer than a rank waits whose round failed.
LATE_S = RETRY_WAIT_S + 2.0
# "Within seconds", on a busy machine.
SECONDS = 20.0
AWAY_S = 5.0
NUM_FLAPS = 10
NUM_OUTS = 3
TAKEN_OUT = "took it out of the job"


@pytest.fixture(scope="module", params=["embedded", "etcd"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningJob]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "etcd":
        with etcd_cluster(folder / "servers", num_members=3) as cluster:
            yield from _share(RunningJob(folder / "job-etcd", cluster=cluster))
    else:
        yield from _share(RunningJob(folder / "job-embedded"))


def _share(job: RunningJob) -> Iterator[RunningJob]:
    try:
        job.start("a")
        # The embedded store is a's.
        job.wait_for("a serves", lambda: "start" in [line["event"] for line in job.lines()])
        job.start("b")
        _start_c(job)
        yield job
        if not job.is_spoilt:
            job.finish()
    finally:
        job.close()


def _start_c(job: RunningJob) -> None:
    job.start("c", flags=["--hang-timeout-s", str(HANG_TIMEOUT_S)])


@pytest.fixture
def job(shared: RunningJob) -> RunningJob:
    assert not shared.is_spoilt, "a test before this one has lost the job"
    shared.await_together("a", "b", "c")
    return shared


@pytest.fixture
def cluster(job: RunningJob) -> EtcdCluster:
    """Only for the job on etcd: the other has no servers."""
    assert job.cluster is not None
    return job.cluster


on_etcd = pytest.mark.parametrize("shared", ["etcd"], indirect=True, scope="module")
# What no store has a part in.
on_any = pytest.mark.parametrize("shared", ["embedded"], indirect=True, scope="module")


def kinds(job: RunningJob, *, after: int) -> list[str]:
    return [made.kind for made in job.generations("a", after=after)]


# --- workers --------------------------------------------------------------------------------------------------


def test_worker_killed(job: RunningJob) -> None:
    before = job.newest("a")
    with job.surviving("a", "b"):
        job.kill_worker("c")
        job.await_together("a", "b")
        job.await_together("a", "b", "c")
    assert kinds(job, after=before) == ["loss", "join"]


@on_any
def test_worker_raises(job: RunningJob) -> None:
    before = job.newest("a")
    with job.surviving("a", "b"):
        job.order("c", "raise", index=1)
        job.await_together("a", "b")
        job.await_together("a", "b", "c")
    assert kinds(job, after=before) == ["loss", "join"]
    assert "ValueError: raised as ordered" in job.log("c")


@on_any
def test_worker_hangs_in_python(job: RunningJob) -> None:
    before = job.newest("a")
    with job.surviving("a", "b"):
        pid = job.order("c", "hang")
        job.wait_for("the watchdog kills it", lambda: not alive([pid]))
        job.await_together("a", "b", "c")
    assert kinds(job, after=before) == ["loss", "join"]
    log = job.log("c")
    assert f"(process {pid}) made no step" in log
    assert "in hang_here" in log


@on_any
def test_quiet_worker_is_not_taken_for_one_that_hangs(job: RunningJob) -> None:
    before = job.newest("a")
    with job.surviving("a", "b", "c"):
        job.order("c", f"quiet {QUIET_S}")
        job.await_together("a", "b", "c")
    assert kinds(job, after=before) == []


@on_any
def test_survivor_that_is_late_meets_the_others_at_the_step_they_named(job: RunningJob) -> None:
    """They have waited for it longer than they wait for a generation, and must not pass what they said."""
    with job.surviving("a", "b"):
        job.order("a", f"quiet {LATE_S}")
        job.kill_worker("c")
        job.await_together("a", "b")
        job.await_together("a", "b", "c")


@on_any
def test_newcomer_with_another_model_fails_alone(job: RunningJob) -> None:
    with job.surviving("a", "b", "c"):
        job.start("d", script=["--hidden", "32"], flags=["--max-restarts", "1"])
        job.faults["newcomer with another model"] += 1
        assert job.await_exit("d") == 78
        job.await_together("a", "b", "c")
    log = job.log("d")
    assert "this worker's model is not the job's: the first difference is" in log
    assert "0.weight" in log
    assert "nodes with another model than the job's are left out: d" in job.log("a") + job.log("b")


@on_any
def test_newcomer_that_always_raises_fails_alone(job: RunningJob) -> None:
    """It begins at the job's step, which is no step of its own: it is this node that differs."""
    with job.surviving("a", "b", "c"):
        job.start("d", script=["--raise-after-joining"], flags=["--max-restarts", "1"])
        job.faults["newcomer that always raises"] += 1
        assert job.await_exit("d") == 78
        job.await_together("a", "b", "c")
    assert "ValueError: there is no data on this node" in job.log("d")
    assert len({line["pid"] for line in job.lines() if line["node"] == "d" and line["event"] == "joined"}) >= 2


@on_any
def test_replica_that_is_not_finite_is_healed(job: RunningJob) -> None:
    before = job.newest("a")
    with job.surviving("a", "b", "c"):
        pid = job.order("c", "nan")
        job.await_together("a", "b", "c")
        job.await_together("a", "b", "c")
    assert kinds(job, after=before) == []
    losses = [line["loss"] for line in job.of(pid, "step")]
    assert any(map(math.isnan, losses)), "the replica was never spoilt"
    assert not math.isnan(losses[-1])


@on_any
def test_node_flaps(job: RunningJob) -> None:
    """Its workers die when they have just started, when they connect, when they are in: at any time."""
    with job.surviving("a", "b"):
        for count in range(NUM_FLAPS):
            job.wait_for("c has workers", lambda: len(job.nodes["c"].workers()) == job.nodes["c"].slots)
            dead = job.nodes["c"].workers()
            time.sleep(count * 0.25)
            job.kill_worker("c", index=count % 2)
            job.wait_for("they are gone", lambda dead=dead: not alive(dead))  # type: ignore[misc]
        job.await_together("a", "b", "c")
    assert job.faults["worker killed"] >= NUM_FLAPS


# --- nodes ----------------------------------------------------------------------------------------------------


def test_node_killed(job: RunningJob) -> None:
    before = job.newest("a")
    with job.surviving("a", "b"):
        job.kill("c")
        job.await_together("a", "b")
        _start_c(job)
        job.await_together("a", "b", "c")
    assert kinds(job, after=before) == ["loss", "join"]


def test_agent_killed_ends_its_workers(job: RunningJob) -> None:
    before = job.newest("a")
    with job.surviving("a", "b"):
        workers = job.kill_agent("c")
        job.wait_for("the workers end", lambda: not alive(workers), within_s=SECONDS)
        job.await_together("a", "b")
        _start_c(job)
        job.await_together("a", "b", "c")
    assert kinds(job, after=before) == ["loss", "join"]


def test_two_nodes_lost_at_once_and_one_is_left(job: RunningJob) -> None:
    before = job.newest("a")
    with job.surviving("a"):
        job.kill("b", "c")
        job.await_together("a")
        job.start("b")
        _start_c(job)
        job.await_together("a", "b", "c")
    made = job.generations("a", after=before)
    assert {each.kind for each in made} == {"loss", "join"}
    assert sum(each.kind == "loss" for each in made) <= 2


def test_node_lost_while_another_joins(job: RunningJob) -> None:
    with job.surviving("a", "b"):
        job.start("d")
        job.wait_for("d starts", lambda: any(line["node"] == "d" for line in job.lines()))
        job.kill("c")
        job.await_together("a", "b", "d")
        _start_c(job)
        job.await_together("a", "b", "c", "d")
        assert job.terminate("d") == 143
        job.await_together("a", "b", "c")


def test_node_leaves_on_sigterm_with_one_more_round(job: RunningJob) -> None:
    with job.surviving("a", "b", "c"):
        job.start("d")
        job.await_together("a", "b", "c", "d")
        before = job.newest("a")
        pids = job.nodes["d"].workers()
        assert job.terminate("d") == 143
        job.await_together("a", "b", "c")
    made = job.generations("a", after=before)
    assert [each.kind for each in made] == ["round", "loss"]
    assert "no time for one more round" not in job.log("d")
    # The others went on from a round that held everything the leaver did: it made no step after it.
    together = [
        line["step"] for line in job.lines() if line["generation"] == made[0].number and "digest" in line
    ]
    for pid in pids:
        assert job.of(pid, "step")[-1]["step"] == min(together) - 1


def test_grows_from_one_to_four_nodes_and_back(job: RunningJob) -> None:
    with job.surviving("a"):
        for name, left in (("c", "ab"), ("b", "a")):
            assert job.terminate(name) == 143
            job.await_together(*left)
        job.start("b")
        job.await_together("a", "b")
        _start_c(job)
        job.await_together("a", "b", "c")
        job.start("d")
        job.await_together("a", "b", "c", "d")
        assert job.terminate("d") == 143
        job.await_together("a", "b", "c")


def test_node_frozen_and_back(job: RunningJob) -> None:
    before = job.newest("a")
    with job.surviving("a", "b"):
        pids = job.nodes["c"].workers()
        job.freeze("c")
        job.await_together("a", "b")
        job.thaw("c")
        job.await_together("a", "b", "c")
    assert kinds(job, after=before) == ["loss", "join"]
    # It joined again as it was, without the model.
    assert job.nodes["c"].workers() == pids


def test_node_of_rank_0_and_of_the_stores_lost(job: RunningJob) -> None:
    with job.surviving("b", "c"):
        job.kill("a")
        job.await_together("b", "c")
        job.start("a")
        job.await_together("a", "b", "c")


# --- the store ------------------------------------------------------------------------------------------------


@on_etcd
def test_leader_of_etcd_lost(job: RunningJob, cluster: EtcdCluster) -> None:
    before = job.newest("a")
    with job.surviving("a", "b", "c"):
        leader = cluster.leader()
        leader.kill()
        job.faults["etcd member killed"] += 1
        time.sleep(AWAY_S)
        job.await_together("a", "b", "c")
        leader.start()
    assert kinds(job, after=before) == []


@on_etcd
def test_everybody_is_taken_out_at_once_while_it_lives(job: RunningJob, cluster: EtcdCluster) -> None:
    """As by an etcd that stood still for longer than the leases. Nobody went on, so what each has counts."""
    with job.surviving("a", "b", "c"):
        # The ranks stand at different steps, or by chance at the same.
        for _ in range(NUM_OUTS):
            counts = {name: job.log(name).count(TAKEN_OUT) for name in "abc"}
            cluster.control("del", "--prefix", Keys(job.run_id).node(""))
            job.faults["all nodes taken out"] += 1
            job.wait_for("all know", lambda counts=counts: are_out(job, counts))  # type: ignore[misc]
            job.await_together("a", "b", "c")


def are_out(job: RunningJob, counts: dict[str, int]) -> bool:
    """Whether each node was taken out since it had been so often."""
    return all(job.log(name).count(TAKEN_OUT) > count for name, count in counts.items())


@on_etcd
def test_all_of_etcd_away(job: RunningJob, cluster: EtcdCluster) -> None:
    before = job.newest("a")
    with job.surviving("a", "b", "c"):
        for member in cluster.members:
            member.kill()
        job.faults["etcd killed"] += 1
        job.wait_for("it is noticed", lambda: "the store does not answer" in job.log("a"))
        time.sleep(AWAY_S)
        job.await_together("a", "b", "c")
        for member in cluster.members:
            member.start()
        job.wait_for("it is back", lambda: job.log("a").count("the store answers again") > 0)
        job.await_together("a", "b", "c")
    assert kinds(job, after=before) == []
    # And changes are made again.
    with job.surviving("a", "b"):
        job.kill_worker("c")
        job.await_together("a", "b")
        job.await_together("a", "b", "c")
