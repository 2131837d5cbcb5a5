"""Every command and snippet of the README runs, and prints what the README says it prints.

A `console` block holds commands behind `$ ` and their output; a `python` block may be followed by an
`output` block. With `--regenerate` the outputs are written anew. All other commands are run by a test below,
with addresses of this machine in them, or stand in `NOT_HERE` with the reason why not. A block that is neither
fails.
"""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, get_args_parser

from elastic_hieravg.rendezvous.settings import IGNORED, key_problems
from tests.membership.etcd_servers import free_ports
from tests.metrics import documents
from tests.metrics.page_server import PageServer
from tests.readme_blocks import (
    CHANGED,
    CONFIGURATION,
    PLAYED,
    RECORDED,
    blocks_of,
    commands_of,
    is_configuration,
)

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```(console|python|output)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_console(block: str) -> str:
    """The block with what its commands print now."""
    told = []
    for command in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
        program, *arguments = shlex.split(command)
        assert program == "hieravg"
        path = Path(sys.executable).with_name(program)
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
        told += [f"$ {command}", done.stdout.rstrip("\n"), done.stderr.rstrip("\n")]
    return "\n".join(part for part in told if part) + "\n"


def run_python(block: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), {})
    return printed.getvalue()


def play(text: str) -> str:
    """The README with what its commands and snippets print now."""
    printed = ""

    def again(match: re.Match[str]) -> str:
        nonlocal printed
        kind, block = match.groups()
        if kind == "console":
            block = run_console(block)
        elif kind == "python":
            assert not printed, "the output of the snippet before is not shown"
            printed = run_python(block)
        else:
            block, printed = printed, ""
        return f"```{kind}\n{block}```"

    told = BLOCK.sub(again, text)
    assert not printed, "the output of the last snippet is not shown"
    return told


def test_commands_and_snippets_do_what_the_readme_says(request: pytest.FixtureRequest) -> None:
    text = README.read_text()
    assert len(BLOCK.findall(text)) >= 4
    played = play(text)
    if request.config.getoption("--regenerate"):
        README.write_text(played)
    else:
        assert played == text


# What cannot be run here, and what is done instead.
NOT_HERE = {
    "make demo": "it does its own set-up; tests/demo runs what it runs",
    "make test": "it would run this test",
    "pip install -c constraints.txt .": "it fetches torch; tests/packaging installs the wheel",
    "hieravg status --url http://node-a:9400 --watch": "until Ctrl-C; tests/metrics runs it on a terminal",
    (
        "torchrun --nnodes=2:4 --nproc-per-node=2 --rdzv-backend=etcd3 --rdzv-endpoint=h1:2379,h2:2379,h3:2379 "
        "--rdzv-id=job7 "
        "--rdzv-conf=lease_ttl_s=3,cacert=ca.pem,cert=me.pem,key=me.key,user=me,password_file=pw train.py"
    ): "three machines with certificates; tests/rendezvous runs it on one, and its flags are read below",
}
# There is no cluster and no registry here; tests/k8s checks the manifests and runs their pods' commands.
CLUSTER_PROGRAMS = ("docker", "helm", "kind", "kubectl")
# What was recorded of a run: some words of each, and where what it shows is tested.
RECORDINGS = {
    "plan     before, generation 1": "a moment of `hieravg demo` on a terminal; tests/demo",
    "steps lost by survivors: 0": "the end of that run; tests/demo, and its words are compared below",
}
STATUS = {"hieravg status --url http://node-a:9400", "hieravg status --json"}
JOBS = {
    (
        "hieravg run --nnodes=1:4 --nproc-per-node=2 --rdzv-endpoint=h1:29400 --rdzv-id=job7 "
        "--hierarchy node=8,global=64 train.py"
    ),
    "hieravg run --standalone --nproc-per-node=2 examples/plain_loop.py --steps 200",
}

DOCTOR = "hieravg doctor --nnodes=1:4 --nproc-per-node=2 --rdzv-endpoint=h1:29400 --params 125M"
LISTEN, PEER = "hieravg doctor --listen 9401", "hieravg doctor --peer h2:9401"
RUN_HERE = {*STATUS, *JOBS, DOCTOR, LISTEN, PEER}


def commands() -> set[str]:
    """All of them but those of `console` blocks."""
    found = [
        block for block in blocks_of(README.read_text()) if block.kind not in (*PLAYED, *RECORDED, *CHANGED)
    ]
    return {command for block in found if not is_configuration(block) for command in commands_of(block)}


def of_clusters() -> set[str]:
    return {command for command in commands() if command.split()[0] in CLUSTER_PROGRAMS}


def test_every_command_is_run_or_listed_with_a_reason() -> None:
    unknown = commands() - NOT_HERE.keys() - RUN_HERE - of_clusters()
    assert not unknown, f"run it in a test here, or say in NOT_HERE why that cannot be: {unknown}"


def test_every_command_that_is_listed_is_in_the_readme() -> None:
    assert commands() >= NOT_HERE.keys() | RUN_HERE


def test_commands_for_clusters_name_files_that_exist_and_patches_that_are_json() -> None:
    for command in of_clusters():
        words = shlex.split(command)
        flags = dict(pairwise(words))
        for path in (flags[flag] for flag in ("-k", "-f", "--file") if flag in flags):
            assert (README.parent / path).exists(), command
        if "--patch" in flags:
            assert isinstance(json.loads(flags["--patch"]), dict), command


@pytest.mark.parametrize("command", sorted(JOBS))
def test_jobs_train(command: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    example = README.parent / "examples" / "plain_loop.py"
    here = command.replace("h1:29400", f"127.0.0.1:{port}").replace("examples/plain_loop.py", str(example))
    program, *arguments = shlex.split(here.replace(" train.py", f" {example} --steps 32"))
    done = subprocess.run(
        ["setpriv", "--pdeathsig", "KILL", Path(sys.executable).with_name(program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"HIERAVG_METRICS_PORT": "off", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    digests = re.findall(r"model ([0-9a-f]{12})", done.stdout)
    assert len(digests) == 2, done.stdout + done.stderr
    assert len(set(digests)) == 1


def loop() -> str:
    """The training loop of the README, whole."""
    (found,) = [
        block.text
        for block in blocks_of(README.read_text())
        if block.kind == "python" and "eh.join()" in block.text
    ]
    return found


def test_the_loop_is_the_same_under_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{loop()}\nprint('step', job.step, 'of', job.world_size)\n")
    done = subprocess.run(
        [
            *(
                "setpriv",
                "--pdeathsig",
                "KILL",
                Path(sys.executable).with_name("hieravg"),
                "run",
                "--standalone",
            ),
            *("--nproc-per-node=2", "--metrics-port=off", script),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 160 of 2") == 2, done.stdout + done.stderr


def test_what_changes_in_a_loop_is_what_the_whole_one_has() -> None:
    (changed,) = [block.text for block in blocks_of(README.read_text()) if block.kind in CHANGED]
    new = "\n".join(line[1:] for line in changed.splitlines() if not line.startswith("-"))
    calls = {ast.unparse(each.func) for each in ast.walk(ast.parse(new)) if isinstance(each, ast.Call)}
    assert {"eh.join", "job.averager", "averager.step"} <= calls
    whole = {ast.unparse(each.func) for each in ast.walk(ast.parse(loop())) if isinstance(each, ast.Call)}
    # Those of the reader's own script.
    assert calls - whole <= {"draw", "loss_of"}


@pytest.mark.parametrize("command", sorted(STATUS))
def test_status_is_told(command: str) -> None:
    server = PageServer(documents.small_job())
    try:
        program, *arguments = shlex.split(command.replace("http://node-a:9400", server.url))
        done = subprocess.run(
            [Path(sys.executable).with_name(program), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"HIERAVG_METRICS_HOST": "127.0.0.1", "HIERAVG_METRICS_PORT": str(server.port)},
        )
    finally:
        server.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert server.asked["/status"] == 1


def test_the_doctor_looks_at_this_machine_and_at_the_way_to_another() -> None:
    ports = free_ports(2)

    def here(command: str) -> list[str]:
        told = command.replace("h1:29400", f"127.0.0.1:{ports[0]}").replace("h2:", "127.0.0.1:")
        program, *arguments = shlex.split(told.replace("9401", str(ports[1])))
        return ["setpriv", "--pdeathsig", "KILL", str(Path(sys.executable).with_name(program)), *arguments]

    with subprocess.Popen(here(LISTEN), stderr=subprocess.PIPE, text=True) as listening:
        try:
            assert listening.stderr is not None
            assert f"listening at port {ports[1]}" in listening.stderr.readline()
            for command in (DOCTOR, PEER):
                done = subprocess.run(here(command), capture_output=True, text=True, timeout=120, check=False)
                # What is wrong with this machine is no matter here.
                assert done.returncode in (0, 1), done.stderr
                assert re.search(r"^\d+ problems?, ", done.stdout, re.MULTILINE), done.stdout
                assert ("bandwidth" in done.stdout) == (command == PEER)
        finally:
            listening.kill()


def test_the_flags_of_torchrun_are_known_to_torch_and_to_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else torch sets it, and says so.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (command,) = [each for each in commands() if each.startswith("torchrun ")]
    flags = get_args_parser().parse_args(shlex.split(command)[1:])
    config, _, arguments = config_from_args(flags)
    assert (config.rdzv_backend, config.min_nodes, config.max_nodes, arguments[-1]) == (
        "etcd3",
        2,
        4,
        "train.py",
    )
    assert not list(
        key_problems({key: str(value) for key, value in config.rdzv_configs.items() if key not in IGNORED})
    )


def recordings() -> list[str]:
    return [block.text for block in blocks_of(README.read_text()) if block.kind in RECORDED]


def test_every_recording_is_listed() -> None:
    found = [words for text in recordings() for words in RECORDINGS if words in text]
    assert len(recordings()) == len(found)
    assert sorted(found) == sorted(RECORDINGS)


def test_the_demo_still_tells_the_facts_that_are_recorded() -> None:
    (facts,) = [text for text in recordings() if "steps lost by survivors: 0" in text]
    source = "".join(path.read_text() for path in (README.parent / "elastic_hieravg" / "demo").glob("*.py"))
    names = [line.partition(":")[0] for line in facts.splitlines()]
    # Its own facts; before them come the faults, whose names are made of their kinds.
    own = names[names.index("steps lost by survivors") :]
    assert len(own) >= 8
    assert not {name for name in own if name not in source}


def test_every_fence_says_what_it_holds() -> None:
    kinds = {block.kind for block in blocks_of(README.read_text())}
    assert kinds <= {*PLAYED, *CONFIGURATION, *RECORDED, *CHANGED, "bash", "indented"}


def test_blocks_are_found_however_they_are_written() -> None:
    text = (
        "a\n\n    make x  # why\n    y \\\n      --z\n\nb\n    no\n\n```bash\nc 1\n```\n"
        "\n    a: 1\n\n```yaml\nb: 2\n```\n"
    )
    blocks = list(blocks_of(text))
    assert [(block.kind, block.line) for block in blocks] == [
        ("indented", 3),
        ("bash", 10),
        ("indented", 14),
        ("yaml", 16),
    ]
    assert [command for block in blocks[:2] for command in commands_of(block)] == ["make x", "y --z", "c 1"]
    assert [is_configuration(block) for block in blocks] == [False, False, True, True]


def test_targets_named_in_the_readme_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    targets = [command.split()[1] for command in commands() if command.startswith("make ")]
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_files_named_in_the_readme_exist() -> None:
    text = README.read_text()
    linked = re.findall(r"\]\(([\w./-]+)\)", text)
    named = re.findall(r"`((?:examples|benchmarks|dashboards|k8s|tests)/[\w./-]*)`", text)
    assert linked
    assert named
    assert not [path for path in {*linked, *named} if not (README.parent / path).exists()]
