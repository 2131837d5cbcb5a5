"""`hieravg run` as the first process of a container: signals, orphans, exit codes, in a real namespace."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_hieravg.cli.init import fork_below_init
from tests.elastic.jobs import alive, children_of

WITHIN_S = 60.0
# A program that tells what it is, leaves an orphan behind that ends at once, and waits for what comes.
PROGRAM = """
import os, signal, subprocess, sys, time
from elastic_hieravg.cli.init import fork_below_init
code = fork_below_init()
if code is not None:
    sys.exit(code)
{body}
"""
ORPHANS = """
for _ in range(3):
    subprocess.run(["sh", "-c", "sh -c 'exit 0' & exit 0"], check=True)
deadline = time.monotonic() + 30
def zombies():
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                found += [name] * (open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0] == "Z")
            except OSError:
                pass
    return found
while zombies() and time.monotonic() < deadline:
    time.sleep(0.05)
print("zombies", len(zombies()), "pid", os.getpid(), flush=True)
sys.exit(7)
"""
WAITING = "print('ready', flush=True)\ntime.sleep(60)"
HANDLING = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print('ready', flush=True)
time.sleep(60)
"""


def start(body: str) -> "subprocess.Popen[str]":
    """The program as process 1 of a namespace; `unshare` is its parent, and ends when it ends."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen(
        [*command, sys.executable, "-c", PROGRAM.format(body=body)], stdout=subprocess.PIPE, text=True
    )


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_orphans_are_collected_and_the_exit_code_is_the_commands() -> None:
    with start(ORPHANS) as process:
        assert first_line(process) == "zombies 0 pid 2"
        assert process.wait(WITHIN_S) == 7


@pytest.mark.parametrize(("body", "code"), [(WAITING, 128 + signal.SIGTERM), (HANDLING, 5)])
def test_signals_are_passed_on(body: str, code: int) -> None:
    with start(body) as process:
        assert first_line(process) == "ready"
        (init,) = children_of(process.pid)
        (command,) = children_of(init)
        os.kill(init, signal.SIGTERM)
        assert process.wait(WITHIN_S) == code
        assert not alive([init, command])


def test_nothing_of_the_kind_happens_elsewhere() -> None:
    assert os.getpid() != 1
    assert fork_below_init() is None


def test_what_is_left_ends_with_the_first_process() -> None:
    command = ["sleep", f"60.{os.getpid()}"]
    body = f"subprocess.Popen({command})\nprint('ready', flush=True)\nos._exit(0)"
    with start(body) as process:
        assert first_line(process) == "ready"
        assert process.wait(WITHIN_S) == 0
    deadline_s = time.monotonic() + WITHIN_S
    while running(command) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not running(command)


def running(command: Sequence[str]) -> list[str]:
    """Processes with exactly this command."""
    wanted = "\0".join(command) + "\0"
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] * (path.read_text() == wanted)
        except OSError:
            continue
    return found
