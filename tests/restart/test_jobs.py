"""Workers that all start anew: stock torchrun with either backend, and `hieravg run --membership restart`."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.membership.etcd_servers import EtcdCluster, etcd_cluster
from tests.rendezvous.torchruns import wait_for
from tests.restart.attempts import (
    SLOTS,
    Launcher,
    hieravg_embedded,
    kept_by,
    restart_job,
    torchrun_c10d,
    torchrun_etcd3,
)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


LAUNCHERS: dict[str, Callable[[EtcdCluster, str], Launcher]] = {
    "torchrun with etcd3": torchrun_etcd3,
    "hieravg run, embedded store": lambda _, run_id: hieravg_embedded(run_id),
}


@pytest.mark.parametrize("make", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_all_go_on_from_the_last_global_round_whoever_is_lost(
    etcd: EtcdCluster, tmp_path: Path, make: Callable[[EtcdCluster, str], Launcher]
) -> None:
    with restart_job(tmp_path, make(etcd, tmp_path.name), nodes="1:2") as job:
        job.start("a")
        job.await_attempt("a")
        grown_s = time.monotonic()
        job.start("b")
        first = job.await_attempt("a", "b", after_s=grown_s)
        # The newcomer has no snapshot: it got the others' model, step and optimizer.
        job.check_goes_on(first, lost_s=grown_s)
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in job.kept())

        killed_s = job.kill_worker(first[1]["pid"])
        second = job.await_attempt("a", "b", after_s=killed_s)
        assert not {line["pid"] for line in first} & {line["pid"] for line in second}
        assert second[0]["generation"] > first[0]["generation"]
        step = job.check_goes_on(second, lost_s=killed_s)

        lost_s = job.lose_node("b")
        third = job.await_attempt("a", after_s=lost_s)
        assert job.check_goes_on(third, lost_s=lost_s) >= step
        back_s = time.monotonic()
        job.start("b")
        fourth = job.await_attempt("a", "b", after_s=back_s)
        assert job.check_goes_on(fourth, lost_s=back_s) > step
        job.finish()
        assert job.num_faults == 2


@pytest.mark.parametrize("is_shared", [True, False], ids=["a store for all attempts", "a store for each"])
def test_torchs_own_backend_goes_on_too(tmp_path: Path, is_shared: bool) -> None:
    with restart_job(tmp_path, torchrun_c10d(tmp_path.name, is_shared=is_shared), nodes="1") as job:
        job.start("a")
        first = job.await_attempt("a")
        killed_s = job.kill_worker(first[0]["pid"])
        second = job.await_attempt("a", after_s=killed_s)
        job.check_goes_on(second, lost_s=killed_s)
        again_s = job.kill_worker(second[1]["pid"])
        job.check_goes_on(job.await_attempt("a", after_s=again_s), lost_s=again_s)
        job.finish()
        assert job.num_faults == 2


def test_workers_end_with_their_agent_and_the_next_one_clears_up(tmp_path: Path) -> None:
    with restart_job(tmp_path, torchrun_c10d(tmp_path.name, is_shared=True), nodes="1") as job:
        node = job.start("a")
        job.await_attempt("a")
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        job.num_faults += 1
        wait_for(lambda: not node.pids(), what="workers outlive their agent")
        assert len(job.kept()) == SLOTS
        again_s = time.monotonic()
        job.start("a")
        # Another agent is another job: nothing of the one before is taken, and nothing of it stays.
        begun = job.await_attempt("a", after_s=again_s)
        assert {line["step"] for line in begun} == {0}
        assert not kept_by([node])
        job.finish()
        assert job.num_faults == 1


def test_told_to_go_it_says_so_with_its_exit_code(tmp_path: Path) -> None:
    with restart_job(tmp_path, hieravg_embedded(tmp_path.name), nodes="1") as job:
        node = job.start("a")
        job.await_attempt("a")
        node.process.send_signal(signal.SIGTERM)
        assert node.exit_code() == 143, job.said()
        assert not job.kept()
