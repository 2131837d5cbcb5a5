"""The command itself, on real processes: exit code, facts, terminal, and that nothing is left of it."""

import contextlib
import itertools
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_hieravg.demo.picture import BANDS
from elastic_hieravg.demo.screen import SKIPPED
from tests.readme_blocks import RECORDED, blocks_of
from tests.test_cli import assert_refused, hieravg

README = Path(__file__).parent.parent.parent / "README.md"
HIERAVG = Path(sys.executable).with_name("hieravg")
# On a machine that does much else; else a whole run takes less than a minute.
WITHIN_S = 400.0
POLL_S = 0.1
ESCAPE = "\x1b"
HIDE, SHOW = f"{ESCAPE}[?25l", f"{ESCAPE}[?25h"
CTRL_C = b"\x03"
NODES = ("a", "b", "c")


class Terminal:
    """A pseudo-terminal, and everything that was written to it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.modes = termios.tcgetattr(self.slave)
        termios.tcsetwinsize(self.slave, (40, 120))
        self.drawn = ""

    def read(self) -> str:
        while select.select([self.master], [], [], 0)[0]:
            self.drawn += os.read(self.master, 65536).decode(errors="replace")
        return self.drawn

    def close(self) -> None:
        os.close(self.slave)
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    found = Terminal()
    yield found
    found.close()


@contextlib.contextmanager
def started(folder: Path, *flags: str, terminal: Terminal | None = None) -> "Iterator[subprocess.Popen[str]]":
    """The demo, while it runs. Afterwards all of it is gone, or this fails."""
    under = ["setpriv", "--pdeathsig", "KILL", *(["setsid", "--ctty"] if terminal else [])]
    process = subprocess.Popen(
        [*under, HIERAVG, "demo", "--folder", folder, *flags],
        stdin=terminal.slave if terminal else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal.slave if terminal else subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "xterm", "CI": ""},
    )
    try:
        yield process
        wait_for("all of it ends", lambda: not processes_of(folder))
    finally:
        process.kill()
        for pid in processes_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_for(what: str, condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WITHIN_S:.0f} s: {what}"
        time.sleep(POLL_S)


def processes_of(folder: Path) -> list[int]:
    """The demo itself, its agents and its workers: all have the folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def workers_of(folder: Path, node: str) -> list[int]:
    """The node's workers that have said their first word."""
    return [int(path.suffix[1:]) for path in folder.glob(f"lines/{node}.*") if path.stat().st_size]


def facts_in(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


def test_every_promise_holds_while_nodes_are_hurt(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with started(folder, "--seconds", "0") as process:
        stdout, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, stderr
    assert ESCAPE not in stdout + stderr
    facts = facts_in(stdout)
    assert facts["steps lost by survivors"] == "0"
    assert facts["restarts of survivors"] == "0"
    assert facts["replicas identical"] == "yes"
    assert facts["steps lost by the node asked to leave"] == "0"
    faults = {key: value for key, value in facts.items() if key.startswith("node ")}
    assert [value[0] for value in faults.values()] == ["a", "c", "d", "c"]
    assert list(faults) == ["node killed", "node frozen", "node joined", "node asked to leave"]
    assert float(facts["loss at the end"]) < 0.8 * float(facts["loss at the start"])
    assert int(facts["global rounds compared"]) > 10
    assert 0.0 < float(facts["goodput"].rstrip("%")) <= 100.0
    # The others waited for a frozen node, not longer than its lease lasts and a busy machine takes.
    assert 0.0 < float(facts["longest gap of a survivor"].split()[0]) < 30.0
    picture = ET.parse(facts["picture"]).getroot()
    fills = [rect.get("fill") for rect in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert [each for each in fills if each in BANDS.values()] == list(BANDS.values())
    assert Path(facts["picture"]) == folder / "demo.svg"
    assert sorted(path.name for path in Path(facts["logs"]).glob("*.log")) == [
        "a.log",
        "b.log",
        "c.log",
        "d.log",
    ]
    check_talk(stderr)
    assert list(recorded_facts()) == [key for key in facts if key != "logs"]


def recorded_facts() -> dict[str, str]:
    """What the README says that a run printed."""
    blocks = [block.text for block in blocks_of(README.read_text()) if block.kind in RECORDED]
    (found,) = [text for text in blocks if "steps lost by survivors" in text]
    return facts_in(found)


def check_talk(stderr: str) -> None:
    """What was said meanwhile: every change of the plan, with the reason for it, and where the page is."""
    lines = [line[10:] for line in stderr.splitlines()]
    assert all(re.match(r" *\d+\.\d s  ", line) for line in stderr.splitlines())
    assert any(re.fullmatch(r"the job's page: http://127\.0\.0\.1:\d+/", line) for line in lines)
    for told in (
        "generation ",
        "node a, with rank 0 and the store, is killed",
        "b and c have averaged without it",
        "node c is frozen",
        "a, b, c, d train together, 8 ranks",
        "node c is asked to leave",
        "a, b, d train together, 6 ranks",
    ):
        assert any(line.startswith(told) for line in lines), stderr
    plans = [line for line in lines if line.startswith("plan of generation")]
    assert any(line.endswith("global every 16 steps {0-7}") for line in plans)
    told_plans = [line.split(": ", 1)[1] for line in plans]
    assert all(before != after for before, after in itertools.pairwise(told_plans)), "a plan is repeated"
    # A loss is the script's. Numbers jump when a, which serves the store, is lost.
    (jump,) = [line for line in lines if ": lost a: its process ended" in line]
    assert jump.endswith(SKIPPED)
    assert not [line for line in lines if re.match(r"generation \d+, loss", line)]
    assert lines.index("they import torch first, which takes some seconds") == 1


def test_a_broken_promise_is_named_and_a_terminal_is_left_as_it_was(tmp_path: Path, terminal: Terminal) -> None:
    """Behind the demo's back a worker of b is killed: its node starts anew, which no survivor may."""
    folder = tmp_path / "demo"
    with started(folder, "--no-faults", "--seconds", "8", terminal=terminal) as process:
        wait_for("b has two workers", lambda: len(workers_of(folder, "b")) == 2)
        os.kill(workers_of(folder, "b")[0], signal.SIGKILL)
        wait_for("it ends", lambda: terminal.read() and process.poll() is not None)
        stdout, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 1
    facts = facts_in(stdout)
    # Whether its workers were in again before the end is up to the machine.
    assert facts["restarts of survivors"] == "2"
    assert "a promise is broken: 2 workers of survivors started anew" in terminal.read()
    check_drawn(terminal)


def test_ctrl_c_ends_everything(tmp_path: Path, terminal: Terminal) -> None:
    folder = tmp_path / "demo"
    with started(folder, "--no-faults", "--seconds", "3600", terminal=terminal) as process:
        wait_for("it is drawn", lambda: "now, generation" in terminal.read())
        assert len(processes_of(folder)) == 1 + 3 + 6
        os.write(terminal.master, CTRL_C)
        wait_for("it ends", lambda: terminal.read() and process.poll() is not None)
    assert process.returncode == 1
    assert "stopped; everything the demo had started has ended" in terminal.read()
    check_drawn(terminal)


def check_drawn(terminal: Terminal) -> None:
    """It drew, and the terminal is as it was: a cursor, the same modes, the first screen."""
    drawn = terminal.read()
    assert "├── " in drawn
    assert "training" in drawn
    assert drawn.count(HIDE) == drawn.count(SHOW) > 0
    assert drawn.rindex(SHOW) > drawn.rindex(HIDE)
    assert f"{ESCAPE}[?1049" not in drawn
    assert termios.tcgetattr(terminal.slave) == terminal.modes


def test_everything_ends_with_the_demo_also_what_is_frozen(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with started(folder, "--no-faults", "--seconds", "3600") as process:
        wait_for("all workers run", lambda: sum(len(workers_of(folder, name)) for name in NODES) == 6)
        os.kill(workers_of(folder, "c")[0], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(WITHIN_S) == -signal.SIGKILL


def test_being_asked_to_end_ends_everything(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with started(folder, "--no-faults") as process:
        wait_for("it has agents", lambda: len(processes_of(folder)) >= 1 + len(NODES))
        process.terminate()
        assert process.wait(WITHIN_S) == 143


def test_a_node_that_falls_by_itself_is_named_with_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with started(folder, "--no-faults") as process:
        wait_for("it logs", (folder / "logs" / "c.log").exists)
        (agent,) = [pid for pid in processes_of(folder) if is_agent(pid, "c")]
        os.kill(agent, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, stdout) == (1, "")
    assert "hieravg: node c has ended with exit code -9\nthe log of c ends with:" in stderr
    assert f"\n\nhint: read the logs in {folder}/logs\n" in stderr


def is_agent(process_id: int, node: str) -> bool:
    words = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
    return b"--node-id" in words and words[words.index(b"--node-id") + 1] == node.encode()


def test_the_recorded_run_in_the_readme_kept_its_promises() -> None:
    facts = recorded_facts()
    promised = ("steps lost by survivors", "restarts of survivors", "replicas identical")
    assert [facts[key] for key in promised] == ["0", "0", "yes"]


@pytest.mark.parametrize("seconds", ["-1", "soon", "nan", "1e9"])
def test_seconds_that_are_none_are_refused(seconds: str) -> None:
    assert_refused(hieravg("demo", f"--seconds={seconds}"), found=f"--seconds is '{seconds}'")


def test_a_folder_that_holds_something_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert_refused(hieravg("demo", "--folder", str(tmp_path)), found="which is not empty")
    assert_refused(hieravg("demo", "--folder", str(tmp_path / "mine" / "x")), found="which cannot be used")
