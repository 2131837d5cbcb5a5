"""What the demo shows while it runs, on terminals of several kinds."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from elastic_hieravg.demo.record import Record, Round
from elastic_hieravg.demo.screen import SKIPPED, PlainScreen, PlanShown, Shown, generation_text, render
from elastic_hieravg.metrics.status_reading import EventShown, read_status
from tests.metrics import documents

WITHIN_S = 60.0


def text_of(shown: Shown) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(render(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_shows_nodes_plans_loss_and_progress() -> None:
    status = read_status(documents.small_job())
    now = PlanShown(7, status.levels)
    before = PlanShown(6, status.levels[-1:])
    told = text_of(Shown(12.3, "b comes back", 2, 6, status, before, now, (4.0, 2.0, 1.5)))
    for part in (
        "12 s",
        "b comes back",
        "generation 7, 6 ranks, step 1234",
        "a   training   ranks {0-1}",
        "before, generation 6",
        "now, generation 7",
        "every 64 steps {0-5}",
        "loss 1.50  █▂▁",
    ):
        assert part in told


def test_shows_a_node_that_is_lost_since_when_and_why() -> None:
    document = documents.small_job()
    node = document["nodes"][1]
    node |= {"state": "lost", "reason": "its process ended", "since_s": document["now_s"] - 3.0}
    assert "b   lost   for 3 s  its process ended" in text_of(Shown(1.0, "", 0, 6, read_status(document)))


def test_shows_a_node_that_left_as_such() -> None:
    told = text_of(Shown(1.0, "", 0, 6, read_status(documents.calm_job())))
    assert "c   left   for 12 s  it left on purpose" in told


@pytest.mark.parametrize(
    ("kind", "reason", "number", "told"),
    [
        ("join", "c joined", 3, "generation 3, join: c joined"),
        ("lost", "lost a: its lease ended", 3, "generation 3: lost a: its lease ended"),
        # One or two may have come between two looks at the status.
        ("join", "c joined", 5, "generation 5, join: c joined"),
        ("lost", "lost a: its lease ended", 8, f"generation 8: lost a: its lease ended; {SKIPPED}"),
    ],
)
def test_a_generation_is_told_with_its_reason_and_a_jump_with_its_cause(
    kind: str, reason: str, number: int, told: str
) -> None:
    event = EventShown(0.0, number, kind, reason, (), ())
    assert generation_text(event, before=2) == told


def test_shows_something_before_anything_is_known() -> None:
    assert "a, b and c find each other" in text_of(Shown(0.0, "a, b and c find each other", 0, 6))


def test_plain_lines_say_when(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen()
    screen.show(Shown(1.0, "nothing", 0, 6))
    screen.say(12.34, "node a is killed")
    screen.close()
    assert capsys.readouterr() == ("", "  12.3 s  node a is killed\n")


@pytest.mark.parametrize(
    ("terminal", "ci", "chosen"),
    [
        ("xterm", "", "LiveScreen"),
        ("xterm", "false", "LiveScreen"),
        ("xterm", "true", "PlainScreen"),
        ("dumb", "", "PlainScreen"),
    ],
)
def test_a_terminal_that_understands_it_is_drawn_on(terminal: str, ci: str, chosen: str) -> None:
    code = (
        "from elastic_hieravg.demo.screen import open_screen;"
        "screen = open_screen(); screen.close(); print(type(screen).__name__)"
    )
    master, slave = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            timeout=WITHIN_S,
            check=True,
            env={**os.environ, "TERM": terminal, "CI": ci},
        )
    finally:
        os.close(slave)
        os.close(master)
    assert done.stdout.split() == [chosen]


def test_no_terminal_is_plain_whatever_the_environment_says() -> None:
    code = "from elastic_hieravg.demo.screen import open_screen; print(type(open_screen()).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
        env={**os.environ, "TERM": "xterm", "CI": "", "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"},
    )
    assert (done.stdout.split(), done.stderr) == (["PlainScreen"], "")


# --- what is read ---------------------------------------------------------------------------------------------


def test_a_line_is_read_when_it_is_whole_and_only_once(tmp_path: Path) -> None:
    record = Record(tmp_path)
    path = tmp_path / "a.17"
    line = (
        '{"event": "step", "at_s": 1.0, "generation": 1, "world": 2, "step": 5, "loss": 2.0, "busy_s": 0.1}\n'
    )
    path.write_text(line + line[:20])
    record.read()
    record.read()
    assert [step.step for step in record.workers[17].steps] == [5]
    path.write_text(line + line.replace('"step": 5', '"step": 6'))
    record.read()
    assert [step.step for step in record.workers[17].steps] == [5, 6]
    assert record.last_step() == 6
    assert [worker.process_id for worker in record.of("a")] == [17]


def test_nodes_have_met_when_all_their_workers_and_nobody_else_had_a_round(tmp_path: Path) -> None:
    record = Record(tmp_path)
    line = (
        '{{"event": "round", "at_s": {at_s}, "generation": 1, "world": {world}, "step": 16, "digest": "x"}}\n'
    )
    (tmp_path / "a.1").write_text(line.format(at_s=1.0, world=2))
    record.read()
    assert record.met({"a", "b"}, slots=1, since_s=0.0) is None
    (tmp_path / "b.2").write_text(line.format(at_s=1.5, world=2))
    record.read()
    assert record.met({"a", "b"}, slots=1, since_s=0.0) == Round(1.5, "b", 2, 1, 2, 16, "x")
    assert record.met({"a", "b"}, slots=1, since_s=1.2) is None
    assert record.met({"a"}, slots=1, since_s=0.0) is None
