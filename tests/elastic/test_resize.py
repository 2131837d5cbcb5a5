"""A file of bounds that changes under a running job, and the sentence that an agent leaves behind."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_hieravg.agent.bounds_file import BoundsFile
from elastic_hieravg.agent.termination import MESSAGE_BYTES_MAX, leave_message
from elastic_hieravg.cli import main
from elastic_hieravg.config import TERMINATION_FILE_VARIABLE
from elastic_hieravg.membership.decisions import Action, Decision
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.proposing import plan_generation
from elastic_hieravg.membership.records import Bounds, Generation, Job, Kind
from elastic_hieravg.membership.service import Status
from elastic_hieravg.plan import Hierarchy, Node
from tests.elastic.jobs import HIERAVG, RunningJob, running_job

WITHIN_S = 60.0
LEFT = 143
# Time enough for a change that must not come, at the polls of the tests.
SOME_POLLS_S = 0.3
NODES = (Node("a", 1, {}, "a0"), Node("b", 1, {}, "b0"))


class Mounted:
    """A ConfigMap as the kubelet mounts it: the file is a link through a link that is replaced as a whole."""

    def __init__(self, folder: Path, content: str) -> None:
        self._folder = folder
        self._version = 0
        folder.mkdir()
        self.path = folder / "nnodes"
        self.path.symlink_to("..data/nnodes")
        self.write(content)

    def write(self, content: str) -> None:
        self._version += 1
        version = self._folder / f"..{self._version}"
        version.mkdir()
        (version / "nnodes").write_text(content)
        (self._folder / "..data_tmp").symlink_to(version.name)
        (self._folder / "..data_tmp").rename(self._folder / "..data")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path / "bounds", "1:4\n")


class Follower:
    """A file that is followed, what it said, and what the job says."""

    def __init__(self, mounted: Mounted, *, me: str = "a", again_s: float = 1e6) -> None:
        self.said: list[Bounds] = []
        self.bounds = Bounds(1, 4)
        self._node = next(node for node in NODES if node.node_id == me)
        self._file = BoundsFile(
            mounted.path,
            first=Bounds(1, 4),
            change=self.said.append,
            status=self._status,
            poll_s=0.02,
            again_s=again_s,
        )

    def _status(self) -> Status:
        job = Job(1, 4, Hierarchy.parse("global=8"))
        plan, _ = plan_generation(job, 1, NODES)
        generation = Generation(1, Kind.START, "", NODES, {}, plan.digest, (1,), "", "a0")
        adopted = Adopted(generation, plan, generation.keys(plan))
        decision = Decision(Action.KEEP, "")
        return Status(self._node, decision, adopted, is_listed=True, bounds=self.bounds)

    def wait_for(self, said: list[Bounds]) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while self.said != said and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert self.said == said

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def follower(mounted: Mounted) -> Iterator[Follower]:
    opened = Follower(mounted)
    yield opened
    opened.close()


def test_what_a_file_says_at_first_is_not_said_again(follower: Follower) -> None:
    time.sleep(SOME_POLLS_S)
    assert follower.said == []


def test_what_a_file_says_later_is_said_once(mounted: Mounted, follower: Follower) -> None:
    mounted.write("2:8\n")
    follower.wait_for([Bounds(2, 8)])
    mounted.write("2:8")
    mounted.write("3")
    follower.wait_for([Bounds(2, 8), Bounds(3, 3)])
    time.sleep(SOME_POLLS_S)
    assert len(follower.said) == 2


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("many", "has 'many'"),
        ("", "has ''"),
        ("4:2", "the minimum of nodes is 4, more than the maximum of 2"),
        ("0:2", "the minimum of nodes is 0"),
    ],
)
def test_bounds_that_cannot_be_are_warned_of_once_and_change_nothing(
    mounted: Mounted, follower: Follower, caplog: pytest.LogCaptureFixture, content: str, found: str
) -> None:
    with caplog.at_level("WARNING"):
        mounted.write(content)
        deadline_s = time.monotonic() + WITHIN_S
        while not caplog.records and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(SOME_POLLS_S)
    (record,) = caplog.records
    assert "the --nnodes-file is not used" in record.getMessage()
    assert found in record.getMessage()
    assert "hint:" in record.getMessage()
    assert follower.said == []
    mounted.write("1:3")
    follower.wait_for([Bounds(1, 3)])


@pytest.mark.parametrize(("me", "said"), [("a", [Bounds(1, 4)]), ("b", [])])
def test_bounds_the_job_forgot_are_said_again_by_the_first_member(
    mounted: Mounted, me: str, said: list[Bounds]
) -> None:
    follower = Follower(mounted, me=me, again_s=0.1)
    try:
        follower.bounds = Bounds(1, 2)
        if said:
            deadline_s = time.monotonic() + WITHIN_S
            while not follower.said and time.monotonic() < deadline_s:
                time.sleep(0.01)
        else:
            time.sleep(SOME_POLLS_S)
        assert follower.said[:1] == said
    finally:
        follower.close()


def test_job_follows_its_file(tmp_path: Path, mounted: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare joins, a job that has too few nodes pauses and goes on, and who leaves says why."""
    message = tmp_path / "message"
    monkeypatch.setenv(TERMINATION_FILE_VARIABLE, str(message))
    mounted.write("1:1")
    flags = [f"--nnodes-file={mounted.path}", "--metrics-port=off"]
    with running_job(tmp_path / "job", flags=flags) as job:
        job.start("a")
        job.await_together("a")
        job.start("b")
        job.wait_for("b is a spare", lambda: is_ready(job, "b"))
        with job.surviving("a"):
            mounted.write("1:2")
            job.await_together("a", "b")
            mounted.write("3:4")
            job.wait_for("a pauses", lambda: ": 2 of at least 3 nodes" in job.log("a"))
            mounted.write("2:4")
            job.wait_for(
                "it goes on", lambda: job.generations("a")[-1].reason == "the job has 2 to 4 nodes now"
            )
            job.await_together("a", "b")
            mounted.write("nonsense")
            job.wait_for("a complains", lambda: "the --nnodes-file is not used" in job.log("a"))
            mounted.write("1:4")
            job.wait_for("both know", lambda: "1 to 4 nodes" in job.log("a") and "1 to 4 nodes" in job.log("b"))
            job.await_together("a", "b")
            assert job.terminate("b") == LEFT
            job.await_together("a")
        assert message.read_text() == "left on SIGTERM; what this node did is in the others' models"
        job.finish()
    assert message.read_text() == "training is done"
    assert job.faults == {"node asked to leave": 1}


def is_ready(job: RunningJob, name: str) -> bool:
    return any(line["node"] == name and line["event"] == "start" for line in job.lines())


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("in-place", "this node stopped: ValueError: raised at every start"),
        ("restart", "this node stopped: worker 0 exited with 1; see what it printed"),
    ],
)
def test_an_agent_whose_script_fails_says_so(tmp_path: Path, mode: str, reason: str) -> None:
    path = tmp_path / "message"
    (tmp_path / "train.py").write_text(
        "import elastic_hieravg as eh\n\nwith eh.join():\n    raise ValueError('raised at every start')\n"
    )
    flags = [f"--membership={mode}", "--max-restarts=0", "--metrics-port=off", "--nproc-per-node=1"]
    done = subprocess.run(
        ["setpriv", "--pdeathsig", "KILL", HIERAVG, "run", "--standalone", *flags, tmp_path / "train.py"],
        env=os.environ | {TERMINATION_FILE_VARIABLE: str(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert path.read_text() == reason


def test_a_reason_is_cut_where_kubernetes_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "message"
    monkeypatch.setenv(TERMINATION_FILE_VARIABLE, str(path))
    leave_message("x" + "é" * MESSAGE_BYTES_MAX)
    content = path.read_bytes()
    assert MESSAGE_BYTES_MAX - 1 <= len(content) <= MESSAGE_BYTES_MAX
    assert set(content.decode()) == {"x", "é"}


@pytest.mark.parametrize("place", ["/proc/nothing/here", "/", ""])
def test_a_reason_that_cannot_be_left_is_not_missed(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv(TERMINATION_FILE_VARIABLE, place)
    leave_message("why")


def test_wrong_usage_leaves_its_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "message"
    monkeypatch.setenv(TERMINATION_FILE_VARIABLE, str(path))
    (tmp_path / "nnodes").write_text("4:2")
    assert main(["run", f"--nnodes-file={tmp_path / 'nnodes'}", "--rdzv-endpoint=h:1", os.devnull]) == 2
    assert "the minimum of nodes is 4, more than the maximum of 2" in path.read_text()
    assert path.read_text() in capsys.readouterr().err
