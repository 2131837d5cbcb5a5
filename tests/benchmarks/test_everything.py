"""`make bench`: all of them run, whatever becomes of one, and only whole figures reach the page."""

import json
import subprocess
import sys
from pathlib import Path

import everything
import pytest
from report.documents import NAMES

from tests.benchmarks import papers

ROOT = Path(__file__).parent.parent.parent
PAGE = (
    "# A\n\n<!-- bench: plan -->\n\nold plan\n\n<!-- end -->\n\n"
    "<!-- bench: peers -->\n\nold peers\n\n<!-- end -->\n"
)
# A benchmark that does as its name says.
SCRIPT = """
import json, pathlib, sys
name = pathlib.Path(sys.argv[0]).stem
path = pathlib.Path(sys.argv[sys.argv.index("--results") + 1])
papers = json.loads((pathlib.Path(__file__).parent / "papers.json").read_text())
ends = json.loads((pathlib.Path(__file__).parent / "ends.json").read_text())
print("the table of", name)
end = ends.get(name, 0)
if end in (0, 1):
    papers[name]["missed"] = ["missed: a figure"] * end
    path.write_text(json.dumps(papers[name]))
sys.exit(abs(end))
"""


def run_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, ends: dict[str, int] | None = None
) -> int:
    """With stand-ins for all benchmarks. `ends`: with which code; below 0 without figures."""
    for name in NAMES:
        (folder / f"{name}.py").write_text(SCRIPT)
    (folder / "papers.json").write_text(json.dumps(papers.all_papers()))
    (folder / "ends.json").write_text(json.dumps(ends or {}))
    (folder / "page.md").write_text(PAGE)
    monkeypatch.setattr(everything, "FOLDER", folder)
    monkeypatch.setattr(
        sys,
        "argv",
        ["everything.py", "--results", str(folder / "results"), "--readme", str(folder / "page.md"), *flags],
    )
    return everything.main()


def test_all_run_and_the_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_them(tmp_path, monkeypatch) == 0
    told = capfd.readouterr()
    assert told.out.startswith("| measured | ours | beside | theirs |")
    assert "the table of" not in told.out
    assert (tmp_path / "results" / "recovery.txt").read_text() == "the table of recovery\n"
    page = (tmp_path / "page.md").read_text()
    assert "old" not in page
    assert "| 12,500 | 100,000 |" in page
    assert "--settings etcd3, defaults c10d" in told.err
    assert "--repeats 3" in told.err


def test_a_missed_figure_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_them(tmp_path, monkeypatch, "--repeats", "2", ends={"averaging": 1}) == 1
    told = capfd.readouterr()
    assert told.err.splitlines()[-1] == "averaging: missed: a figure"
    assert (tmp_path / "results" / "training.json").exists()
    # Missed, and shown all the same.
    assert "old" not in (tmp_path / "page.md").read_text()
    assert "--repeats 2" in told.err


@pytest.mark.parametrize("code", [-2, -1])
def test_a_benchmark_that_cannot_run_leaves_its_part_as_it_is(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Figures of an earlier run, which are not this one's.
    papers.write(papers.all_papers(), tmp_path / "results")
    assert run_them(tmp_path, monkeypatch, ends={"training": code}) == 1
    told = capfd.readouterr()
    assert f"training did not run to its end: exit code {-code}" in told.err
    assert "page.md: the part peers stays as it is: there is no training.json" in told.err
    page = (tmp_path / "page.md").read_text()
    assert "old peers" in page
    assert "old plan" not in page
    # What else there is is shown.
    assert "| standstill, node killed |" in told.out


def test_tables_are_made_without_running_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = papers.all_papers()
    found["plan"]["missed"] = ["missed: a figure"]
    papers.write(found, tmp_path / "results")
    assert run_them(tmp_path, monkeypatch, "--tables") == 1
    assert not list((tmp_path / "results").glob("*.txt"))
    assert "old" not in (tmp_path / "page.md").read_text()
    assert capfd.readouterr().err == "plan: missed: a figure\n"


def test_garbage_is_told_and_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    papers.write(papers.all_papers(), tmp_path / "results")
    (tmp_path / "results" / "plan.json").write_text('{"version": 9}')
    assert run_them(tmp_path, monkeypatch, "--tables") == 1
    told = capfd.readouterr().err
    assert "plan.json is left aside: plan.json has the version 9, and tables are made of version 1" in told
    assert "hint: run benchmarks/plan.py again, or remove the file" in told
    page = (tmp_path / "page.md").read_text()
    assert "old plan" in page
    assert "old peers" not in page


def test_a_page_with_broken_markers_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    papers.write(papers.all_papers(), tmp_path / "results")
    monkeypatch.setattr(sys.modules[__name__], "PAGE", PAGE.replace("<!-- end -->", "", 1))
    assert run_them(tmp_path, monkeypatch, "--tables") == 1
    assert (tmp_path / "page.md").read_text() == PAGE
    assert "begins inside of the part 'plan'" in capfd.readouterr().err


def test_one_real_benchmark_runs_to_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    command = [sys.executable, str(ROOT / "benchmarks" / "everything.py"), "--quick", "--only", "plan"]
    command += ["--results", str(tmp_path), "--readme", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "| 1,250 | 10,000 |" in (tmp_path / "plan.txt").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["is_quick"]
    # Quick figures are for nobody.
    assert page.read_text() == PAGE
    assert "page.md: the part plan stays as it is: plan.json is of a run with --quick" in done.stderr
