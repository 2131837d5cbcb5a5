"""All benchmarks, one after the other, and the README's tables made of what they found.

A benchmark that misses a figure, or cannot run here, does not keep the others from running. At the end: the one
table of ratios against peers on stdout, the README's parts written anew, and on stderr what was missed or left
as it was, and why. Exit code 1 if a promised figure was missed or a benchmark did not run, 2 for wrong usage.
What each script prints goes beside its figures, as NAME.txt.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from report import documents, figures, markers, peers, tables
from report.documents import Document, IncompleteError
from report.running import QUICK, RESULTS, replace_file

from elastic_hieravg.errors import DocumentError

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"
# Of one benchmark; each has bounds of its own far below.
BOUND_S = 2 * 3600.0
# How long a benchmark that is asked to end may take for it.
END_S = 60.0
REPEATS = 3
LOAD_S = 120.0
PARTS = {"peers": peers.make_peers, **tables.PARTS}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`peers`: flags for the peers that tables show; a script by itself runs others too."""

    name: str
    peers: tuple[str, ...] = ()
    has_repeats: bool = False
    has_load: bool = False

    def flags(self, *, num_repeats: int, load_s: float) -> list[str]:
        repeats = ["--repeats", str(num_repeats)] if self.has_repeats else []
        load = ["--load-s", str(load_s)] if self.has_load else []
        return [*self.peers, *repeats, *load]


BENCHMARKS = (
    Benchmark("plan"),
    Benchmark("averaging"),
    Benchmark("rendezvous", ("--settings", *figures.SETTINGS), has_repeats=True, has_load=True),
    Benchmark("recovery", ("--systems", *figures.SYSTEMS), has_repeats=True),
    Benchmark("metrics", has_repeats=True),
    # Last, because it makes network namespaces and so needs root.
    Benchmark("training"),
)
assert tuple(each.name for each in BENCHMARKS) == documents.NAMES


def run(benchmark: Benchmark, flags: Sequence[str], *, folder: Path) -> str:
    """Why there are no figures of it; nothing if there are, whether or not one was missed."""
    command = [sys.executable, str(FOLDER / f"{benchmark.name}.py"), *flags]
    path = folder / f"{benchmark.name}.json"
    command += ["--results", str(path)]
    before_ns = written_ns(path)
    print(f"{benchmark.name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    began_s = time.monotonic()
    with (folder / f"{benchmark.name}.txt").open("wb") as told:
        process = subprocess.Popen(command, stdout=told)
        try:
            code = process.wait(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            return f"{benchmark.name} was ended: it was not done within {BOUND_S:.0f} s"
        finally:
            end(process)
    took_s = time.monotonic() - began_s
    print(f"{benchmark.name}: {took_s:.0f} s, exit code {code}", file=sys.stderr, flush=True)
    # 1 is a missed figure, but also an exception: then nothing new was written.
    is_whole = code in (0, 1) and written_ns(path) != before_ns
    return "" if is_whole else f"{benchmark.name} did not run to its end: exit code {code}"


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def written_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def read(folder: Path, *, without: Mapping[str, str]) -> tuple[dict[str, Document], list[str]]:
    """What documents there are, but for those of benchmarks that failed; and what is wrong with the rest."""
    found: dict[str, Document] = {}
    problems: list[str] = []
    for name in documents.NAMES:
        path = folder / f"{name}.json"
        if name not in without and path.exists():
            try:
                found[name] = documents.parse(path.read_text(), benchmark=name)
            except (DocumentError, UnicodeDecodeError) as exc:
                problems.append(f"{path.name} is left aside: {exc}")
    return found, problems


def write_page(page: Path, found: Mapping[str, Document]) -> tuple[list[str], list[str]]:
    """Write the parts of the page for which there are figures. What is incomplete and stays; what is wrong."""
    text = page.read_text()
    written: dict[str, str] = {}
    kept: list[str] = []
    problems: list[str] = []
    for part in markers.find(text, known=PARTS):
        try:
            written[part.name] = PARTS[part.name](found)
        except IncompleteError as exc:
            kept.append(f"{page.name}: the part {part.name} stays as it is: {exc}")
        except DocumentError as exc:
            problems.append(f"{page.name}: the part {part.name} stays as it is: {exc}")
    after = markers.rewrite(text, written, known=PARTS)
    if after != text:
        replace_file(page, after)
    return kept, problems


def main() -> int:
    arguments = read_flags()
    folder: Path = arguments.results or (RESULTS / QUICK if arguments.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    chosen = [each for each in BENCHMARKS if each.name in arguments.only and not arguments.tables]
    for benchmark in chosen:
        flags = benchmark.flags(num_repeats=arguments.repeats, load_s=arguments.load_s)
        why = run(benchmark, ["--quick"] if arguments.quick else flags, folder=folder)
        if why:
            failed[benchmark.name] = why
    found, problems = read(folder, without=failed)
    table, missing = peers.make_what_there_is(found)
    if table:
        print(table)
    kept: list[str] = []
    try:
        kept, wrong = write_page(arguments.readme, found)
    except DocumentError as exc:
        wrong = [f"{arguments.readme.name} stays as it is: {exc}"]
    problems += wrong
    looked_at = [each.name for each in chosen] if chosen else list(found)
    missed = [f"{name}: {line}" for name in looked_at if name in found for line in found[name].frame.missed]
    for line in (
        *(f"not in the table: {each}" for each in missing),
        *kept,
        *problems,
        *failed.values(),
        *missed,
    ):
        print(line, file=sys.stderr)
    return 1 if missed or failed or problems else 0


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=documents.NAMES, default=documents.NAMES, help="run these")
    parser.add_argument(
        "--tables", action="store_true", help="run nothing; tables of the figures that are there"
    )
    parser.add_argument("--quick", action="store_true", help="a little of each, and nothing for the README")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of what is run several times")
    parser.add_argument("--load-s", type=float, default=LOAD_S, help="how long rendezvous.py loads the machine")
    parser.add_argument("--results", type=Path, default=None, help="the folder for the figures, as JSON")
    parser.add_argument("--readme", type=Path, default=README, help="the page whose parts are written")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}, which is not 1 or more")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
