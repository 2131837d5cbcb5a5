"""`hieravg run`: torchrun's flags and ours, and this node's agent until the job is over.

torch is imported when the command runs, not before: `hieravg plan` answers at once.
"""

import argparse
import sys
from collections.abc import Collection, Sequence

from elastic_hieravg import config
from elastic_hieravg.agent.termination import leave_message
from elastic_hieravg.cli.init import fork_below_init
from elastic_hieravg.cli.parsing import not_known
from elastic_hieravg.config import (
    DEFAULT_HIERARCHY,
    DEFAULT_METRICS_PORT,
    LABELS_FILE_VARIABLE,
    LABELS_VARIABLE,
    flag_default,
)
from elastic_hieravg.errors import HierAvgError

EXIT_FAILED, EXIT_LEFT = 1, 143
HELP = "run a training script on this node, as a part of an elastic job"

EPILOG = """\
example:
  hieravg run --standalone --nproc-per-node=2 train.py
  hieravg run --nnodes=1:4 --nproc-per-node=2 --rdzv-endpoint=h1:29400 --rdzv-id=job7 train.py --epochs 3

It exits with 0 when the training is done, 1 if it failed, 2 if it was started wrongly, 78 if starting it again
is of no use, 143 if it was asked to leave.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Only for `hieravg --help`: the flags are torch's, and read by `main`."""
    commands.add_parser("run", help=HELP, add_help=False)


def main(arguments: Sequence[str]) -> int:
    """The exit code; why it ended is left where HIERAVG_TERMINATION_FILE says."""
    code = fork_below_init()
    if code is not None:
        return code
    try:
        return _run(arguments)
    except HierAvgError as exc:
        leave_message(str(exc))
        raise
    except KeyboardInterrupt:
        # Later on the agent notices it, and leaves the job first.
        return _ended("stopped by Ctrl-C before this node was in the job", code=EXIT_LEFT)
    except OSError as exc:
        return _ended(f"this node cannot go on: {exc}", code=EXIT_FAILED)


def _ended(reason: str, *, code: int) -> int:
    leave_message(reason)
    print(f"hieravg: {reason}", file=sys.stderr)
    return code


def _run(arguments: Sequence[str]) -> int:
    from elastic_hieravg.agent.launch import launch  # noqa: PLC0415
    from elastic_hieravg.agent.logs import set_up_logs  # noqa: PLC0415
    from elastic_hieravg.agent.settings import read_run_settings  # noqa: PLC0415
    from elastic_hieravg.cli.torchrun import DEFAULTS, read_torchrun_flags, torchrun_parser  # noqa: PLC0415

    parser = torchrun_parser()
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    _add_flags(parser)
    flags, strange = parser.parse_known_args(list(arguments))
    known = parser._option_string_actions  # noqa: SLF001 - there is no other way to know them
    if strange:
        parser.error(not_known(strange, known))
    facts = set_up_logs(flags.log_format)
    _warn_of_variables(known)
    if flags.standalone:
        flags.rdzv_backend = DEFAULTS["rdzv_backend"]
    launched, entrypoint, script_arguments = read_torchrun_flags(flags)
    settings = read_run_settings(
        flags,
        nodes_min=launched.min_nodes,
        nodes_max=launched.max_nodes,
        slots=launched.nproc_per_node,
        conf=launched.rdzv_configs,
    )
    return launch(settings, launched, entrypoint, script_arguments, facts=facts)


def _warn_of_variables(flags: Collection[str]) -> None:
    """A variable that is misspelt says nothing to anybody, and its setting is not made."""
    import logging  # noqa: PLC0415

    from elastic_hieravg.doctor.findings import Severity  # noqa: PLC0415
    from elastic_hieravg.doctor.timeouts import check_variables  # noqa: PLC0415

    log = logging.getLogger(__name__)
    theirs = {f"PET_{flag.strip('-').replace('-', '_').upper()}" for flag in flags}
    for finding in check_variables(config.environment(), known=known_variables() | theirs):
        if finding.severity is Severity.WARNING:
            log.warning("%s; %s", finding.found, finding.advice)


def known_variables() -> set[str]:
    """The variables that something of ours reads."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_flags(parser)
    ours = {f"HIERAVG_{action.dest.upper()}" for action in parser._actions}  # noqa: SLF001
    named = {value for name, value in vars(config).items() if name.endswith("_VARIABLE")}
    return ours | named


def _add_flags(parser: argparse.ArgumentParser) -> None:
    ours = parser.add_argument_group(
        "elastic_hieravg",
        "each can be an environment variable too, HIERAVG_ and the flag in capitals: HIERAVG_GRACE_S=20",
    )

    def add(name: str, default: str | None, text: str, *, shown: str = "") -> None:
        """`shown`: what it is if nobody gives it, where no value can say that."""
        variable = name.removeprefix("--").replace("-", "_")
        given = flag_default(variable)
        told = f"{text} (default: {shown or default})"
        ours.add_argument(name, default=default if given is None else given, help=told)

    add("--hierarchy", DEFAULT_HIERARCHY, "levels and their periods in steps, innermost first")
    add(
        "--nnodes-file",
        None,
        "a file with MIN:MAX in place of --nnodes, followed when it changes",
        shown="none, --nnodes counts",
    )
    add(
        "--membership",
        "in-place",
        "when nodes come or go: in-place, the others keep running; restart, all workers start anew",
    )
    add(
        "--on-misfit",
        "repair",
        "if group sizes do not fit the nodes: repair the groups, or pause the job (strict)",
    )
    add("--node-id", None, "this node's name", shown="the host's name")
    add("--lease-ttl-s", "3", "a node that is silent for so many seconds is lost")
    add(
        "--hang-timeout-s",
        None,
        "a worker without a step for so many seconds is killed",
        shown="10 times its slowest step of late, at least 30",
    )
    add("--grace-s", "25", "how many seconds this node may take to leave on SIGTERM")
    add("--warmup-steps", "0", "so many steps at the start end with a round of all ranks each")
    add(
        "--metrics-port",
        None,
        "where this node's metrics are served: a port, auto for a free one, or off",
        shown=str(DEFAULT_METRICS_PORT),
    )
    add("--metrics-host", None, "the address they are served at", shown="127.0.0.1, in a pod 0.0.0.0")
    add("--log-format", "plain", "plain, or json: one object a line")
    add(
        "--warm",
        None,
        "keep processes ready that have imported these modules, for faster restarts: torch,my.module",
        shown="none",
    )
    ours.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"a label of this node; repeatable (default: of {LABELS_VARIABLE} and {LABELS_FILE_VARIABLE})",
    )
