"""`hieravg doctor` as a person or a script calls it: processes of its own, judged by output and exit code."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_hieravg.cli import main
from elastic_hieravg.doctor import examination
from tests.membership.etcd_servers import free_ports

HIERAVG = Path(sys.executable).with_name("hieravg")
WITHIN_S = 180.0
ESCAPE = "\x1b"
WELL = ("--metrics-port", "auto")


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HIERAVG, "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
        env=os.environ | environment,
    )


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """A doctor that listens, as a process; the port."""
    (port,) = free_ports(1)
    command = ["setpriv", "--pdeathsig", "KILL", str(HIERAVG), "doctor", "--listen", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert f"listening at port {port}" in process.stderr.readline()
            yield port
        finally:
            process.kill()


def test_this_machine_is_well_and_its_peer_is_measured() -> None:
    with listening() as port:
        done = doctor(*WELL, "--nproc-per-node", "1", "--params", "1M", "--peer", f"127.0.0.1:{port}", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, ""), told
    assert told["counts"]["problem"] == 0
    found = {(each["group"], each["check"]): each for each in told["findings"]}
    assert found["software", "torch"]["found"].startswith("2.")
    assert found["software", "gloo"]["severity"] == "ok"
    assert found["software", "etcd client"]["severity"] == "ok"
    assert found["peer", "bandwidth"]["severity"] == "ok"
    assert found["pod", "pod"]["severity"] == "absent"


def test_problems_are_exit_code_1_and_told_without_colour() -> None:
    done = doctor(*WELL, "--hierarchy", "node=4,global=6", "--lease-ttl-s", "0.2", HIERAVG_GRACES="3")
    assert (done.returncode, done.stderr) == (1, "")
    assert ESCAPE not in done.stdout
    *_, summary = done.stdout.splitlines()
    assert summary.startswith("2 problems, ")
    first = next(line for line in done.stdout.splitlines() if line.startswith("problem: "))
    assert first == "problem: settings, flags: --lease-ttl-s is '0.2'"
    assert "HIERAVG_GRACES is set, and nothing reads it" in done.stdout
    assert "  do: is it HIERAVG_GRACE_S?" in done.stdout


def test_wrong_usage_is_exit_code_2_at_once() -> None:
    for arguments, found in (
        (("--peer", "h2:99999"), "--peer is 'h2:99999'"),
        (("--listen", "0"), "--listen is '0'"),
        (("--listen", "1234", "--json"), "--listen and --json cannot be used together"),
        (("--step-s", "nan"), "--step-s is 'nan'"),
    ):
        done = doctor(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"hieravg: {found}")
        assert "\n\nhint: " in done.stderr


def test_a_terminal_gets_colours() -> None:
    ours, theirs = pty.openpty()
    told = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(ours, 65536):
                told.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    command = [str(HIERAVG), "doctor", *WELL, "--lease-ttl-s", "0.2"]
    environment = os.environ | {"TERM": "xterm-256color"}
    try:
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
            assert process.wait(WITHIN_S) == 1
    finally:
        os.close(theirs)
        reader.join(WITHIN_S)
        os.close(ours)
    assert f"{ESCAPE}[1;31m" in told.decode()


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "examine", interrupted)
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    assert main(["doctor"]) == 1
    assert capsys.readouterr() == ("", "hieravg doctor: stopped by Ctrl-C; not everything was looked at\n")
