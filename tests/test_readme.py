"""Every command and snippet of the README runs, and prints what the README says it prints.

A `console` block holds commands behind `$ ` and their output; a `python` block may be followed by an
`output` block. With `--regenerate` the outputs are written anew.
"""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_every_code_block_is_one_that_is_run() -> None:
    fences = re.findall(r"^```(\w+)$", README.read_text(), re.MULTILINE)
    assert set(fences) <= {"console", "python", "output"}


def test_targets_named_in_the_readme_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README.read_text(), re.MULTILINE):
        assert f"\n{target}:" in makefile
