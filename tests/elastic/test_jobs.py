"""Jobs of their own: what the shape of a job, its script and its end have to do with faults."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.elastic.jobs import GLOBAL_STEPS, HIERAVG, SCRIPT, Line, RunningJob, alive, running_job
from tests.membership.etcd_servers import etcd_cluster

DO_NOT_RETRY = 78
LEFT = 143
# Time enough for steps, if any were made.
SOME_STEPS_S = 0.5
# Kills at so many different times of a step hit its payload now and then.
NUM_KILLS = 3
TINY = "size=64k"


def newest(job: RunningJob, name: str) -> Line:
    """The last step of a node."""
    return [line for line in job.lines() if line["node"] == name and line["event"] == "step"][-1]


def test_node_lost_during_warmup_in_the_middle_of_a_payload(tmp_path: Path) -> None:
    """During warm-up every step ends with a global round, and of a large model that is most of the step."""
    flags, script = ["--warmup-steps=1000000"], ["--hidden=30000", "--step-s=0"]
    with running_job(tmp_path / "job", flags=flags, script=script, slots=1) as job:
        job.start("a")
        job.wait_for("a starts", lambda: bool(job.lines()))
        job.start("b", "c")
        job.await_together("a", "b", "c")
        with job.surviving("a", "b"):
            for count in range(NUM_KILLS):
                time.sleep(0.09 * count)
                job.kill_worker("c")
                job.await_together("a", "b")
                job.await_together("a", "b", "c")
        job.finish()
        assert job.faults["worker killed"] == NUM_KILLS
        ends = {line["node"]: line for line in job.lines() if line["event"] == "end"}
        # The rounds that were hit were tried once more, or had reached everybody.
        assert ends["a"]["num_retried"] + ends["b"]["num_retried"] > 0
        assert ends["a"]["num_skipped"] == ends["b"]["num_skipped"] == 0


def test_zone_lost_and_node_of_another_size_joined(tmp_path: Path) -> None:
    """Every step ends with a round of the node: so does the one in which a node is lost."""
    with running_job(tmp_path / "job", hierarchy="node=1,zone=4,global=16") as job:
        job.start("a", flags=["--label=zone=z1"])
        job.wait_for("a starts", lambda: bool(job.lines()))
        job.start("b", flags=["--label=zone=z1"])
        job.start("c", flags=["--label=zone=z2"], slots=1)
        with_c = job.await_together("a", "b", "c")
        assert newest(job, "a")["levels"] == ["node", "zone", "global"]
        with job.surviving("a", "b"):
            job.kill("c")
            job.await_together("a", "b")
            # All of it is one zone now: the levels have merged.
            assert newest(job, "a")["levels"] == ["node", "zone"]
        with job.surviving("a"):
            job.kill("b")
            job.await_together("a")
            assert newest(job, "a")["levels"] == ["node"]
        job.start("c", flags=["--label=zone=z2"], slots=1)
        assert job.await_together("a", "c") > with_c
        assert newest(job, "c")["levels"] == ["node", "global"]
        job.finish()
        assert job.faults["node killed"] == 2


@pytest.mark.parametrize("slots", [1, 2])
def test_only_node_goes_on_from_its_own_snapshot(tmp_path: Path, slots: int) -> None:
    """Nobody else has its model. A node that joins later gets it as from any other."""
    with running_job(tmp_path / "job", slots=slots) as job:
        job.start("a")
        job.wait_for("a trains", lambda: has_stepped(job, "a", 40))
        for _ in range(2):
            before = newest(job, "a")
            job.kill_worker("a", index=0)
            pids = {line["pid"] for line in job.lines()}
            job.wait_for("a trains again", lambda pids=pids: newest(job, "a")["pid"] not in pids)  # type: ignore[misc]
            joined = [line for line in job.lines() if line["event"] == "joined" and line["pid"] not in pids]
            assert len({line["digest"] for line in joined}) == 1
            # It may have made some more steps before it was killed.
            assert all(before["step"] - 2 * GLOBAL_STEPS < line["step"] for line in joined)
        job.start("b")
        job.await_together("a", "b")
        job.finish()
        assert job.faults["worker killed"] == 2
    assert not [path for path in Path("/dev/shm").glob("hieravg-snapshot*") if owned_by(path, job)]


def has_stepped(job: RunningJob, name: str, step: int) -> bool:
    return any(
        line["node"] == name and line["event"] == "step" and line["step"] >= step for line in job.lines()
    )


def owned_by(path: Path, job: RunningJob) -> bool:
    """An agent's process id is in the names of its workers' files."""
    return any(f".{node.process.pid}." in path.name for node in job.nodes.values())


@pytest.mark.parametrize("told", ["0", ""])
def test_rank_in_doubt_about_a_round_does_as_the_others_did(tmp_path: Path, told: str) -> None:
    """c dies in the middle of its verdict. If a has heard it, a takes the result, and b does when it knows.

    If nobody has, both keep what they had; either way all are alike after the step.
    """
    with running_job(tmp_path / "job", slots=1, hierarchy="global=16") as job:
        job.start("a")
        job.wait_for("a starts", lambda: bool(job.lines()))
        job.start("b", "c")
        job.await_together("a", "b", "c")
        for _ in range(NUM_KILLS):
            with job.surviving("a", "b"):
                (lost,) = job.nodes["c"].workers()
                job.order("c", f"die-in-verdict {told}")
                job.wait_for("c is dead", lambda lost=lost: not alive([lost]))  # type: ignore[misc]
                job.await_together("a", "b")
                step = job.of(lost, "step")[-1]["step"] + 1
                states = {
                    line["node"]: line["state"]
                    for line in job.lines()
                    if line["event"] == "step" and line["step"] == step and line["node"] != "c"
                }
                assert len(states) == 2
                assert states["a"] == states["b"], f"they went different ways at step {step}"
                job.await_together("a", "b", "c")
        job.finish()
        assert job.faults["worker ordered to die-in-verdict"] == NUM_KILLS
        ends = {line["node"]: line for line in job.lines() if line["event"] == "end"}
        failed = {name: ends[name]["counts"].get("global failed", 0) for name in "ab"}
        # Who was in doubt and took the result has not failed.
        assert failed == dict.fromkeys("ab", 0 if told else NUM_KILLS)


def test_job_that_does_not_fit_holds_and_a_spare_steps_in(tmp_path: Path) -> None:
    flags = ["--on-misfit=strict"]
    with running_job(tmp_path / "job", flags=flags, slots=1, hierarchy="size-2=4,global=16") as job:
        job.start("a")
        job.wait_for("a starts", lambda: bool(job.lines()))
        job.start("b")
        job.await_together("a", "b")
        with job.surviving("a", "b"):
            # Three ranks do not make pairs.
            job.start("c")
            job.wait_for("c is in", lambda: "c joined" in job.log("a"))
            job.wait_for("the reason is told", lambda: "does not divide" in job.log("a"))
            job.wait_for("all stand still", lambda: stands_still(job))
            job.start("d")
            job.await_together("a", "b", "c", "d")
        with job.surviving("a", "b", "c"):
            # One more than there may be, and in a hurry when it has to go.
            job.start("e", flags=["--grace-s=0"])
            job.wait_for("e is ready", lambda: any(line["node"] == "e" for line in job.lines()))
            job.await_together("a", "b", "c", "d")
            assert not [line for line in job.lines() if line["node"] == "e" and line["event"] == "joined"]
            job.kill("d")
            job.await_together("a", "b", "c", "e")
        before = job.newest("a")
        assert job.terminate("e") == LEFT
        assert "no time for one more round" in job.log("e")
        job.wait_for("the others know", lambda: bool(job.generations("a", after=before)))
        job.start("d")
        job.await_together("a", "b", "c", "d")
        job.finish()


def stands_still(job: RunningJob) -> bool:
    before: int = max(line["step"] for line in job.lines())
    time.sleep(SOME_STEPS_S)
    return before == max(int(line["step"]) for line in job.lines())


def test_script_that_always_raises_ends_the_job_for_good(tmp_path: Path) -> None:
    with running_job(tmp_path / "job", script=["--raise-at-start"], slots=1) as job:
        job.start("a", flags=["--max-restarts=1"])
        job.wait_for("a starts", lambda: bool(job.lines()))
        job.start("b", flags=["--max-restarts=20"])
        assert job.await_exit("a") == job.await_exit("b") == DO_NOT_RETRY
        for name in "ab":
            assert "ValueError: raised at every start" in job.log(name)
        assert len({line["pid"] for line in job.lines() if line["node"] == "a"}) == 2


def test_worker_that_says_do_not_retry_is_not_retried(tmp_path: Path) -> None:
    with running_job(tmp_path / "job", script=[f"--exit-at-start={DO_NOT_RETRY}"], slots=1) as job:
        job.start("a")
        assert job.await_exit("a") == DO_NOT_RETRY
        assert len(job.lines()) == 1


def test_node_that_comes_after_the_end_does_not_start(tmp_path: Path) -> None:
    with (
        etcd_cluster(tmp_path / "servers") as cluster,
        running_job(tmp_path / "job", cluster=cluster, script=["--steps=20"], slots=1) as job,
    ):
        job.start("a")
        assert job.await_exit("a") == 0
        job.start("b")
        assert job.await_exit("b") == 0
        assert {line["node"] for line in job.lines()} == {"a"}


@pytest.mark.needs("unshare", apt="util-linux")
def test_disk_full_for_logs(tmp_path: Path) -> None:
    """The workers' output goes to a disk that has no room: training goes on, and so does a new start."""
    logs = tmp_path / "tiny"
    logs.mkdir()
    mount = f'mount -t tmpfs -o {TINY} none {logs} && exec "$@"'
    under = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    with running_job(tmp_path / "job", script=["--log-bytes=20000"], slots=1) as job:
        job.start("a")
        job.wait_for("a starts", lambda: bool(job.lines()))
        job.start("b", flags=[f"--log-dir={logs}", "--redirects=3"], under=under)
        job.await_together("a", "b")
        full = Path(f"/proc/{job.nodes['b'].process.pid}/root{logs}")
        job.wait_for("the disk is full", lambda: disk_is_full(full))
        with job.surviving("a", "b"):
            job.await_together("a", "b")
        with job.surviving("a"):
            job.kill_worker("b")
            job.wait_for("a is alone", lambda: newest(job, "a")["world"] == 1)
            job.await_together("a", "b")
        job.finish()


def disk_is_full(path: Path) -> bool:
    told = subprocess.run(["stat", "-f", "-c", "%a", str(path)], capture_output=True, text=True, check=True)
    return int(told.stdout) == 0


def test_tells_everything_wrong_with_the_flags_at_once() -> None:
    flags = ["--rdzv-backend=etcd3", "--hierarchy=node=4,global=6", "--lease-ttl-s=0.1", "--on-misfit=maybe"]
    flags += ["--warmup-steps=many", "--label=zone", "--rdzv-conf=password=secret,wrong=1", "--grace-s=soon"]
    told = subprocess.run([HIERAVG, "run", *flags, SCRIPT], capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert told.stdout == ""
    words = ["no run id", "global", "--lease-ttl-s", "maybe", "many", "zone", "password", "wrong", "--grace-s"]
    assert [word for word in words if word not in told.stderr] == []
    assert "Traceback" not in told.stderr
