"""Processes that wait to become workers: what runs in one is what would run in a fresh one."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elastic_hieravg.agent.warm import Target, read_target
from elastic_hieravg.agent.warm_pool import DEATHS_MAX, WarmPool, is_same_start
from elastic_hieravg.config import read_modules
from elastic_hieravg.errors import UsageError
from tests.rendezvous.torchruns import wait_for
from tests.restart.attempts import SLOTS, RestartJob, hieravg_embedded, restart_job

# Says everything about itself that a script could notice, in a file; fails as it is told.
SCRIPT = """
import json, multiprocessing, os, sys
from pathlib import Path

def double(number):
    return 2 * number

if __name__ == "__main__":
    code, where = int(sys.argv[1]), Path(sys.argv[2])
    doubled = None
    # A spawned process imports this file anew, by what __main__ says of itself; but never a package's __main__.
    if not __file__.endswith("__main__.py"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            doubled = pool.apply_async(double, (21,)).get(60)
    said = {"argv": sys.argv, "path": sys.path[0], "file": __file__, "package": __package__, "doubled": doubled}
    said |= {"cwd": os.getcwd(), "rank": os.environ.get("RANK"), "old": os.environ.get("OLD")}
    said |= {"pid": os.getpid()}
    said |= {"decimal": "decimal" in sys.modules, "session": os.getsid(0), "pgid": os.getpgid(0)}
    where.write_text(json.dumps(said))
    print("to stdout")
    print("to stderr", file=sys.stderr)
    if code == 99:
        raise ValueError("as it was told")
    sys.exit(code)
"""


@pytest.fixture(autouse=True)
def _told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, which is a module, and in a package with a __main__ too."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for path in (
        tmp_path / "script.py",
        tmp_path / "package" / "__main__.py",
        tmp_path / "package" / "part.py",
    ):
        path.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def pool_of(*modules: str) -> Iterator[WarmPool]:
    pool = WarmPool(modules, delay_s=0.0)
    try:
        yield pool
    finally:
        pool.close()
        assert not waiting_processes(os.getpid())


def waiting_processes(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0") if path.name.isdecimal() else []
            parents = (path / "stat").read_text().rpartition(")")[2].split()[1] if words else ""
            if b"elastic_hieravg.agent.warm" in words and parent in (int(parents), 0):
                found.append(int(path.name))
    return found


def await_waiting(caplog: pytest.LogCaptureFixture, *, num: int = 1) -> None:
    wait_for(lambda: caplog.text.count("waits to become worker") >= num, what="nobody waits")


def run_cold(command: list[str], environment: Mapping[str, str]) -> int:
    return subprocess.run(command, env=environment, check=False, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"], ["-m", "package"], ["-m", "package.part"]])
@pytest.mark.parametrize("code", [0, 7])
def test_a_script_sees_no_difference(
    package: Path, caplog: pytest.LogCaptureFixture, words: list[str], code: int
) -> None:
    cold, warm = package / "cold.json", package / "warm.json"
    command = [sys.executable, "-u", *words, str(code)]
    environment = {**os.environ, "RANK": "3"}
    assert run_cold([*command, str(cold)], environment) == code
    with pool_of("decimal") as pool, (package / "out").open("w") as out, (package / "err").open("w") as err:
        # The first start finds nobody; with it the pool knows what to prepare for.
        before = {**os.environ, "RANK": "1", "OLD": "gone"}
        assert pool.start(0, [*command, str(warm)], before, stdout=out, stderr=err) is None
        await_waiting(caplog)
        process = pool.start(0, [*command, str(warm)], environment, stdout=out, stderr=err)
        assert process is not None
        assert process.wait(60) == code
    wanted, found = json.loads(cold.read_text()), json.loads(warm.read_text())
    assert found["decimal"]
    assert found["pid"] == process.pid
    # As torch starts workers: the whole group can be told to end.
    assert found["session"] == found["pgid"] == process.pid
    ignored = ("pid", "session", "pgid", "argv", "decimal")
    assert {name: found[name] for name in found if name not in ignored} == {
        name: wanted[name] for name in wanted if name not in ignored
    }
    assert found["argv"][:2] == wanted["argv"][:2]
    assert (package / "out").read_text() == "to stdout\n"
    assert (package / "err").read_text() == "to stderr\n"


def test_an_exception_ends_it_as_ever(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-u", "script.py", "99", str(package / "said")]
    with pool_of("decimal") as pool, (package / "err").open("w") as err:
        pool.start(0, command, os.environ, stdout=None, stderr=err)
        await_waiting(caplog)
        process = pool.start(0, command, os.environ, stdout=None, stderr=err)
        assert process is not None
        assert process.wait(60) == 1
    assert "ValueError: as it was told" in (package / "err").read_text()
    assert 'script.py", line 23, in <module>' in (package / "err").read_text()


def test_one_that_dies_is_replaced(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-u", "script.py", "0", str(package / "said")]
    with pool_of("decimal") as pool:
        for rank in range(2):
            assert pool.start(rank, command, os.environ, stdout=None, stderr=None) is None
        await_waiting(caplog, num=2)
        victim = waiting_processes(os.getpid())[0]
        os.kill(victim, signal.SIGKILL)
        await_waiting(caplog, num=3)
        assert len(waiting_processes(os.getpid())) == 2
        assert victim not in waiting_processes(os.getpid())
        # One that was killed a moment ago, and nobody has noticed: then the worker starts as ever.
        for pid in waiting_processes(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        process = pool.start(0, command, os.environ, stdout=None, stderr=None)
        assert process is None or process.wait(60) == -signal.SIGKILL


def test_modules_that_cannot_be_imported_are_given_up_after_a_while(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-u", "script.py", "0", str(package / "said")]
    with pool_of("there_is_no_such_module") as pool:
        pool.start(0, command, os.environ, stdout=None, stderr=None)
        wait_for(lambda: "--warm is not used" in caplog.text, what="it is tried for ever")
        time.sleep(1.0)
        assert not waiting_processes(os.getpid())
        assert pool.start(0, command, os.environ, stdout=None, stderr=None) is None
    assert DEATHS_MAX == 3


def test_another_number_of_threads_needs_a_fresh_process(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-u", "script.py", "0", str(package / "said")]
    with pool_of("decimal") as pool:
        pool.start(0, command, {**os.environ, "OMP_NUM_THREADS": "1"}, stdout=None, stderr=None)
        await_waiting(caplog)
        assert pool.start(0, command, {**os.environ, "OMP_NUM_THREADS": "2"}, stdout=None, stderr=None) is None


@pytest.mark.parametrize("importing", [False, True], ids=["waiting", "while it imports"])
def test_none_outlives_its_agent(package: Path, importing: bool) -> None:
    (package / "slow.py").write_text(f"import time; time.sleep({600 if importing else 0})")
    code = (
        "import os, sys, time, logging; logging.basicConfig(level='INFO')\n"
        "from elastic_hieravg.agent.warm_pool import WarmPool\n"
        "pool = WarmPool(['slow'], delay_s=0.0)\n"
        "pool.start(0, [sys.executable, '-u', 'script.py', '0', 'x'], os.environ, stdout=None, stderr=None)\n"
        "time.sleep(600)\n"
    )
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", code]
    with (package / "log").open("w") as log:
        agent = subprocess.Popen(command, stderr=log)
    try:
        wait_for(lambda: bool(waiting_processes(agent.pid)), what="nobody waits")
        if not importing:
            wait_for(lambda: "waits to become" in (package / "log").read_text(), what="nobody waits")
        pids = waiting_processes(agent.pid)
        if importing:
            # Behind the interpreter's own start, after which the kernel is asked to tell.
            wait_for(lambda: is_sleeping(pids[0]), what="it does not import")
    finally:
        agent.kill()
        agent.wait()
    wait_for(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], what="it lives on")


def is_sleeping(pid: int) -> bool:
    return b"nanosleep" in Path(f"/proc/{pid}/wchan").read_bytes()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("-u", "train.py", "--x", "-m"), Target("train.py", False, ("--x", "-m"))),
        (["train.py"], Target("train.py", False, ())),
        (["-u", "-m", "train", "1"], Target("train", True, ("1",))),
        (["-u"], None),
        (["-c", "pass"], None),
        (["-u", "-m"], None),
        ([], None),
    ],
)
def test_what_a_command_line_runs(words: list[str], wanted: Target | None) -> None:
    assert read_target(words) == wanted


def test_what_is_read_at_the_start_has_to_be_the_same() -> None:
    start = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "a",
        "RANK": "0",
        "TORCH_NCCL_X": "1",
        "TORCHELASTIC_RUN_ID": "a",
    }
    later = {"RANK": "1", "TORCH_NCCL_X": "2", "TORCHELASTIC_RUN_ID": "b", "NEW": "x"}
    assert is_same_start(start, {**start, **later})
    for change in ({"PYTHONPATH": "b"}, {"MKL_NUM_THREADS": "1"}, {"LD_PRELOAD": "x"}):
        assert not is_same_start(start, {**start, **change})


def test_names_that_are_no_modules_are_refused() -> None:
    with pytest.raises(UsageError, match="'my-module' is not the name of a module"):
        read_modules("torch,my-module", flag="--warm")


# --- the whole thing ----------------------------------------------------------------------------------------


def await_stand_ins(job: RestartJob, *, num: int) -> None:
    wait_for(lambda: job.live["a"].said.count("waits to become worker") >= num, what="nobody waits")


@pytest.mark.parametrize("membership", ["restart", "in-place"])
def test_workers_start_anew_in_the_processes_that_waited(tmp_path: Path, membership: str) -> None:
    launcher = hieravg_embedded(tmp_path.name, "--warm", "torch", membership=membership)
    with restart_job(tmp_path, launcher, nodes="1") as job:
        job.start("a")
        begun = job.await_attempt("a")
        for num_before in (0, SLOTS):
            await_stand_ins(job, num=num_before + SLOTS)
            # Those that became workers are still called what they were started as.
            waiting = set(waiting_processes(job.agent_pid("a"))) - {line["pid"] for line in begun}
            killed_s = job.kill_worker(begun[0]["pid"])
            begun = job.await_attempt("a", after_s=killed_s)
            assert {line["pid"] for line in begun} == waiting
            if membership == "restart":
                job.check_goes_on(begun, lost_s=killed_s)
        job.finish()
        assert job.num_faults == 2
        assert not waiting_processes(job.agent_pid("a"))
