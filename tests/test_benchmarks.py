"""The benchmarks run and report. How fast anything is, is not tested here: the machine may be busy."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_averaging_benchmark_reports_a_table_and_json(tmp_path: Path) -> None:
    results = tmp_path / "averaging.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "averaging.py", "--quick", "--results", results],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    # A missed figure is exit 1 and a line that says which.
    assert done.returncode in (0, 1), done.stderr
    missed = [line for line in done.stderr.splitlines() if line.startswith("missed: ")]
    assert bool(missed) == (done.returncode == 1), done.stderr
    assert "| model | torch averager | flat all-reduce |" in done.stdout
    assert "| 1M (1.0 M in 60) |" in done.stdout
    found = json.loads(results.read_text())
    assert found["missed"] == missed
    (row,) = found["rows"]
    assert row["num_ranks"] == 2
    assert {"torch averager", "ours, same host", "ours, process group"} <= row["ms"].keys()
    assert all(ms > 0 for ms in row["ms"].values())
