"""Stock torchrun on our rendezvous: real processes, a real etcd, a gloo script, and everything that can die.

The nodes' leases are so long that no test passes by waiting for one to end.
"""

import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from elastic_hieravg.membership.etcd import EtcdKeyValue
from tests.membership.etcd_servers import PASSWORD, Certificates, EtcdCluster, etcd_cluster
from tests.rendezvous.torchruns import PATIENCE_S, TorchrunJob, as_conf, wait_for

LONG_LEASE_S = 10 * PATIENCE_S
# In the order of the plan: by zone, then by name as people count. Neither is the order of the letters.
ZONES = {"node-2": "east", "node-10": "east", "node-1": "west"}
ORDER = list(ZONES)

_runs = count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd"), num_members=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared(etcd: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchrunJob]:
    with TorchrunJob(
        tmp_path_factory.mktemp("shared"),
        run_id="shared",
        endpoints=etcd.endpoints,
        nodes="2:3",
        conf={"lease_ttl_s": LONG_LEASE_S},
    ) as job:
        yield job


def start(job: TorchrunJob, node_id: str) -> None:
    job.start(node_id, labels=f"zone={ZONES[node_id]}")


@pytest.fixture
def job(shared: TorchrunJob) -> TorchrunJob:
    """The job that many tests share, with all its nodes, stepping, whatever the test before did to it."""
    for node_id in [each for each in shared.live if each not in ZONES]:
        shared.kill(node_id)
    for node_id in ZONES.keys() - shared.live.keys():
        start(shared, node_id)
    shared.await_world(*ZONES)
    shared.num_faults = 0
    return shared


def test_node_ranks_follow_the_order_of_the_plan(job: TorchrunJob) -> None:
    world = job.await_world(*ZONES)
    assert [(step.node_id, step.node_rank) for step in world] == list(zip(ORDER, range(3), strict=True))


def test_a_killed_worker_brings_everybody_back(job: TorchrunJob) -> None:
    before = job.await_world(*ZONES)
    killed_s = job.signal(before[1].pid, signal.SIGKILL)
    after = job.await_world(*ZONES, after_s=killed_s)
    assert not {step.pid for step in before} & {step.pid for step in after}
    assert [step.node_id for step in after] == ORDER
    assert job.num_faults == 1


@pytest.mark.parametrize("victim", [ORDER[0], ORDER[2]], ids=["the node of rank 0", "another node"])
def test_a_killed_node_is_left_behind_and_another_takes_its_place(job: TorchrunJob, victim: str) -> None:
    killed_s = job.kill(victim)
    survivors = [node_id for node_id in ORDER if node_id != victim]
    world = job.await_world(*survivors, after_s=killed_s)
    assert [step.node_id for step in world] == survivors
    # A node that is added to a job that runs.
    start(job, victim)
    world = job.await_world(*ORDER, after_s=max(step.at_s for step in world))
    assert [step.node_id for step in world] == ORDER
    assert job.num_faults == 1


def test_a_killed_agent_alone_takes_its_workers_out_of_the_job(job: TorchrunJob) -> None:
    orphan = job.await_world(*ZONES)[1]
    victim = job.live.pop(orphan.node_id)
    killed_s = job.signal(victim.process.pid, signal.SIGKILL)
    survivors = [node_id for node_id in ORDER if node_id != orphan.node_id]
    world = job.await_world(*survivors, after_s=killed_s)
    assert not [step for step in job.steps() if step.pid == orphan.pid and step.at_s > world[0].at_s]
    victim.kill()
    assert job.num_faults == 1


def test_a_node_that_is_told_to_go_is_missed_at_once(job: TorchrunJob) -> None:
    leaver = job.live.pop(ORDER[1])
    told_s = job.signal(leaver.process.pid, signal.SIGTERM)
    assert leaver.exit_code() != 0
    world = job.await_world(ORDER[0], ORDER[2], after_s=told_s)
    assert [step.node_id for step in world] == [ORDER[0], ORDER[2]]
    assert job.num_faults == 1


def test_a_spare_waits_above_the_maximum_and_steps_in(job: TorchrunJob) -> None:
    before = job.await_world(*ZONES)
    spare = job.start("spare", labels="zone=east")
    wait_for(lambda: "1 node spare" in spare.said, what="the spare does not wait")
    waits_s = time.monotonic()
    # Nobody has restarted for it.
    assert [step.pid for step in job.await_world(*ZONES, after_s=waits_s)] == [step.pid for step in before]
    killed_s = job.kill(ORDER[2])
    world = job.await_world(ORDER[0], ORDER[1], "spare", after_s=killed_s)
    assert [step.node_id for step in world] == [ORDER[0], ORDER[1], "spare"]
    assert job.num_faults == 1


def test_a_killed_member_of_etcd_changes_nothing_and_a_loss_is_still_found(
    job: TorchrunJob, etcd: EtcdCluster
) -> None:
    before = job.await_world(*ZONES)
    # The one that everybody asks first.
    victim = etcd.members[0]
    victim.kill()
    lost_s = time.monotonic()
    try:
        during = job.await_world(*ZONES, after_s=lost_s)
        assert [step.pid for step in during] == [step.pid for step in before]
        killed_s = job.kill(ORDER[0])
        world = job.await_world(*ORDER[1:], after_s=killed_s)
        assert [step.node_id for step in world] == ORDER[1:]
    finally:
        victim.start()
    assert job.num_faults == 1


# --- beginnings and ends ------------------------------------------------------------------------------------


def test_the_end_is_everybodys_and_a_late_node_starts_nothing(etcd: EtcdCluster, tmp_path: Path) -> None:
    run_id = f"end-{next(_runs)}"
    with TorchrunJob(tmp_path, run_id=run_id, endpoints=etcd.endpoints, nodes="1:2") as job:
        for node_id in "ab":
            job.start(node_id)
        job.await_world("a", "b")
        job.finish()
        assert [job.live[node_id].exit_code() for node_id in "ab"] == [0, 0]
        num_steps = len(job.steps())
        late = job.start("c")
        assert late.exit_code() == 0, late.said
        assert f"run {run_id} is over" in late.said
        assert "use another --rdzv-id" in late.said
        assert len(job.steps()) == num_steps
    kv = EtcdKeyValue(etcd.settings())
    left = kv.get(f"/hieravg/{run_id}/").entries
    kv.close()
    assert {key.rpartition("/")[2] for key in left} == {"closing", "generation", "job"}
    assert all(entry.lease_id for entry in left.values())


def test_a_script_that_always_fails_ends_the_job_for_everybody(etcd: EtcdCluster, tmp_path: Path) -> None:
    run_id = f"fail-{next(_runs)}"
    with TorchrunJob(
        tmp_path, run_id=run_id, endpoints=etcd.endpoints, nodes="2:2", max_restarts=1, task="fail"
    ) as job:
        for node_id in "ab":
            job.start(node_id)
        codes = [job.live[node_id].exit_code() for node_id in "ab"]
        assert all(code != 0 for code in codes), codes
        assert any("this script always fails" in job.live[node_id].said for node_id in "ab")


def test_one_node_alone_with_tls_and_a_user(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    with etcd_cluster(tmp_path / "etcd", certificates=certificates, has_users=True) as cluster:
        password_file = tmp_path / "password"
        password_file.write_text(f"{PASSWORD}\n")
        with TorchrunJob(
            tmp_path,
            run_id="guarded",
            endpoints=cluster.endpoints,
            nodes="1",
            num_workers=2,
            conf=as_conf(cluster.settings(), password_file),
        ) as job:
            alone = job.start("alone")
            job.await_world("alone")
            job.finish()
            assert alone.exit_code() == 0, alone.said
            assert PASSWORD not in alone.said


def test_wrong_settings_are_refused_at_the_start_with_the_reason(etcd: EtcdCluster, tmp_path: Path) -> None:
    wrong = {"lease_ttl_s": 1, "is_host": 1}
    with TorchrunJob(tmp_path, run_id="wrong", endpoints=etcd.endpoints, nodes="1", conf=wrong) as job:
        node = job.start("a")
        assert node.exit_code() != 0
        assert "lease_ttl_s in --rdzv-conf is '1'" in node.said
        assert "hint: give a number of seconds, 2 or more" in node.said
        assert "--rdzv-conf has is_host, which the backend etcd3 does not have" in node.said
        assert not job.steps()
