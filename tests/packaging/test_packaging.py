"""What people install: the source archive, the wheel that is built from it, and the wheel in an empty venv.

torch is not fetched again: once the wheel is installed, the venv is shown where the other packages are.
"""

import email
import email.message
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import elastic_hieravg

ROOT = Path(__file__).parent.parent.parent
CLIENT = Path(__file__).with_name("client.py")
WITHIN_S = 120.0
VERSION = elastic_hieravg.__version__
PLAN = ["plan", "--hierarchy", "node=4,global=16", "--node", "a:2", "--node", "b:2"]


def run(command: Sequence[str | Path], cwd: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, built of a copy: a build leaves things behind."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("elastic_hieravg", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    run([sys.executable, "-c", code], copy)
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip builds it of the source archive. Not isolated: nothing is fetched."""
    out = tmp_path_factory.mktemp("wheel")
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out)]
    run([sys.executable, "-m", "pip", "wheel", *flags, source], out)
    (found,) = out.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' folder of a venv that has the wheel."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv], ROOT)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
    run([*pip, "install", "--no-deps", "--no-index", wheel], ROOT)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A plain path: what is installed there as editable is not found through it.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def members(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_source_archive_has_what_a_build_needs_and_nothing_else(source: Path) -> None:
    assert source.name == f"elastic_hieravg-{VERSION}.tar.gz"
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2].partition("/")[0] for name in archive.getnames()} - {""}
    expected = {
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "elastic_hieravg",
        "pyproject.toml",
        "setup.cfg",
    }
    assert names - {"elastic_hieravg.egg-info"} == expected


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"elastic_hieravg-{VERSION}-py3-none-any.whl"
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "elastic_hieravg").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"elastic_hieravg/py.typed", "elastic_hieravg/metrics/page.html"} < package
    assert {name for name in members(wheel) if ".dist-info/" not in name} == package


def metadata(wheel: Path) -> email.message.Message:
    (name,) = [name for name in members(wheel) if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(zipfile.ZipFile(wheel).read(name))


def test_the_metadata_say_what_it_is(wheel: Path) -> None:
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("elastic_hieravg", VERSION)
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert found["License-Expression"] == "BSD-3-Clause"
    assert found["Requires-Python"] == ">=3.11"
    assert found["Description-Content-Type"] == "text/markdown"
    assert str(found.get_payload()).startswith("# elastic_hieravg")
    assert found["Summary"]
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    # There is no address that could be given.
    assert not found.get_all("Project-URL")
    assert not found["Home-page"]
    needed = {text for text in found.get_all("Requires-Dist", []) if "extra ==" not in text}
    assert needed == {"etcd3", "numpy", "prometheus-client", "rich", "torch"}


def test_the_installed_package_is_the_wheel_and_its_commands_run(installed: Path, tmp_path: Path) -> None:
    where = run([installed / "python", "-c", "import elastic_hieravg as eh; print(eh.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert run([installed / "hieravg", "--version"], tmp_path) == f"hieravg {VERSION}\n"
    here = run([Path(sys.executable).with_name("hieravg"), *PLAN], tmp_path)
    assert run([installed / "hieravg", *PLAN], tmp_path) == here
    code = (
        "from importlib.metadata import entry_points;"
        "(etcd3,) = entry_points(group='torchrun.handlers', name='etcd3');"
        "print(etcd3.value)"
    )
    assert run([installed / "python", "-c", code], tmp_path) == "elastic_hieravg.rendezvous:etcd3\n"


def test_a_typed_program_is_checked_against_the_installed_package(installed: Path, tmp_path: Path) -> None:
    # A copy: beside the repository the checker would take the package from there.
    client = Path(shutil.copy(CLIENT, tmp_path))
    mypy: list[str | Path] = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        installed / "python",
    ]
    assert "no issues found" in run([*mypy, client], tmp_path)
    # And it does look: a wrong type is found.
    text = client.read_text()
    assert text.count("averager.step(num_samples=len(batch))") == 1
    client.write_text(text.replace("num_samples=len(batch)", "num_samples=str(batch)"))
    done = subprocess.run(
        [*mypy, client], capture_output=True, text=True, timeout=WITHIN_S, check=False, cwd=tmp_path
    )
    assert 'incompatible type "str"' in done.stdout
    assert "Found 1 error in 1 file" in done.stdout
