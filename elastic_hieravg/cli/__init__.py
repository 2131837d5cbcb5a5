"""The command `hieravg`. stdout is data, stderr is talk.

Each subcommand is a module with `add_parser` and a function that returns the exit code; this file only
chooses among them and turns our errors into messages.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from elastic_hieravg import __version__
from elastic_hieravg.cli import demo, doctor, plan, run, status
from elastic_hieravg.cli.parsing import Parser
from elastic_hieravg.errors import HierAvgError, InputError

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="hieravg",
        description="Fault-tolerant training that averages models at several levels.",
        epilog="hieravg COMMAND --help shows the flags of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hieravg {__version__}")
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    plan.add_parser(commands)
    run.add_parser(commands)
    status.add_parser(commands)
    demo.add_parser(commands)
    doctor.add_parser(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    try:
        if given[:1] == ["run"]:
            return run.main(given[1:])
        return _run(parser.parse_args(given))
    except HierAvgError as exc:
        print(f"hieravg: {exc}", file=sys.stderr)
        return EXIT_USAGE if isinstance(exc, InputError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("hieravg: stopped by Ctrl-C", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader (`head`, a pager) has what it wanted. Python would complain once more when it
        # flushes stdout at exit, so that goes nowhere.
        _discard_stdout()
        return EXIT_FAILED
    except OSError as exc:
        print(f"hieravg: the output cannot be written: {exc.strerror}", file=sys.stderr)
        _discard_stdout()
        return EXIT_FAILED


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(parsed: argparse.Namespace) -> int:
    code: int = parsed.run(parsed)
    # Flushed here, so that a reader who went away is noticed inside the `try`.
    sys.stdout.flush()
    return code
