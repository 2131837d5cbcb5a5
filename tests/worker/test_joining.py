"""Workers that die and come back under `hieravg run`: with their optimizer's state, and in a backward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic import jobs
from tests.elastic.jobs import Line, RunningJob, running_job

SCRIPT = Path(__file__).with_name("train.py")
# Moments may be some steps old, and the ranks' noise differs.
CLOSE = 0.2
StartJob = Callable[..., RunningJob]


@pytest.fixture
def start_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> StartJob:
    monkeypatch.setattr(jobs, "SCRIPT", SCRIPT)

    def start(**settings: Any) -> RunningJob:
        holding = running_job(tmp_path / "job", **settings)
        job = holding.__enter__()
        request.addfinalizer(lambda: holding.__exit__(None, None, None))
        return job

    return start


def last_joined(job: RunningJob, name: str) -> list[Line]:
    """What the workers of a node said when they came into the job the last time."""
    return [line for pid in job.nodes[name].workers() for line in job.of(pid, "joined")]


def test_a_killed_worker_comes_back_with_the_survivors_optimizer_state(start_job: StartJob) -> None:
    job = start_job(hierarchy="node=4,global=16")
    job.start("a", "b")
    job.await_together("a", "b")
    survivor = job.nodes["a"].workers()[0]
    before = job.nodes["b"].workers()
    with job.surviving("a"):
        job.kill_worker("b")
        job.wait_for(
            "b comes back", lambda: len(last_joined(job, "b")) == 2 and job.nodes["b"].workers() != before
        )
        job.await_together("a", "b")
    assert job.faults["worker killed"] == 1
    for joined in last_joined(job, "b"):
        step = joined["step"]
        assert joined["pid"] not in before
        assert step > 0
        (there,) = [line for line in job.of(survivor, "step") if line["step"] == step]
        assert joined["counters"] == there["counters"] == [step]
        assert joined["first"] == pytest.approx(there["first"], rel=CLOSE)
        assert joined["second"] == pytest.approx(there["second"], rel=CLOSE)
        # Its next steps are as good as everybody's.
        after = [line["counters"] for line in job.of(joined["pid"], "step")][:3]
        assert after == [[step + 1], [step + 2], [step + 3]]
    for pid in (survivor, *job.nodes["b"].workers()):
        changes = job.of(pid, "changed")
        assert changes
        assert all(line["rank"] == line["callback_rank"] for line in changes)
    places = {line["node"]: line["node_rank"] for line in job.lines() if line["event"] == "step"}
    assert places == {"a": 0, "b": 1}
    job.finish()


def test_a_peer_that_dies_in_the_backward_pass_leaves_local_gradients_and_no_exception(
    start_job: StartJob,
) -> None:
    """During warm-up gradients are averaged over all nodes, and nothing else keeps them together."""
    job = start_job(hierarchy="node=4,global=16", script=["--mode", "hook"], flags=["--warmup-steps", "100000"])
    job.start("a", "b", "c")
    job.wait_for("all three train", lambda: is_stepping(job, world=6))
    survivors = [pid for name in "ab" for pid in job.nodes[name].workers()]
    lost = job.nodes["c"].workers()
    with job.surviving("a", "b"):
        order_death(job, "c")
        job.wait_for("the survivors have local gradients", lambda: min(local_passes(job, survivors)) > 0)
        job.wait_for(
            "c comes back",
            lambda: len(last_joined(job, "c")) == 2 and not set(job.nodes["c"].workers()) & set(lost),
        )
        counted = local_passes(job, survivors)
        job.wait_for("all three train again", lambda: is_stepping(job, world=6))
        job.wait_for("they make steps", lambda: steps_since_join(job, "c") >= 10)
    # Everybody averages again: once the newcomer is there nothing more stays local.
    assert local_passes(job, survivors) == counted
    assert job.faults["worker killed in its backward pass"] == 1
    for name in "abc":
        assert [(line["node_total"], line["is_same"]) for line in last_joined(job, name)] == [(2.0, True)] * 2
    job.finish()


def is_stepping(job: RunningJob, *, world: int) -> bool:
    newest = {line["pid"]: line for line in job.lines() if line["event"] == "step"}
    alive = [pid for node in job.nodes.values() for pid in node.workers()]
    return len(alive) == world and all(pid in newest and newest[pid]["world"] == world for pid in alive)


def order_death(job: RunningJob, name: str) -> None:
    pid = job.nodes[name].workers()[0]
    (job.folder / "orders" / str(pid)).touch()
    job.wait_for(f"{pid} dies in its backward pass", lambda: not jobs.is_running(pid))
    job.faults["worker killed in its backward pass"] += 1


def local_passes(job: RunningJob, pids: list[int]) -> list[int]:
    return [max([0, *(line["local"] for line in job.of(pid, "step"))]) for pid in pids]


def steps_since_join(job: RunningJob, name: str) -> int:
    return min(len(job.of(pid, "step")) for pid in job.nodes[name].workers())


def test_attach_trains_a_loop_that_knows_nothing_of_it_to_the_same_end(start_job: StartJob) -> None:
    job = start_job(hierarchy="node=4,global=16", script=["--mode", "attach"])
    job.start("a", "b")
    job.await_together("a", "b")
    before = job.nodes["b"].workers()
    with job.surviving("a"):
        job.kill_worker("b", 1)
        job.wait_for(
            "b comes back", lambda: len(last_joined(job, "b")) == 2 and job.nodes["b"].workers() != before
        )
        job.await_together("a", "b")
    for joined in last_joined(job, "b"):
        assert joined["counters"] == [joined["step"]]
    job.finish()


def test_a_loop_that_ends_first_leaves_nobody_waiting_for_its_gradients(start_job: StartJob) -> None:
    job = start_job(hierarchy="node=4,global=16", script=["--mode", "hook"], flags=["--warmup-steps", "100000"])
    job.start("a", "b")
    job.wait_for("both train", lambda: is_stepping(job, world=4))
    steps = max(line["step"] for line in job.lines() if line["event"] == "step")
    # One worker of each node looks for the end later than the other.
    for name in "ab":
        (job.folder / f"stop-{job.nodes[name].workers()[0]}").touch()
    job.wait_for("all have ended", lambda: sum(line["event"] == "end" for line in job.lines()) == 4)
    # The end is the job's own: nobody has to be told to stop any more.
    assert [job.await_exit(name) for name in "ab"] == [0, 0]
    ends = [line for line in job.lines() if line["event"] == "end"]
    assert min(line["step"] for line in ends) > steps
    assert len({line["digest"] for line in ends}) == 1, f"replicas end differently: {ends}"
    job.check()
