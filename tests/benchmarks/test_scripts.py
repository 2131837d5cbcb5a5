"""The benchmarks run and report. How fast anything is, is not tested here: the machine may be busy."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import recovery
import recovery_jobs
import rendezvous
import torchrun_jobs
from report import figures
from report.documents import Document, parse, rows

ROOT = Path(__file__).parent.parent.parent


def run_quickly(name: str, folder: Path, *, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """What the benchmark prints, and the figures it leaves behind."""
    results = folder / "results.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, "--quick", "--results", results],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=folder,
    )
    # A missed figure is exit 1 and a line that says which.
    assert done.returncode in (0, 1), done.stderr
    missed = [line for line in done.stderr.splitlines() if line.startswith("missed: ")]
    assert bool(missed) == (done.returncode == 1), done.stderr
    found: dict[str, Any] = json.loads(results.read_text())
    assert found["missed"] == missed
    assert found["is_quick"]
    return done.stdout, found


def as_document(found: dict[str, Any]) -> Document:
    """As those read it who make tables."""
    return parse(json.dumps(found), benchmark=found["benchmark"])


def test_the_planner_benchmark_reports_a_table_and_json(tmp_path: Path) -> None:
    printed, found = run_quickly("plan.py", tmp_path, timeout_s=120)
    assert "| nodes | ranks | fit |" in printed
    assert [row.num_ranks for row in rows(as_document(found), "rows", figures.PlanRow)] == [1000, 10_000]


def test_the_metrics_benchmark_reports_a_table_and_json(tmp_path: Path) -> None:
    printed, found = run_quickly("metrics.py", tmp_path, timeout_s=300)
    assert "| counted, served, scraped every second |" in printed
    assert [run["is_counted"] for run in found["runs"]] == [True, False]
    assert found["num_repeats"] == 1
    assert as_document(found).machine.cores == os.cpu_count()


def test_the_averaging_benchmark_reports_a_table_and_json(tmp_path: Path) -> None:
    printed, found = run_quickly("averaging.py", tmp_path, timeout_s=120)
    assert "| model | torch averager | flat all-reduce |" in printed
    assert "| 1M (1.0 M in 60) |" in printed
    (row,) = found["rows"]
    assert row["num_ranks"] == 2
    assert {"torch averager", "ours, same host", "ours, process group"} <= row["ms"].keys()
    assert all(ms > 0 for ms in row["ms"].values())
    (read,) = rows(as_document(found), "rows", figures.RoundRow)
    assert read.raw_ms > 0
    assert read.limit_ms > 0


def test_the_rendezvous_benchmark_reports_tables_and_json(tmp_path: Path) -> None:
    printed, found = run_quickly("rendezvous.py", tmp_path, timeout_s=300)
    assert "| worker killed | etcd3, defaults |" in printed
    assert "| run | join | generations | detection | adoption |" in printed
    assert "| live nodes dropped |" in printed
    (outcome,) = found["torchrun"]
    assert outcome["failure"] or 0 < outcome["process_s"] < outcome["step_s"]
    (join,) = found["joins"]
    assert join["num_agents"] == 8
    assert join["join_s"] > 0
    assert join["loss"]["total_s"] > 0
    assert found["load"]["num_agents"] == 8
    assert found["load"]["num_runnable"] > 2
    assert found["load"]["num_dropped"] or len(found["load"]["kills"]) == 3
    (read,) = rows(as_document(found), "torchrun", figures.Formed)
    assert read.setting == figures.ETCD3
    assert as_document(found).machine.etcd == "3.5.1"


def test_the_recovery_benchmark_reports_tables_and_json(tmp_path: Path) -> None:
    printed, found = run_quickly("recovery.py", tmp_path, timeout_s=300)
    assert "| worker killed | hieravg run |" in printed
    assert "| a world of one |" in printed
    (outcome,) = found["events"]
    assert not outcome["failure"]
    assert outcome["gap_s"] >= outcome["ordinary_s"] > 0
    assert outcome["recovery_s"] > 0
    # However busy the machine is, survivors keep their processes and their steps.
    assert outcome["num_restarted"] == 0
    assert outcome["steps_lost"] == 0
    (read,) = rows(as_document(found), "events", figures.Gap)
    assert (read.system, read.num_survivors) == (figures.RUN, 4)
    (rest,) = found["rest"]
    assert rest["num_calls"] > 0
    assert rest["call_us"] > 0
    assert found["alone_us"] > 0
    assert len(rest["core_shares"]) == 3


def test_what_a_peer_did_not_get_over_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither under `recovery.py` nor under `rendezvous.py`; what ours promised is tried every time."""
    tried: list[tuple[str, str]] = []

    def live(system: Any, events: Sequence[str], *_: object, **__: object) -> list[Any]:
        tried.extend((system.name, event) for event in events)
        if isinstance(system, recovery_jobs.System):
            return [recovery_jobs.Outcome(event, system.name, 1.0, failure="job lost") for event in events]
        return [torchrun_jobs.Outcome(event, system.name, 1.0, failure="job lost") for event in events]

    etcd: Any = None
    monkeypatch.setattr(recovery, "measure_life", live)
    systems = [
        system for system in recovery_jobs.SYSTEMS if system.name in (figures.RUN, figures.TORCHRUN_TUNED)
    ]
    recovery.measure_events(etcd, tmp_path, systems=systems, events=["node killed"], num_repeats=2)
    monkeypatch.setattr(rendezvous, "measure_life", live)
    settings = [each for each in torchrun_jobs.SETTINGS if each.name in (figures.ETCD3, figures.C10D_TUNED)]
    rendezvous.measure_torchrun(etcd, tmp_path, settings=settings, events=["node killed"], num_repeats=2)
    names = [name for name, _ in tried]
    assert {name: names.count(name) for name in names} == {
        figures.RUN: 2,
        figures.TORCHRUN_TUNED: 1,
        figures.ETCD3: 2,
        figures.C10D_TUNED: 1,
    }


HOSTS = """
import subprocess, sys
from hosts import network
with network(2, rate="200mbit") as hosts:
    python = [sys.executable, "-c"]
    serve = "import socket; s = socket.create_server(('', 9000)); print('ready', flush=True); c, _ = s.accept()"
    serve += "; print(socket.gethostname(), sum(iter(lambda: len(c.recv(65536)), 0)))"
    send = f"import socket; socket.create_connection(('h1', 9000)).sendall(bytes({NUM_BYTES}))"
    before = hosts.sent_bytes()
    server = subprocess.Popen([*hosts.on(1), *python, serve], stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    subprocess.run([*hosts.on(0), *python, send], check=True, timeout=60)
    # Whoever sends is done before it has left.
    told = server.communicate(timeout=60)[0].split()
    print(hosts.hub, hosts.sent_bytes() - before, *told, flush=True)
    input()
"""


@pytest.mark.needs("ip", apt="iproute2")
@pytest.mark.needs("hostname", apt="hostname")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_hosts_count_what_they_send_and_nothing_of_them_is_left() -> None:
    def start() -> "tuple[subprocess.Popen[str], list[str]]":
        code = HOSTS.replace("{NUM_BYTES}", "1_000_000")
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", code]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT / "benchmarks"
        )
        assert process.stdout is not None
        return process, process.stdout.readline().split()

    def namespaces() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    killed, (killed_hub, sent_bytes, name, received_bytes) = start()
    assert name == "h1"
    assert int(received_bytes) == 1_000_000
    # Headers and acknowledgements come to the payload; each byte is counted once.
    assert 1_000_000 < int(sent_bytes) < 1_300_000
    killed.kill()
    killed.communicate()
    assert killed_hub in namespaces()
    ended, (ended_hub, *_) = start()
    assert killed_hub not in namespaces()
    ended.communicate("\n", timeout=60)
    assert ended.returncode == 0
    assert ended_hub not in namespaces()
