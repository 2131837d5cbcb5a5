"""The command, as a person or a script calls it: a process of its own, judged by its output and exit code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HIERAVG = Path(sys.executable).with_name("hieravg")
NODES = ["--node", "a:4:zone=z1", "--node", "b:4:zone=z1", "--node", "c:2:zone=z2"]
SPLIT_RACK = ["--node", "a:1:zone=z1,rack=r1", "--node", "b:1:zone=z2,rack=r1"]
PLAN = ["plan", "--hierarchy", "node=4,zone=16,global=64", *NODES]


def hieravg(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HIERAVG, *arguments], capture_output=True, text=True, timeout=60, check=False)


def many_nodes(num_nodes: int) -> list[str]:
    """A command whose output grows with the nodes."""
    nodes = [part for index in range(num_nodes) for part in ("--node", f"n{index}:8")]
    return [str(HIERAVG), "plan", "--hierarchy", "node=4,global=8", *nodes, "--json"]


def traffic(*, inside_nodes: float, between_zones: float) -> dict[str, float]:
    return {
        "inside_nodes_bytes": inside_nodes,
        "between_nodes_bytes": 0,
        "between_zones_bytes": between_zones,
    }


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
    assert (change["lost"], change["joined"], change["restarted"]) == (["b"], [], [])
    assert change["moves"][0] == {"node_id": "c", "local_rank": 0, "rank_before": 8, "rank": 4}
    assert change["kept"][0] == {"ranks": [0, 1, 2, 3], "levels": ["node"], "built_in_generation": 1}
    assert [group["ranks"] for group in change["new"]] == [[0, 1, 2, 3, 4, 5]]
    assert change["gone"] == [
        {"ranks_before": [4, 5, 6, 7], "levels": ["node"], "built_in_generation": 1},
        {"ranks_before": [0, 1, 2, 3, 4, 5, 6, 7], "levels": ["zone"], "built_in_generation": 1},
        {"ranks_before": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "levels": ["global"], "built_in_generation": 1},
    ]


def test_json_tells_the_cost_of_rounds_and_steps() -> None:
    hierarchy = ["--hierarchy", "node=4,global=16"]
    nodes = ["--node", "a:2", "--node", "b:2:zone=z2"]
    document = json.loads(hieravg("plan", *hierarchy, *nodes, "--params", "40", "--json").stdout)
    # Two nodes of two copies each; between the nodes, in a ring of two, each sends one model's worth.
    node_round = traffic(inside_nodes=640, between_zones=0)
    global_round = traffic(inside_nodes=640, between_zones=320)
    assert document["cost"] == {
        "model_bytes": 160,
        "levels": [
            {
                "name": "node",
                "rounds_per_step": 3 / 16,
                "per_round": node_round,
                "per_step": traffic(inside_nodes=120, between_zones=0),
            },
            {
                "name": "global",
                "rounds_per_step": 1 / 16,
                "per_round": global_round,
                "per_step": traffic(inside_nodes=40, between_zones=20),
            },
        ],
        "per_step": traffic(inside_nodes=160, between_zones=20),
        "synchronous_per_step": global_round,
    }


def test_json_tells_of_a_group_kept_twice_when_it_was_built() -> None:
    document = json.loads(hieravg(*PLAN, "--lose", "b", "--join", "d:4:zone=z2", "--json").stdout)
    lost, joined = document["changes"]
    assert (lost["generation"], lost["lost"], lost["joined"]) == (2, ["b"], [])
    assert (joined["generation"], joined["lost"], joined["joined"]) == (3, [], ["d"])
    assert joined["kept"] == [
        {"ranks": [0, 1, 2, 3], "levels": ["node", "zone"], "built_in_generation": 1},
        {"ranks": [4, 5], "levels": ["node"], "built_in_generation": 1},
    ]
    assert {group["built_in_generation"] for group in joined["new"]} == {3}
    assert joined["gone"] == [
        {"ranks_before": [0, 1, 2, 3, 4, 5], "levels": ["global"], "built_in_generation": 2}
    ]


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
        "hieravg: the job would pause: level size-8 averages groups of 8 ranks, "
        "which does not divide the world of 6 (a:4 b:2)\n\n"
        "hint: give --on-misfit repair to average over uneven groups, or wait for 2 more ranks\n"
    )


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "find out what would go wrong"),
        (["fly"], "invalid choice: 'fly'"),
        (["plan", "--node", "a:1"], "--hierarchy"),
        ([*PLAN, "--warm", "1"], "hieravg plan: error: unrecognized arguments: --warm"),
        (["plan", "--heirarchy", "node=4"], "unrecognized arguments: --heirarchy; did you mean --hierarchy?"),
        (["status", "node-a"], "hieravg status: error: unrecognized arguments: node-a"),
        ([*PLAN, "--on-misfit", "panic"], "invalid choice: 'panic'"),
    ],
)
def test_wrong_flags_are_exit_code_2_with_the_usage(arguments: list[str], found: str) -> None:
    done = hieravg(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: hieravg")
    assert found in done.stderr


def assert_refused(done: subprocess.CompletedProcess[str], *, found: str) -> None:
    """Exit code 2, what was found, a hint, and nothing a reader cannot use."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hieravg: ")
    assert found in done.stderr
    assert "\n\nhint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["plan", "--hierarchy", "global=4"], "there are no nodes"),
        (["plan", "--hierarchy", "", "--node", "a:1"], "the hierarchy is empty"),
        (["plan", "--hierarchy", "node=0,global=4", "--node", "a:1"], "level node has the period 0"),
        (["plan", "--hierarchy", "node=-4,global=8", "--node", "a:1"], "level node has the period -4"),
        (["plan", "--hierarchy", "node=16,zone=4,global=64", *NODES], "not longer than the 16 of node"),
        (["plan", "--hierarchy", "node=4,global=8,zone=16", *NODES], "level zone comes after global"),
        (["plan", "--hierarchy", "size-8=2,size-4=4,global=8", *NODES], "not larger than the 8 of size-8"),
        (["plan", "--hierarchy", "node=4,global=4", "--node", "a:1"], "not longer than the 4 of node"),
        (["plan", "--hierarchy", "node=4,global=6", "--node", "a:1"], "not a multiple of the 4"),
        (["plan", "--hierarchy", "node=4", "--node", "a:1"], "has no level global"),
        (["plan", "--hierarchy", "global=64:int8", "--node", "a:1"], "there are no level options yet"),
        (["plan", "--hierarchy", "rack=4,global=8", "--node", "a:1"], "level rack is unknown"),
        (["plan", "--hierarchy", "rack=4,global=8", *SPLIT_RACK], "rack r1 is in more than one zone"),
        ([*PLAN, "--node", "d:1"], "it is missing on d"),
        ([*PLAN, "--node", "a:1:zone=z1"], "node id a is used by 2 nodes"),
        ([*PLAN, "--node", "d:0:zone=z1"], "node d has 0 slots"),
        ([*PLAN, "--nodes-file", "/nonexistent"], "cannot be read"),
        ([*PLAN, "--lose", "z"], "node z cannot be lost"),
        ([*PLAN, "--lose", "a", "--lose", "b", "--lose", "c"], "every node is lost"),
        ([*PLAN, "--join", "a:1:zone=z1"], "node id a is used by 2 nodes"),
        ([*PLAN, "--params", "many"], "--params is 'many'"),
        ([*PLAN, "--params", "9" * 400], "--params is"),
        ([*PLAN, "--lose", "9" * 5000], "cannot be lost: there is no such node"),
        ([*PLAN, "--lose", "a", "--lose", "a"], "node a is lost 2 times"),
        ([*PLAN, "--warmup-steps", "-1"], "--warmup-steps is '-1'"),
        ([*PLAN, "--warmup-steps", "x"], "--warmup-steps is 'x'"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_hint_and_no_traceback(arguments: list[str], found: str) -> None:
    assert_refused(hieravg(*arguments), found=found)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('[{"node_id": "d", "slots": 2', "is not JSON: Expecting ',' delimiter"),
        ('{"nodes": []}', "does not hold a list of nodes"),
        ('[{"node_id": "d", "slots": "2"}]', 'node 1, slots is "2", text, not a whole number'),
    ],
)
def test_a_bad_nodes_file_is_bad_input(tmp_path: Path, content: str, found: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(content)
    assert_refused(hieravg(*PLAN, "--nodes-file", str(path)), found=found)


# Unbuffered, an output fails while it is printed; buffered, a small one fails only when it is flushed, and
# Python keeps it and tries again at exit.
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("num_nodes", [1, 3000])
def test_a_full_disk_is_one_line_and_exit_code_1(num_nodes: int, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            many_nodes(num_nodes),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr == "hieravg: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_gets_no_traceback(unbuffered: str) -> None:
    with subprocess.Popen(
        many_nodes(3000),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "{\n"
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == ""


def test_a_reader_that_never_came_gets_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    # Small and buffered, so that it fails when it is flushed.
    done = subprocess.run(
        many_nodes(1),
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_every_flag_of_ours_shows_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    # Wide enough that no default is broken into two lines.
    monkeypatch.setenv("COLUMNS", "300")
    told = hieravg("run", "--help").stdout
    _, ours = told.split("\nelastic_hieravg:\n")
    flags = [" ".join(part.split()) for part in re.split(r"\n(?=  --)", ours.partition("\nexample:")[0])[1:]]
    assert len(flags) > 10
    assert [flag for flag in flags if "(default: " not in flag] == []
    for shown in ("node=8,global=64", "in-place", "repair", "the host's name", "3", "25", "0", "9400", "plain"):
        assert any(flag.endswith(f"(default: {shown})") for flag in flags), shown
    # Of torchrun's own those that are others here.
    theirs = " ".join(told.split())
    assert "restarts before failing. (default: 3)" in theirs
    assert "(default: c10d)" in theirs


def test_version_and_help() -> None:
    assert hieravg("--version").stdout.startswith("hieravg 0.")
    assert "plan" in hieravg("--help").stdout
    assert "example:" in hieravg("plan", "--help").stdout
