"""`hieravg demo`: three nodes on this machine train a small model, are hurt and heal; the promises are checked.

stdout is the facts, one a line; what happens meanwhile is talk, on stderr. Invariant: everything that was
started has ended when the command does.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from elastic_hieravg.errors import Problem, UsageError

EXIT_DONE, EXIT_FAILED, EXIT_LEFT = 0, 1, 143
# Long enough for all faults on a laptop, and some training around them.
DEFAULT_SECONDS = 60.0
SECONDS_MAX = 24 * 3600.0
PICTURE = "demo.svg"

EPILOG = """\
example:
  hieravg demo --folder /tmp/demo

Needs no other machine and nothing that is not installed with hieravg. It exits with 0 if every promise held,
else with 1, and says which did not.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "demo",
        help="see a job survive on this machine: nodes are killed, frozen, added, asked to leave",
        description="Train a small model on three nodes that are processes of this machine. One node is\n"
        "killed and comes back, another freezes, a fourth joins, one is asked to leave. At the end: the\n"
        "facts, and a picture of it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds",
        default=str(DEFAULT_SECONDS),
        metavar="SECONDS",
        help=f"how long it takes at least ({DEFAULT_SECONDS:.0f}); the faults take their time anyway",
    )
    parser.add_argument(
        "--folder", type=Path, metavar="PATH", help="where the picture and the logs go; a new one in /tmp"
    )
    parser.add_argument("--no-faults", action="store_true", help="only train")
    parser.set_defaults(run=run)


class _Ended(BaseException):
    """Somebody asked this process to end. Not an error: nothing may catch it on its way out."""


def run(flags: argparse.Namespace) -> int:
    from elastic_hieravg.demo.facts import broken_promises, find_facts, summary  # noqa: PLC0415
    from elastic_hieravg.demo.picture import draw  # noqa: PLC0415
    from elastic_hieravg.demo.screen import open_screen  # noqa: PLC0415
    from elastic_hieravg.demo.story import Story  # noqa: PLC0415

    seconds = read_seconds(flags.seconds)
    folder = _make_folder(flags.folder)
    try:
        with _ended_by_signals(), contextlib.closing(open_screen()) as screen:
            found = Story(folder, screen, seconds=seconds, has_faults=not flags.no_faults).play()
    except KeyboardInterrupt:
        print("hieravg: stopped; everything the demo had started has ended", file=sys.stderr)
        return EXIT_FAILED
    except _Ended:
        return EXIT_LEFT
    facts = find_facts(found)
    picture = folder / PICTURE
    picture.write_text(draw(found, facts))
    for line in (*summary(facts), f"picture: {picture}", f"logs: {folder / 'logs'}"):
        print(line)
    broken = broken_promises(facts)
    for sentence in broken:
        print(f"hieravg: a promise is broken: {sentence}", file=sys.stderr)
    return EXIT_FAILED if broken else EXIT_DONE


def read_seconds(text: str) -> float:
    """
    >>> read_seconds("90")
    90.0
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= SECONDS_MAX:
        raise UsageError(Problem(f"--seconds is {text!r}", f"give a number of seconds, 0 to {SECONDS_MAX:.0f}"))
    return seconds


def _make_folder(given: Path | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="hieravg-demo-"))
    try:
        given.mkdir(parents=True, exist_ok=True)
        is_empty = not any(given.iterdir())
    except OSError as exc:
        message = f"--folder is {given}, which cannot be used: {exc.strerror}"
        raise UsageError(Problem(message, "give a new folder where this user may write")) from exc
    if not is_empty:
        raise UsageError(
            Problem(f"--folder is {given}, which is not empty", "give one that does not exist yet")
        )
    return given.resolve()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Being asked to end is noticed where it can be cleaned up after."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
