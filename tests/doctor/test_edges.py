"""What asks the outside: ports, processes that are ended in time, and the machine that runs this."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_hieravg.config import MetricsPlace
from elastic_hieravg.doctor import children, machine, ports
from elastic_hieravg.doctor.children import Question, ask_module, look_up
from elastic_hieravg.doctor.findings import Severity
from tests.membership.etcd_servers import free_ports
from tests.metrics import documents
from tests.metrics.page_server import PageServer

LOOPBACK = "127.0.0.1"
# On a busy machine a process takes seconds to start.
WITHIN_S = 60.0


@contextlib.contextmanager
def drip() -> Iterator[int]:
    """A server that says a byte now and then, for ever."""
    with socket.create_server((LOOPBACK, 0)) as server:
        over = threading.Event()

        def serve() -> None:
            with contextlib.suppress(OSError):
                sock, _ = server.accept()
                with sock:
                    while not over.wait(0.05):
                        sock.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            with contextlib.suppress(OSError):
                socket.create_connection(server.getsockname(), timeout=1).close()
            thread.join(WITHIN_S)
            assert not thread.is_alive()


# --- ports ----------------------------------------------------------------------------------------------------


def test_a_free_metrics_port_is_well_and_stays_free() -> None:
    (port,) = free_ports(1)
    place = MetricsPlace(LOOPBACK, port)
    assert ports.check_metrics_port(place).severity is Severity.OK
    socket.create_server((LOOPBACK, port)).close()
    assert ports.check_metrics_port(None).severity is Severity.ABSENT
    assert ports.check_metrics_port(MetricsPlace(LOOPBACK, 0)).severity is Severity.OK


def test_a_metrics_port_that_somebody_else_has_is_a_warning_within_a_bound() -> None:
    with drip() as port:
        began_s = time.monotonic()
        found = ports.check_metrics_port(MetricsPlace(LOOPBACK, port))
        assert time.monotonic() - began_s < WITHIN_S
    assert (found.severity, found.found) == (Severity.WARNING, f"{LOOPBACK}:{port} is taken")


def test_an_agent_that_runs_already_is_known_by_its_job() -> None:
    server = PageServer(documents.small_job())
    try:
        port = int(server.url.rpartition(":")[2].strip("/"))
        place = MetricsPlace(LOOPBACK, port)
        agent = ports.ask_agent(place)
        found = ports.check_metrics_port(place)
    finally:
        server.close()
    assert agent is not None
    assert agent.step_s is not None
    assert (found.severity, agent.run_id in found.found) == (Severity.NOTE, True)


def test_a_host_that_is_none_of_this_machine_is_a_warning() -> None:
    assert ports.check_metrics_port(MetricsPlace("192.0.2.77", 9400)).severity is Severity.WARNING


def test_listening_is_tried_where_others_will_connect() -> None:
    assert ports.check_listening(LOOPBACK).severity is Severity.OK
    found = ports.check_listening("192.0.2.77")
    assert (found.severity, "192.0.2.77" in found.found) == (Severity.PROBLEM, True)
    assert ports.check_listening("").severity is Severity.ABSENT


def test_an_endpoint_is_free_taken_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    assert ports.check_endpoint(LOOPBACK, port, is_here=True).severity is Severity.OK
    assert ports.check_endpoint(LOOPBACK, port, is_here=False).severity is Severity.NOTE
    with socket.create_server((LOOPBACK, port)):
        assert ports.check_endpoint(LOOPBACK, port, is_here=True).severity is Severity.NOTE
        assert ports.check_endpoint(LOOPBACK, port, is_here=False).severity is Severity.OK
    # Full, and nobody takes connections: as if a firewall dropped what goes there.
    monkeypatch.setattr(ports, "CONNECT_S", 0.2)
    with socket.create_server((LOOPBACK, 0), backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        found = ports.check_endpoint(LOOPBACK, server.getsockname()[1], is_here=False)
    assert found.severity is Severity.WARNING


# --- processes ------------------------------------------------------------------------------------------------


def test_names_are_looked_up_both_ways() -> None:
    there, back, nobody = (
        Question("localhost"),
        Question(LOOPBACK, is_reverse=True),
        Question("no.such.invalid"),
    )
    found = look_up([there, back, nobody, there], timeout_s=WITHIN_S)
    assert LOOPBACK in found[there].found
    assert found[back].found
    assert (found[nobody].found, bool(found[nobody].why)) == ((), True)


def test_a_lookup_that_takes_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_LOOKUP", "import time; time.sleep(1000)")
    question = Question("h1")
    began_s = time.monotonic()
    found = look_up([question], timeout_s=0.3)[question]
    assert time.monotonic() - began_s < WITHIN_S
    assert (found.found, found.seconds) == ((), 0.3)
    assert "no answer" in found.why


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit code -11"),
        ("raise SystemExit('the driver is missing')", "exit code 1: the driver is missing"),
        ("print('no JSON')", "no JSON object"),
        ("print('[1]')", "no JSON object"),
        ("print()", "no JSON object"),
        ("import time; time.sleep(1000)", "no answer within"),
    ],
)
def test_a_probe_that_breaks_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    (tmp_path / "broken_probe.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = ask_module("broken_probe", timeout_s=1.0 if "sleep" in code else WITHIN_S)
    assert isinstance(found, str)
    assert why in found


def test_what_is_printed_before_the_answer_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chatty_probe.py").write_text("print('warning: old driver')\nprint('{\"a\": 1}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ask_module("chatty_probe", timeout_s=WITHIN_S) == {"a": 1}


# --- the machine ----------------------------------------------------------------------------------------------


def test_this_machine_is_read() -> None:
    found = machine.read_machine()
    assert found.cores > 0
    assert LOOPBACK in found.addresses
    assert found.memory_bytes is not None
    assert found.shared_memory is not None
    assert found.unwritable == ()
    assert sys.platform == "linux"


def test_a_folder_that_takes_no_files_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_folders", lambda: ("/proc/nowhere",))
    assert machine.read_machine().unwritable == ("/proc/nowhere: No such file or directory",)


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "1000", "memory.current": "400"}, 1.5, (1000, 600)),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({"cpu.max": "", "memory.max": ""}, None, None),
    ],
)
def test_a_containers_share_counts(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: float | None, memory: tuple[int, int] | None
) -> None:
    whole, read = machine.read_machine(), machine._text

    def text(path: str) -> str:
        return files.get(Path(path).name, "") if path.startswith("/sys/fs/cgroup/") else read(path)

    monkeypatch.setattr(machine, "_text", text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    found = machine.read_machine()
    assert found.cores == (cores or 4.0)
    assert (found.memory_bytes, found.available_bytes) == (
        memory or (whole.memory_bytes, found.available_bytes)
    )
