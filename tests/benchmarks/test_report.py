"""Tables are made of figures, and of nothing else. Pure: no benchmark runs here."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recovery_jobs
import torchrun_jobs
import training_jobs
from report import documents, figures, markers, peers, running, tables, words
from report.documents import IncompleteError

from elastic_hieravg.errors import DocumentError
from tests.benchmarks import papers
from tests.benchmarks.papers import Paper

README = Path(__file__).parent.parent.parent / "README.md"
PARTS = {"peers": peers.make_peers, **tables.PARTS}


def make(name: str, change: Callable[[dict[str, Paper]], object] = lambda _: None) -> list[str]:
    """The lines of a part, of documents with a change in them."""
    found = papers.all_papers()
    change(found)
    return PARTS[name](papers.read(found)).splitlines()


def set_gap(found: dict[str, Paper], event: str, system: str, **values: object) -> None:
    for row in found["recovery"]["events"]:
        if (row["event"], row["system"]) == (event, system):
            row.update(values)


def set_formed(found: dict[str, Paper], event: str, setting: str, **values: object) -> None:
    for row in found["rendezvous"]["torchrun"]:
        if (row["event"], row["setting"]) == (event, setting):
            row.update(values)


# --- tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("plan", "| 125 | 1,000 | 1 ms |  | 2 ms | 3 ms | 24 MB |"),
        ("plan", "| 12,500 | 100,000 | 97 ms | 11.0 times the time | 194 ms | 290 ms | 129 MB |"),
        (
            "averaging",
            "| 2, 1 M in 60 tensors | 87 | 45 | 7.0 (12.4 times faster) | 9.0 | 45 (1.9) |  | 1.4 |",
        ),
        (
            "averaging",
            "| 4, GPT-2, 124 M in 60 | 87 | 45 | 8.0 (10.9) | 9.0 | 54 (1.6) | 31 (2.8) | 1.4 |",
        ),
        (
            "recovery",
            (
                "| event | `hieravg run` | with etcd | torchft 0.2.0, tuned | torchft | torchrun, tuned "
                "| torchrun |"
            ),
        ),
        (
            "recovery",
            "| worker killed | 0.25 | 0.50 | 0.77 | 4.9 | 10.9, all restart | 38.1, all restart |",
        ),
        ("rendezvous", "| worker killed | 1.3 | 42.3 (33 times as long) | 6.2 (4.8) |"),
        ("rendezvous", "| node killed | 1.3 | 42.3 (33) | 6.2 (4.8) |"),
        (
            "rendezvous",
            "| rank 0's node killed, which hosts c10d's store | 1.3 | the job is lost | the job is lost |",
        ),
        ("training", "| | DDP, torchrun | torch's averager, torchrun | elastic_hieravg |"),
        ("training", "| to a loss of 2.14 | 180 s (6.7 times) | 35 s (1.3 times) | 27 s |"),
        (
            "training",
            "| between hosts, as the kernel counted | 13.2 GB (18 times) | 802 MB (1.1 times) | 716 MB |",
        ),
        ("training", "| a round of all ranks |  | 0.42 s | 0.58 s |"),
        ("training", "| survivors: steps lost, processes restarted | 15, all 6 | 15, all 6 | 0, 0 |"),
        (
            "peers",
            (
                "| a round of 10 M parameters, one node of 4 ranks | 8.0 ms | torch's averager | 87 ms | 11 "
                "| 1.4 |"
            ),
        ),
        ("peers", "|  |  | raw all-reduce, not atomic | 45 ms | 0.83, ours is worse | 1.4 |"),
        ("peers", "| standstill, node killed | 0.25 s | torchft, tuned | 0.77 s | 3.1 | 1.0 |"),
        ("peers", "|  |  | torchrun | 38.1 s, all restart | 152 | 1.0 |"),
        ("peers", "|  |  | c10d | job lost | theirs did not go on | 0.7 |"),
        (
            "peers",
            "| the same: loss after all steps | 2.13 | DDP, torchrun | 1.97 | 0.92, ours is worse | 1.1 |",
        ),
    ],
)
def test_a_table_has_the_line(name: str, line: str) -> None:
    assert line in make(name)


@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_tells_of_its_machine_and_fits_the_page(name: str) -> None:
    lines = make(name)
    told = " ".join(lines)
    assert "2 cores, Python 3.11" in told
    assert "load" in told
    assert not [line for line in lines if len(line) > words.WIDTH and not line.startswith("|")]
    rows = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in rows}) <= 1


def test_the_one_table_has_a_row_for_everything_and_every_peer() -> None:
    rows = [line for line in make("peers") if line.startswith("| ")][1:]
    assert len(rows) == 7 + 6 * 4 + 4 * 2 + 4 * 2 + 1


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        (
            "recovery",
            lambda found: set_gap(
                found, "node frozen", "torchrun, tuned", gap_s=None, failure="not within 75 s"
            ),
            "| node frozen | 0.25 | 0.50 | 0.77 | 4.9 | not within 75 | 38.1, all restart |",
        ),
        (
            "recovery",
            lambda found: found["recovery"]["events"].append(
                papers.gap("node frozen", "torchrun, tuned", gap_s=None, failure="job lost")
            ),
            (
                "| node frozen | 0.25 | 0.50 | 0.77 | 4.9 | 10.9, all restart, job lost in 1 of 2 "
                "| 38.1, all restart |"
            ),
        ),
        (
            "peers",
            lambda found: set_gap(found, "node frozen", "hieravg run", gap_s=2.5),
            "| standstill, node frozen | 2.5 s | torchft, tuned | 0.77 s | 0.31, ours is worse | 1.0 |",
        ),
        (
            "peers",
            lambda found: set_gap(found, "node joins", "hieravg run", gap_s=None, failure="job lost"),
            "| standstill, node joins | job lost | torchft, tuned | 0.77 s | ours did not go on | 1.0 |",
        ),
        (
            "peers",
            lambda found: set_formed(
                found, "node added", "c10d, tuned to 3 beats", step_s=None, failure="not within 90 s", load=3.0
            ),
            (
                "| stock torchrun on etcd3, node added: to the next step | 1.3 s | c10d, tuned "
                "| not within 90 s | theirs did not go on | 0.7 to 3.0 |"
            ),
        ),
    ],
)
def test_who_did_not_go_on_is_told_so(
    name: str, change: Callable[[dict[str, Paper]], object], line: str
) -> None:
    assert line in make(name, change)


def test_survivors_of_ours_that_lost_something_are_not_hidden() -> None:
    told = " ".join(make("recovery", lambda found: set_gap(found, "node joins", "hieravg run", steps_lost=2)))
    assert "Of ours a survivor lost up to 2 steps" in told
    assert "No survivor of ours" not in told


# --- what is missing or wrong ---------------------------------------------------------------------------------


def without(found: dict[str, Paper], benchmark: str, key: str, **values: object) -> None:
    rows = found[benchmark][key]
    found[benchmark][key] = [row for row in rows if not values.items() <= row.items()]


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("plan", lambda found: found.pop("plan"), r"there is no plan\.json"),
        ("plan", lambda found: found["plan"].update(is_quick=True), r"plan\.json is of a run with --quick"),
        ("plan", lambda found: found["plan"]["rows"].pop(), "has 2 sizes, not 3"),
        (
            "averaging",
            lambda found: without(found, "averaging", "rows", model="gpt2", num_ranks=4),
            "nothing about gpt2 with 4 ranks",
        ),
        (
            "recovery",
            lambda found: without(found, "recovery", "events", system="torchft, tuned"),
            "nothing about torchft, tuned, worker killed",
        ),
        ("rendezvous", lambda found: found["rendezvous"].update(load=None), "nothing about many agents"),
        (
            "training",
            lambda found: without(found, "training", "runs", system="DDP, torchrun"),
            "nothing about DDP, torchrun",
        ),
        ("peers", lambda found: found.pop("training"), r"there is no training\.json"),
        (
            "peers",
            lambda found: [row["ms"].pop("torchft LocalSGD") for row in found["averaging"]["rows"]],
            "no torchft LocalSGD for 10M with 4 ranks",
        ),
        (
            "peers",
            lambda found: found["training"]["machine"].update(cores=64),
            "of different machines or versions: .*2 cores.*64 cores",
        ),
    ],
)
def test_a_part_whose_figures_are_incomplete_is_not_made(
    name: str, change: Callable[[dict[str, Paper]], object], why: str
) -> None:
    found = papers.all_papers()
    change(found)
    read = papers.read(found)
    with pytest.raises(IncompleteError, match=why):
        PARTS[name](read)


def test_the_terminal_shows_what_there_is_and_says_what_is_missing() -> None:
    found = papers.all_papers()
    del found["training"]
    without(found, "recovery", "events", system="torchft, tuned")
    found["recovery"]["machine"]["torchft"] = None
    table, missing = peers.make_what_there_is(papers.read(found))
    assert "| torchrun, tuned | 10.9 s, all restart | 44 |" in table
    assert "no torchft" in table
    assert missing[0] == "there is no training.json"
    assert "recovery.json has nothing about torchft, tuned, node frozen" in missing
    assert peers.make_what_there_is({})[0] == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", r"plan\.json is not JSON"),
        (
            "[1]",
            r"plan\.json has \[1\], and tables are made of version 1\n\nhint: run benchmarks/plan\.py again",
        ),
        ("{}", "has the version None"),
        (json.dumps({**papers.plan(), "version": 2}), "has the version 2, and tables are made of version 1"),
        (json.dumps({**papers.plan(), "benchmark": "metrics"}), "holds the figures of 'metrics'"),
        (json.dumps({**papers.plan(), "missed": [1]}), r"plan\.json\.missed\[0\] is 1, which is no str"),
        (json.dumps({**papers.plan(), "machine": {"cores": 2}}), "machine has no python, torch"),
        (json.dumps({**papers.plan(), "seconds": None}), "seconds is None, which is no float"),
    ],
)
def test_garbage_is_refused_with_what_was_found(text: str, why: str) -> None:
    with pytest.raises(DocumentError, match=why):
        documents.parse(text, benchmark="plan")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 7}, r"plan\.json, rows is 7, which is no tuple"),
        ({"rows": [7, 7, 7]}, r"rows\[0\] is 7, which is no record"),
        ({"rows": [{"num_nodes": 3}] * 3}, r"rows\[0\] has no num_ranks, fit_s"),
        ({"num_repeats": "many"}, r"num_repeats is 'many', which is no int"),
    ],
)
def test_figures_of_another_kind_are_refused(change: dict[str, Any], why: str) -> None:
    document = papers.read({"plan": {**papers.plan(), **change}})
    with pytest.raises(DocumentError, match=why):
        tables.make_plan(document)


def test_a_document_without_a_key_says_which() -> None:
    paper = papers.plan()
    del paper["hierarchy"]
    read = papers.read({"plan": paper})
    with pytest.raises(DocumentError, match=r"plan\.json, hierarchy is missing"):
        tables.make_plan(read)


def test_names_in_tables_are_those_of_the_scripts() -> None:
    assert set(figures.SYSTEMS) <= {system.name for system in recovery_jobs.SYSTEMS}
    assert set(figures.EVENTS) == set(recovery_jobs.EVENTS)
    assert set(figures.SETTINGS) <= {setting.name for setting in torchrun_jobs.SETTINGS}
    assert set(figures.TORCHRUN_EVENTS) == set(torchrun_jobs.EVENTS)
    assert set(figures.WAYS) == {system.name for system in training_jobs.SYSTEMS}


# --- markers --------------------------------------------------------------------------------------------------

PAGE = "# A\n\n<!-- bench: plan -->\n\nold\n\n<!-- end -->\n\nprose\n<!-- bench: peers -->\n<!-- end -->"


def test_only_what_is_between_markers_is_written() -> None:
    after = markers.rewrite(PAGE, {"plan": "| new |\n"}, known=PARTS)
    assert after == PAGE.replace("old", "| new |")
    both = markers.rewrite(PAGE, {"plan": "| new |", "peers": "a\n\nb"}, known=PARTS)
    assert both.endswith("prose\n<!-- bench: peers -->\n\na\n\nb\n\n<!-- end -->")
    assert markers.rewrite(both, {"plan": "| new |", "peers": "a\n\nb"}, known=PARTS) == both
    assert markers.rewrite(PAGE, {}, known=PARTS) == PAGE


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("<!-- bench: plan -->\nx", "line 1: the part 'plan' has no end"),
        ("x\n<!-- end -->", "line 2: <!-- end --> ends nothing"),
        (
            "<!-- bench: plan -->\n<!-- bench: peers -->\n<!-- end -->",
            "line 2: .* begins inside of the part 'plan'",
        ),
        ("<!-- bench: plans -->\n<!-- end -->", "there is no part 'plans', only averaging, metrics"),
        (PAGE + "\n" + PAGE, "the part 'plan' is there 2 times"),
        ("see <!-- bench: plan -->", "line 1: 'see <!-- bench: plan -->' is no marker"),
    ],
)
def test_markers_that_are_no_pairs_are_refused(page: str, why: str) -> None:
    with pytest.raises(DocumentError, match=why):
        markers.rewrite(page, {"plan": "new"}, known=PARTS)


def test_the_readme_has_every_part_and_stays_the_same_outside_of_them() -> None:
    text = README.read_text()
    assert {part.name for part in markers.find(text, known=PARTS)} == PARTS.keys()
    written = {name: make_part(papers.read(papers.all_papers())) for name, make_part in PARTS.items()}
    after = markers.rewrite(text, written, known=PARTS)
    assert markers.rewrite(after, written, known=PARTS) == after
    assert outside(after) == outside(text)
    assert all(content in after for content in written.values())


def outside(text: str) -> list[str]:
    lines = text.split("\n")
    for part in reversed(markers.find(text, known=PARTS)):
        del lines[part.begin : part.end]
    return lines


# --- reports --------------------------------------------------------------------------------------------------


def test_a_report_says_what_was_missed_and_can_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "plan.json"
    run = running.begin("plan", argparse.Namespace(quick=True, results=path))
    assert running.finish(run, figures={"rows": []}, missed=["7 is not 8"]) == 1
    assert capsys.readouterr().err == "missed: 7 is not 8\n"
    document = documents.parse(path.read_text(), benchmark="plan")
    assert document.frame.missed == ("missed: 7 is not 8",)
    assert document.frame.is_quick
    assert running.finish(run, figures={}, missed=[]) == 0
    assert [each.name for each in path.parent.iterdir()] == ["plan.json"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text("before")
    path.chmod(0o640)
    with pytest.raises(UnicodeEncodeError):
        running.replace_file(path, "after \udc80")
    assert path.read_text() == "before"
    running.replace_file(path, "after")
    assert path.read_text() == "after"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
