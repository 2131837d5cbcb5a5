"""The command, as a person or a script calls it: a process of its own, judged by its output and exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HIERAVG = Path(sys.executable).with_name("hieravg")
NODES = ["--node", "a:4:zone=z1", "--node", "b:4:zone=z1", "--node", "c:2:zone=z2"]
PLAN = ["plan", "--hierarchy", "node=4,zone=16,global=64", *NODES]


def hieravg(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HIERAVG, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_plan_shows_levels_groups_schedule_and_cost() -> None:
    done = hieravg(*PLAN, "--warmup-steps", "100", "--params", "125M")
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "  zone    every 16 steps  {0-7} {8-9}",
        "  warm-up  synchronous up to step 100",
        "  global   after steps 164, 228, 292, 356, ...",
        "  a round, of 500 MB models    inside nodes  between nodes  between zones",
        "    global                     7 GB          667 MB         1.33 GB",
    ):
        assert line in done.stdout.splitlines()


def test_plan_shows_what_a_loss_and_a_join_change() -> None:
    done = hieravg(*PLAN, "--lose", "b", "--join", "d:4:zone=z2")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("change to")] == [
        "change to generation 2: lost b",
        "change to generation 3: joined d",
    ]
    assert "  kept  {0-3}      node    built in generation 1" in lines
    assert "  moved  c  {8-9} -> {4-5}" in lines


def test_json_is_one_document() -> None:
    done = hieravg(*PLAN, "--json")
    document = json.loads(done.stdout)
    assert list(document) == [
        "generation",
        "world_size",
        "digest",
        "warmup_steps",
        "ranks",
        "levels",
        "next_due_steps",
        "notes",
    ]
    assert document["generation"] == 1
    assert document["world_size"] == 10
    assert document["ranks"][8] == {"rank": 8, "node_id": "c", "local_rank": 0}
    assert document["levels"][1] == {
        "name": "zone",
        "period_steps": 16,
        "groups": [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]],
    }
    assert document["next_due_steps"] == {"node": 4, "zone": 16, "global": 64}
    assert document["notes"] == []


def test_json_tells_changes_and_cost_when_asked() -> None:
    document = json.loads(hieravg(*PLAN, "--lose", "b", "--params", "1M", "--json").stdout)
    assert document["generation"] == 2
    assert document["world_size"] == 6
    assert document["notes"] == [
        {
            "level": "zone",
            "reason": "level zone has the same groups as node inside it: "
            "they are one level, node, every 4 steps",
        }
    ]
    (change,) = document["changes"]
    assert change["lost"] == ["b"]
    assert change["moves"][0] == {"node_id": "c", "local_rank": 0, "rank_before": 8, "rank": 4}
    assert change["kept"][0] == {"ranks": [0, 1, 2, 3], "levels": ["node"], "built_in_generation": 1}
    assert [group["ranks"] for group in change["new"]] == [[0, 1, 2, 3, 4, 5]]
    assert document["cost"]["levels"][0]["per_round"]["inside_nodes_bytes"] == 4 * 2 * 4_000_000


def test_nodes_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text('[{"node_id": "d", "slots": 2, "labels": {"zone": "z2"}}]')
    document = json.loads(hieravg(*PLAN, "--nodes-file", str(path), "--json").stdout)
    assert document["world_size"] == 12


def test_strict_says_why_the_job_would_hold() -> None:
    strict = ["--on-misfit", "strict"]
    done = hieravg("plan", "--hierarchy", "size-8=4,global=16", "--node", "a:4", "--node", "b:2", *strict)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "hieravg: the job would hold: level size-8 averages groups of 8 ranks, "
        "which does not divide the world of 6 (a:4 b:2)\n\n"
        'hint: set `on_misfit = "repair"` to average over uneven groups, or wait for 2 more ranks\n'
    )


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["plan", "--node", "a:1"], "--hierarchy"),
        (["plan", "--hierarchy", "global=4"], "there are no nodes"),
        (["plan", "--hierarchy", "", "--node", "a:1"], "the hierarchy is empty"),
        (["plan", "--hierarchy", "node=0,global=4", "--node", "a:1"], "level node has the period 0"),
        (["plan", "--hierarchy", "node=4,global=4", "--node", "a:1"], "not longer than the 4 of node"),
        (["plan", "--hierarchy", "node=4,global=6", "--node", "a:1"], "not a multiple of the 4"),
        (["plan", "--hierarchy", "node=4", "--node", "a:1"], "has no global level"),
        (["plan", "--hierarchy", "global=64:int8", "--node", "a:1"], "there are no level options yet"),
        (["plan", "--hierarchy", "rack=4,global=8", "--node", "a:1"], "level rack is unknown"),
        ([*PLAN, "--node", "d:1"], "it is missing on d"),
        ([*PLAN, "--node", "a:1:zone=z1"], "node id a is used by 2 nodes"),
        ([*PLAN, "--node", "d:0:zone=z1"], "node d has 0 slots"),
        ([*PLAN, "--nodes-file", "/nonexistent"], "cannot be read"),
        ([*PLAN, "--lose", "z"], "node z cannot be lost"),
        ([*PLAN, "--lose", "a", "--lose", "b", "--lose", "c"], "all 3 nodes are lost"),
        ([*PLAN, "--join", "a:1:zone=z1"], "node id a is used by 2 nodes"),
        ([*PLAN, "--params", "many"], "'many' is not a number of parameters"),
        ([*PLAN, "--params", "9" * 400], "is not a number of parameters"),
        ([*PLAN, "--lose", "9" * 5000], "cannot be lost: it is not there"),
        ([*PLAN, "--lose", "a", "--lose", "a"], "node a is lost 2 times"),
        ([*PLAN, "--warm", "1"], "unrecognized arguments: --warm"),
        ([*PLAN, "--warmup-steps", "-1"], "--warmup-steps is '-1'"),
        ([*PLAN, "--warmup-steps", "x"], "--warmup-steps is 'x'"),
        ([*PLAN, "--on-misfit", "panic"], "invalid choice: 'panic'"),
    ],
)
def test_bad_input_is_exit_code_2_with_words_and_no_traceback(arguments: list[str], found: str) -> None:
    done = hieravg(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert found in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    many = [part for index in range(3000) for part in ("--node", f"n{index}:8")]
    command = [str(HIERAVG), "plan", "--hierarchy", "node=4,global=8", *many, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "{\n"
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == ""


def test_version_and_help() -> None:
    assert hieravg("--version").stdout.startswith("hieravg 0.")
    assert "plan" in hieravg("--help").stdout
    assert "example:" in hieravg("plan", "--help").stdout
