"""`hieravg status`, as a person or a script calls it, judged by its output and exit code."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_hieravg.cli import main
from elastic_hieravg.cli.status import ASKED_AGAIN_MAX, DOCUMENT_BYTES_MAX, read_url
from elastic_hieravg.errors import UsageError
from elastic_hieravg.metrics.status_reading import read_status
from elastic_hieravg.metrics.status_text import WORKERS_SHOWN_MAX
from tests.membership.etcd_servers import free_ports
from tests.metrics import documents
from tests.metrics.page_server import SILENCE, PageServer

HIERAVG = Path(sys.executable).with_name("hieravg")
WITHIN_S = 120.0
ESCAPE = "\x1b"


@pytest.fixture
def server() -> Iterator[PageServer]:
    found = PageServer(documents.small_job())
    yield found
    found.close()


def status(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HIERAVG, "status", *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
        env=os.environ | environment,
    )


def told(capsys: pytest.CaptureFixture[str], server: PageServer) -> str:
    """The same without a process of its own, for its text."""
    assert main(["status", "--url", server.url]) == 0
    return capsys.readouterr().out


# --- as a process ---------------------------------------------------------------------------------------------


def test_shows_the_job_plainly_where_there_is_no_terminal(server: PageServer) -> None:
    # FORCE_COLOR is for terminals; a file stays plain.
    done = status("--url", server.url, FORCE_COLOR="1", TERM="xterm-256color")
    assert (done.returncode, done.stderr) == (0, "")
    assert ESCAPE not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "demo"
    assert "step 1,234   48 steps/s   goodput 97 %   3 nodes (at least 1, at most 4)" in lines[1]
    assert "  nothing" in lines
    tree = lines[lines.index("nodes and workers") + 2 :][:4]
    assert [line[:10].rstrip() for line in tree] == ["  zone z1", "    rack r", "      a", "        wo"]
    (node,) = [line for line in lines if line.startswith("      a ")]
    assert node.split()[:4] == ["a", "training", "1,234", "19.5"]
    (widest,) = [line for line in lines if line.startswith("  global ")]
    for part in (
        "64 steps",
        "step 1,216",
        "41 ms",
        "247 kB",
        "between zones",
        "step 1,280, in 46",
        "a,b,c{0-5}",
    ):
        assert part in widest
    assert not [line for line in lines if line != line.rstrip()]


def test_json_is_the_document(server: PageServer) -> None:
    done = status("--url", f"{server.url}/", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == server.answer


def test_the_environment_says_where(server: PageServer) -> None:
    done = status("--json", HIERAVG_METRICS_HOST="0.0.0.0", HIERAVG_METRICS_PORT=str(server.port))
    assert json.loads(done.stdout) == server.answer
    flag_wins = status("--url", server.url, "--json", HIERAVG_METRICS_PORT="auto")
    assert flag_wins.returncode == 0


def test_says_what_to_do_if_no_agent_answers() -> None:
    (port,) = free_ports(1)
    done = status("--url", f"http://127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"hieravg: no agent answers at http://127.0.0.1:{port}/status: ")
    assert "Connection refused" in done.stderr
    assert "hint: check that the job runs" in done.stderr
    assert "Traceback" not in done.stderr


def test_watch_needs_a_terminal(server: PageServer) -> None:
    done = status("--url", server.url, "--watch")
    assert (done.returncode, done.stdout) == (2, "")
    assert "not a terminal" in done.stderr
    assert server.asked["/status"] == 0


def test_watch_redraws_on_a_terminal_until_it_is_interrupted(server: PageServer) -> None:
    with terminal("--url", server.url, "--watch") as shown:
        shown.wait_for("demo")
        assert ESCAPE in shown.text
        server.answer = documents.lost_job("c")
        shown.wait_for("is lost for 12 s")
        server.close()
        shown.wait_for("no answer for")
        server.answer = documents.lost_job("b")
        server.open()
        shown.wait_for("generation 8, 11 s ago: lost b")
        shown.process.send_signal(signal.SIGINT)
        assert shown.process.wait(WITHIN_S) == 0
        # Back from the other screen, with the last of it left to be read.
        shown.wait_for("\x1b[?1049l")


class Terminal:
    """The command on a terminal, and everything it wrote to it."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self.text = ""
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        # The other end of a terminal that is closed is an error, not an end.
        with contextlib.suppress(OSError):
            while chunk := os.read(self._descriptor, 65536):
                self.text += chunk.decode(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until it is written; what was there before does not count."""
        deadline_s = time.monotonic() + WITHIN_S
        while text not in self._plain():
            assert time.monotonic() < deadline_s, f"not within {WITHIN_S} s: {text!r} in {self.text[-3000:]!r}"
            time.sleep(0.05)

    def _plain(self) -> str:
        return self.text + re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._thread.join(WITHIN_S)
        os.close(self._descriptor)


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    own, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", str(HIERAVG), "status", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "160", "LINES": "60"},
    )
    os.close(theirs)
    shown = Terminal(process, own)
    try:
        yield shown
    finally:
        shown.close()


# --- what it is told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (503, "HTTP 503"),
        (302, "HTTP 302"),
        (b"<html>", "is not JSON"),
        (b"\xff\xfe", "is not text"),
        (b"[" * 100_000, "is not JSON"),
        ([], "has no version"),
        ({"version": 2}, "has version 2, and this command reads version 1"),
        (b" " * (DOCUMENT_BYTES_MAX + 1), "more than"),
    ],
)
def test_refuses_what_is_no_status(
    capsys: pytest.CaptureFixture[str], server: PageServer, answer: object, why: str
) -> None:
    server.answer = answer
    assert main(["status", "--url", server.url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert why in err
    assert "hint: " in err


def test_waits_for_no_one_for_ever(
    capsys: pytest.CaptureFixture[str], server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_hieravg.cli.status.ANSWER_S", 0.5)
    server.answer = SILENCE
    assert main(["status", "--url", server.url]) == 1
    assert "timed out" in capsys.readouterr().err
    with dripping() as url:
        assert main(["status", "--url", url]) == 1
    assert "is not done after" in capsys.readouterr().err


@contextlib.contextmanager
def dripping() -> Iterator[str]:
    """A server that never ends its answer, byte by byte."""
    is_over = threading.Event()

    def drip(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while not is_over.wait(0.05):
                    connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join(WITHIN_S)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:9400", "http://h:9400/status"),
        ("http://h:9400/", "http://h:9400/status"),
        ("http://h:9400/status", "http://h:9400/status"),
        ("https://gate/job7/", "https://gate/job7/status"),
        ("http://[::1]:9400", "http://[::1]:9400/status"),
    ],
)
def test_reads_the_address(given: str, url: str) -> None:
    assert read_url(given) == url


@pytest.mark.parametrize(
    "given",
    [
        "",
        "h:9400",
        "9400",
        "file:///etc/passwd",
        "ftp://h",
        "http://",
        "http://h:x",
        "http://h:99999",
        "http://a b",
    ],
)
def test_refuses_what_is_no_address(given: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        read_url(given)


def test_the_address_is_the_default_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HIERAVG_METRICS_HOST", "HIERAVG_METRICS_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert read_url(None) == "http://127.0.0.1:9400/status"
    monkeypatch.setenv("HIERAVG_METRICS_HOST", "::")
    assert read_url(None) == "http://[::1]:9400/status"
    monkeypatch.setenv("HIERAVG_METRICS_PORT", "auto")
    with pytest.raises(UsageError, match="is not the number of a port"):
        read_url(None)


# --- what it shows --------------------------------------------------------------------------------------------


def test_shows_what_needs_attention_first(capsys: pytest.CaptureFixture[str], server: PageServer) -> None:
    server.answer = documents.troubled_job()
    lines = told(capsys, server).splitlines()
    start, end = lines.index("what needs attention"), lines.index("nodes and workers")
    assert [line.split()[0] for line in lines[start + 1 : end - 1]] == [
        "store",
        "nodes",
        "worker",
        "lost",
        "round",
        "late",
        "round",
        "cost",
        "slow",
        "stale",
    ]
    assert "next, wait: d is alive and not ready yet" in lines
    assert any(line.startswith("      c") and "for 12 s: its process ended" in line for line in lines)
    assert any("note: level global has the same groups" in line for line in lines)
    server.answer = documents.held_job()
    assert " held  level size-2 averages groups of 2 ranks" in told(capsys, server)


def test_who_starts_ended_or_left_needs_no_attention(
    capsys: pytest.CaptureFixture[str], server: PageServer
) -> None:
    server.answer = documents.calm_job()
    lines = told(capsys, server).splitlines()
    assert lines[lines.index("what needs attention") + 1].strip() == "nothing"
    (left,) = [line.split() for line in lines if line.startswith("      c ")]
    # Nothing of what it told before it left.
    assert left == ["c", "left", "for", "12", "s:", "it", "left", "on", "purpose"]
    assert sum("worker" in line and " starting " in line for line in lines) == 2
    # The script's own loss is the only one.
    assert [line.split()[0] for line in lines if "loss" in line] == ["loss"]
    assert any(re.search("generation 6 +lost +lost c: its process ended", line) for line in lines)
    assert any("a node sent" in line for line in lines)


def test_a_large_job_has_a_line_for_each_node(capsys: pytest.CaptureFixture[str], server: PageServer) -> None:
    server.answer = documents.large_job()
    text = told(capsys, server)
    assert len(re.findall(r"^      node-\d+ ", text, re.MULTILINE)) == 64
    assert WORKERS_SHOWN_MAX < 64 * 8
    assert "worker 0" not in text
    assert "and 58 more" in text
    assert max(len(line) for line in text.splitlines()) <= 180


def test_asks_again_while_nodes_have_not_told_of_themselves(
    capsys: pytest.CaptureFixture[str], server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer["nodes"][1]["age_s"] = None
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        server.answer["nodes"][1]["age_s"] = 0.5 if len(naps) == 2 else None

    monkeypatch.setattr(time, "sleep", nap)
    told(capsys, server)
    assert server.asked["/status"] == 3
    # It gives up, too: a node may have no way to tell.
    server.answer["nodes"][1]["age_s"] = None
    told(capsys, server)
    assert server.asked["/status"] == 3 + 1 + ASKED_AGAIN_MAX


def test_half_a_document_breaks_nothing(capsys: pytest.CaptureFixture[str], server: PageServer) -> None:
    for document in documents.hollow_documents():
        server.answer = document
        text = told(capsys, server)
        assert not re.search(r"\b(None|nan|inf)\b", text)


def test_text_of_the_document_does_nothing_to_the_terminal(
    capsys: pytest.CaptureFixture[str], server: PageServer
) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\r\n[red]x[/red]:smile:\x9b31m"
    document = documents.lost_job("b", reason=hostile)
    document["run_id"] = document["nodes"][0]["node_id"] = hostile
    document["nodes"][0]["labels"] = {"zone": hostile}
    server.answer = document
    text = told(capsys, server)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "[red]x[/red]:smile:" in text
    assert read_status({"values": {"x": float("nan"), "y": 10**400}}).values == (("x", None), ("y", None))
