"""torchrun's flags, read by torch. What torch would answer with a traceback is a problem with a hint here.

It starts nothing. Invariant: whatever somebody wrote wrong comes out as a `UsageError`, all of it at once.
"""

import argparse
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import cuda
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from elastic_hieravg.config import environment, read_conf, read_nnodes
from elastic_hieravg.errors import InputError, Problem, UsageError, raise_if_any
from elastic_hieravg.membership.records import Bounds

USAGE = "hieravg run [flags] SCRIPT [the script's own arguments]"
# torchrun's parser has other defaults: no store of our kind, and no restart.
DEFAULTS = {"rdzv_backend": "c10d", "max_restarts": 3}
# What torch reads as 0 or 1 when its parser is made.
SWITCHES = ("STANDALONE", "MODULE", "NO_PYTHON", "RUN_PATH", "VIRTUAL_LOCAL_RANK")
WORDS = ("auto", "cpu", "gpu", "xpu")
STREAMS = "give 0 to 3 (1 is stdout, 2 stderr, 3 both) for all workers, or 0:3,1:2 for workers 0 and 1"


def torchrun_parser() -> argparse.ArgumentParser:
    """torch's parser under our name, with our defaults."""
    variables = environment()
    wrong = [f"PET_{name}" for name in SWITCHES if variables.get(f"PET_{name}", "0") not in ("0", "1")]
    raise_if_any(UsageError, [Problem(f"{name} is {variables[name]!r}", "give 1 or 0") for name in wrong])
    parser = get_args_parser()
    parser.prog = "hieravg run"
    # All flags in a row would hide what is wrong; the help has them.
    parser.usage = USAGE
    for action in parser._actions:  # noqa: SLF001 - torch names them as its own code does
        if action.dest == "training_script":
            action.metavar = "SCRIPT"
        elif action.dest == "training_script_args":
            action.metavar, action.required = "...", False
    parser.description = "Takes all of torchrun's flags; those of elastic_hieravg come last."
    for name, value in DEFAULTS.items():
        if f"PET_{name.upper()}" not in variables:
            parser.set_defaults(**{name: value})
    for action in parser._actions:  # noqa: SLF001 - there is no other way to say it in torch's own help
        if action.dest in DEFAULTS and action.help:
            action.help = f"{action.help.strip()} (default: {DEFAULTS[action.dest]})"
    return parser


def read_torchrun_flags(flags: argparse.Namespace) -> tuple[LaunchConfig, Any, list[str]]:
    """How to launch, what to start, and its arguments."""
    raise_if_any(UsageError, [*_problems(flags), *_script_problems(flags)])
    if flags.rdzv_backend != "static" and flags.master_addr == "127.0.0.1":
        # torch warns of a flag that nobody gave.
        del flags.master_addr
    try:
        config, entrypoint, arguments = config_from_args(flags)
    except OSError as exc:
        message = f"--log-dir is {flags.log_dir!r}, which cannot be used: {exc.strerror}"
        raise UsageError(Problem(message, "give a folder in which this user may write")) from exc
    except (ValueError, RuntimeError, AssertionError) as exc:
        # What is not looked at here: torch's own words.
        hint = "correct that flag; `hieravg run --help` lists them"
        raise UsageError(Problem(f"torch cannot use its flags: {exc}", hint)) from exc
    return config, entrypoint, arguments


def _problems(flags: argparse.Namespace) -> Iterator[Problem]:
    yield from _of(lambda: Bounds(*read_nnodes(flags.nnodes)))
    yield from _of(lambda: read_conf(flags.rdzv_conf))
    yield from _slots_problems(flags.nproc_per_node)
    for flag, given in (("--redirects", flags.redirects), ("--tee", flags.tee)):
        try:
            Std.from_str(given)
        except ValueError:
            yield Problem(f"{flag} is {given!r}", STREAMS)
    if flags.max_restarts < 0:
        yield Problem(f"--max-restarts is {flags.max_restarts}", "give a whole number, 0 or more")
    if not flags.monitor_interval > 0:
        yield Problem(f"--monitor-interval is {flags.monitor_interval:g}", "give a number of seconds above 0")
    try:
        get_logging_handler(flags.event_log_handler)
    except KeyError:
        yield Problem(f"--event-log-handler is {flags.event_log_handler!r}", "take null or console")
    if flags.numa_binding and not cuda.is_available():
        hint = "leave --numa-binding out: torch binds workers to the CPUs near their GPU"
        yield Problem(f"--numa-binding is {flags.numa_binding!r}, and torch finds no GPU here", hint)


def _of(read: Callable[[], object]) -> tuple[Problem, ...]:
    try:
        read()
    except InputError as exc:
        return exc.problems
    return ()


def _slots_problems(text: str) -> Iterator[Problem]:
    is_number = text.isascii() and text.isdecimal() and int(text) > 0
    if not is_number and text not in WORDS:
        hint = f"give a number of workers, 1 or more, or {', '.join(WORDS[:-1])} or {WORDS[-1]}"
        yield Problem(f"--nproc-per-node is {text!r}", hint)
    elif text == "gpu" and not cuda.is_available():
        yield Problem(
            "--nproc-per-node is 'gpu', and torch finds no GPU here", "give a number of workers, or cpu"
        )


def _script_problems(flags: argparse.Namespace) -> Iterator[Problem]:
    """Before anything is started: workers that cannot start would be started again and again."""
    script = flags.training_script
    if flags.no_python:
        if flags.module:
            yield Problem("--no-python and --module are both given", "leave one of them out")
        elif shutil.which(script) is None:
            yield Problem(
                f"there is no program {script!r} to run",
                "give a program that may be executed, or leave --no-python out for a Python script",
            )
    elif not flags.module and not _is_script(script):
        hint = (
            "give the path of the training script after all flags of `hieravg run`, its own arguments after it"
        )
        yield Problem(f"there is no script {script!r} in {Path.cwd()}", hint)


def _is_script(script: str) -> bool:
    path = Path(script)
    # A pipe is a script to Python too, and so is a folder with a main module.
    return bool(script) and path.exists() and (not path.is_dir() or (path / "__main__.py").is_file())
