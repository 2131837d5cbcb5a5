"""The rules of the repository itself: layers, purity, sizes, pins, and that CI skips nothing."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "elastic_hieravg"
SOURCES = sorted(
    path
    for folder in ("elastic_hieravg", "tests", "benchmarks", "dashboards", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
# What decides without acting. A list of what is allowed, because nobody can list all that reaches outside.
PURE_MEMBERSHIP = (
    "candidacy",
    "decisions",
    "opening",
    "kv",
    "ledger",
    "member",
    "messages",
    "mirror",
    "proposing",
    "records",
    "succession",
)
PURE = [
    PACKAGE / "errors.py",
    *sorted((PACKAGE / "plan").rglob("*.py")),
    *(PACKAGE / "membership" / f"{name}.py" for name in PURE_MEMBERSHIP),
]
PURE_STANDARD = (
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "itertools",
    "json",
    "math",
    "re",
    "types",
    "typing",
    "urllib.parse",
)
PURE_IMPORT = re.compile(
    rf"({'|'.join(PURE_STANDARD)}|elastic_hieravg\.(plan|errors|membership\.({'|'.join(PURE_MEMBERSHIP)})))(\..+)?"
)
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import elastic_hieravg",
        "from elastic_hieravg.cli import main; main(['plan', '--hierarchy=global=4', '--node=a:2', '--json'])",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    loaded = (
        run_python(f"{code}\nimport sys\nprint('modules:', *sys.modules)").rpartition("modules:")[2].split()
    )
    assert "elastic_hieravg.plan.fitting" in loaded
    assert not {"torch", "numpy", "grpc", "etcd3", "prometheus_client", "socket", "logging"} & set(loaded)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES_MAX
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            assert function.end_lineno is not None
            lines = function.end_lineno - function.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{function.name} has {lines} lines"


def imports_in(code: str) -> set[str]:
    """The modules that code imports, wherever it does; a relative one keeps its dots."""
    found: set[str] = set()
    for statement in ast.walk(ast.parse(code)):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            found.add("." * statement.level + (statement.module or ""))
    return found


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_modules_import_only_what_is_allowed(path: Path) -> None:
    assert not {name for name in imports_in(path.read_text()) if not PURE_IMPORT.fullmatch(name)}


def test_every_import_that_is_allowed_is_needed() -> None:
    needed = set().union(*(imports_in(path.read_text()) for path in PURE))
    wanted = {name.partition(".")[0] for name in PURE_STANDARD}
    assert {name.partition(".")[0] for name in needed} == {*wanted, "elastic_hieravg"}


@pytest.mark.parametrize(
    "line",
    [
        "import datetime",
        "import json, tempfile",
        "import concurrent.futures",
        "from concurrent import futures",
        "from platform import node",
        "from typing_extensions import Self",
        "from elastic_hieravg import config",
        "import elastic_hieravg.config",
        "import elastic_hieravg.planning",
        "import elastic_hieravg.membership.service",
        "import urllib.request",
        "from . import topology",
        "def later() -> None:\n    import importlib",
    ],
)
def test_an_import_that_is_not_allowed_is_found(line: str) -> None:
    added = imports_in(f"{PURE[0].read_text()}\n{line}\n")
    assert {name for name in added if not PURE_IMPORT.fullmatch(name)}


def test_pure_modules_call_nothing_that_reaches_outside() -> None:
    outside = {"open", "print", "input", "eval", "exec", "__import__", "globals"}
    for path in PURE:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                assert call.func.id not in outside, f"{path.name}: {call.func.id}"


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("plan/topology.py", "import torch", "Decisions are pure"),
        ("plan/topology.py", "import time", "Decisions are pure"),
        ("membership/decisions.py", "import time", "Decisions are pure"),
        ("membership/member.py", "import elastic_hieravg.membership.service", "Decisions are pure"),
        ("membership/kv.py", "import elastic_hieravg.rendezvous", "Layers"),
        ("errors.py", "import elastic_hieravg.plan", "Layers"),
        ("plan/fitting.py", "import elastic_hieravg.config", "Layers"),
        ("utils.py", "", "Layers"),
    ],
)
def test_the_layers_are_enforced(tmp_path: Path, file: str, line: str, broken: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "elastic_hieravg")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "elastic_hieravg" / file).open("a") as module:
        module.write(f"\n{line}\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    verdicts = re.findall(r"^(Layers|Decisions are pure)[^─]*?(KEPT|BROKEN)", done.stdout, re.MULTILINE)
    assert (broken, "BROKEN") in verdicts, done.stdout
    assert len(verdicts) == 2


def test_every_version_is_pinned() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"]}.union(*project["optional-dependencies"].values())
    assert "pytest" in wanted
    assert wanted <= pins.keys()


def test_every_pip_call_is_constrained() -> None:
    calls = [
        line
        for path in (ROOT / "Makefile", ROOT / ".ci" / "run")
        for line in path.read_text().splitlines()
        if "pip install" in line
    ]
    assert calls
    assert all("-c constraints.txt" in call for call in calls)


MODULES = [
    path.relative_to(ROOT).as_posix() for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"
]


@pytest.mark.parametrize("module", MODULES)
def test_the_map_of_the_code_shows_every_module(module: str) -> None:
    assert f"`{module}`" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.needs("shellcheck", apt="shellcheck")
def test_shell_scripts_pass_shellcheck() -> None:
    subprocess.run(["shellcheck", ROOT / ".ci" / "run"], check=True, timeout=60)


@pytest.mark.parametrize(("ci", "outcome"), [("true", {"errors": 1, "failed": 1}), ("", {"skipped": 2})])
def test_a_skip_is_a_failure_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: dict[str, int]
) -> None:
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.needs("no-such-program", apt="no-such-package")
        def test_runs_a_program():
            raise AssertionError

        def test_skips_itself():
            pytest.skip("not today")
        """
    )
    monkeypatch.setenv("CI", ci)
    done = pytester.runpytest_subprocess("-rs", "-W", "ignore")
    done.assert_outcomes(**outcome)
    assert "test_runs_a_program needs no-such-program: apt-get install no-such-package" in done.stdout.str()
