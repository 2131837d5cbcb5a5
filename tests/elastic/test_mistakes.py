"""What somebody reads who starts `hieravg run` wrongly: what was found and what to do, and no traceback."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_hieravg.agent import launch
from elastic_hieravg.agent.elastic_agent import last_sentence
from elastic_hieravg.cli import main
from tests.elastic.jobs import running_job

FIRST = "Traceback (most recent call last):\n  File a\nKeyError: 1\n\n"
SECOND = "Traceback (most recent call last):\n  File b\nOurError: it broke\n\nhint: mend it\n"
ALONE = ["--standalone", "--metrics-port=off"]


@pytest.fixture(autouse=True)
def _quiet_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`hieravg run` sets up the logs of its process; here it is the tests'."""
    for name in [name for name in os.environ if name.startswith(("PET_", "HIERAVG_"))]:
        monkeypatch.delenv(name)
    handlers = logging.root.handlers[:]
    yield
    logging.root.handlers[:] = handlers


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nnodes=x"], "--nnodes is 'x'"),
        (["--nnodes=1:2:3"], "--nnodes is '1:2:3'"),
        (["--nnodes=4:2"], "the minimum of nodes is 4, more than the maximum of 2"),
        (["--nnodes=0:2"], "the minimum of nodes is 0"),
        (["--nproc-per-node=x"], "--nproc-per-node is 'x'"),
        (["--nproc-per-node=0"], "--nproc-per-node is '0'"),
        (["--rdzv-conf=join_timeout"], "--rdzv-conf has 'join_timeout'"),
        (["--redirects=x"], "--redirects is 'x'"),
        (["--tee=9"], "--tee is '9'"),
        (["--local-ranks-filter=x"], "--local_ranks_filter must be"),
        (["--logs-specs=nope"], "torchrun.logs_specs[nope]"),
        (["--log-dir=/proc/nowhere"], "--log-dir is '/proc/nowhere', which cannot be used"),
        (["--event-log-handler=nope"], "--event-log-handler is 'nope'"),
        (["--monitor-interval=-1"], "--monitor-interval is -1"),
        (["--max-restarts=-1"], "--max-restarts is -1"),
        (["--no-python", "--module"], "--no-python and --module are both given"),
        (["--no-python"], "there is no program"),
        (["--lease-ttl-s=x"], "--lease-ttl-s is 'x'"),
        (["--log-format=x"], "--log-format is 'x'"),
    ],
)
def test_a_wrong_flag_is_told_with_a_hint(
    flags: list[str], told: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *ALONE, *flags, script]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert "\n\nhint: " in printed.err


def test_another_backend_is_the_only_thing_told(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nnodes=1", "--rdzv-backend=static", script]) == 2
    assert capsys.readouterr().err.startswith("hieravg: --rdzv-backend is static\n\nhint: ")


@pytest.mark.parametrize("name", ["nowhere.py", "", "."])
def test_a_script_that_is_not_there_is_told_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *ALONE, name]) == 2
    assert capsys.readouterr().err.startswith(f"hieravg: there is no script {name!r} in {tmp_path}\n\nhint: ")


def test_a_variable_of_torchrun_s_that_is_no_switch_is_told(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_STANDALONE", "yes")
    assert main(["run", script]) == 2
    assert capsys.readouterr().err == "hieravg: PET_STANDALONE is 'yes'\n\nhint: give 1 or 0\n"


def test_a_misspelt_flag_is_told_in_a_few_lines(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *ALONE, "--heirarchy", "node=4,global=8", script])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "usage: hieravg run [flags] SCRIPT [the script's own arguments]",
        "hieravg run: error: unrecognized arguments: --heirarchy; did you mean --hierarchy?",
    ]


def test_a_missing_script_is_told_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *ALONE])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "hieravg run: error: the following arguments are required: SCRIPT"
    ]


def test_a_misspelt_variable_is_warned_of(
    script: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HIERAVG_GRACE", "7")
    monkeypatch.setenv("PET_NNODES", "1")
    assert main(["run", *ALONE, "--tee=9", script]) == 2
    assert caplog.messages == ["HIERAVG_GRACE is set, and nothing reads it; is it HIERAVG_GRACE_S?"]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyboardInterrupt(), 143, "stopped by Ctrl-C before this node was in the job"),
        (PermissionError(13, "Permission denied", "x"), 1, "cannot go on: [Errno 13] Permission denied: 'x'"),
    ],
)
def test_what_ends_it_early_is_one_line(  # noqa: PLR0917 - fixtures
    error: BaseException,
    code: int,
    told: str,
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(launch, "launch", fail)
    left = tmp_path / "why"
    monkeypatch.setenv("HIERAVG_TERMINATION_FILE", str(left))
    assert main(["run", *ALONE, script]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert told in left.read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("worker 0 exited with 1; see above", "worker 0 exited with 1; see above"),
        ("Traceback (most recent call last):\n  File a\n    x\nValueError: no\n", "ValueError: no"),
        (f"{FIRST}During handling:\n\n{SECOND}", "OurError: it broke; hint: mend it"),
    ],
)
def test_of_a_traceback_the_end_is_told(text: str, told: str) -> None:
    assert last_sentence(text) == told


def test_a_node_says_where_it_looks_for_the_job_and_what_it_waits_for(tmp_path: Path) -> None:
    with running_job(tmp_path / "job", nnodes="2:2") as job:
        job.start("a")
        job.wait_for("a says so", lambda: "this node waits: 1 of at least 2 nodes" in job.log("a"))
        assert "looking for run " in job.log("a")
        assert "0 of at least 2 nodes" not in job.log("a")
