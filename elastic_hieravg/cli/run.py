"""`hieravg run`: torchrun's flags and ours, and this node's agent until the job is over.

torch is imported when the command runs, not before: `hieravg plan` answers at once.
"""

import argparse
from collections.abc import Sequence

from elastic_hieravg.agent.termination import leave_message
from elastic_hieravg.cli.init import fork_below_init
from elastic_hieravg.config import DEFAULT_HIERARCHY, flag_default
from elastic_hieravg.errors import HierAvgError

HELP = "run a training script on this node, as a part of an elastic job"
# torchrun's parser has other defaults: no store of our kind, and no restart.
TORCHRUN_DEFAULTS = {"rdzv_backend": "c10d", "max_restarts": 3}


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


def _run(arguments: Sequence[str]) -> int:
    from torch.distributed.run import config_from_args, get_args_parser  # noqa: PLC0415

    from elastic_hieravg.agent.launch import launch  # noqa: PLC0415
    from elastic_hieravg.agent.logs import set_up_logs  # noqa: PLC0415
    from elastic_hieravg.agent.settings import read_run_settings  # noqa: PLC0415

    parser = get_args_parser()
    parser.prog = "hieravg run"
    parser.description = "Takes all of torchrun's flags; those of elastic_hieravg come last."
    for name, value in TORCHRUN_DEFAULTS.items():
        if flag_default(name, prefix="PET") is None:
            parser.set_defaults(**{name: value})
    _add_flags(parser)
    flags = parser.parse_args(list(arguments))
    facts = set_up_logs(flags.log_format)
    if flags.standalone:
        flags.rdzv_backend = TORCHRUN_DEFAULTS["rdzv_backend"]
    config, entrypoint, script_arguments = config_from_args(flags)
    settings = read_run_settings(
        flags,
        nodes_min=config.min_nodes,
        nodes_max=config.max_nodes,
        slots=config.nproc_per_node,
        conf=config.rdzv_configs,
    )
    return launch(settings, config, entrypoint, script_arguments, facts=facts)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    ours = parser.add_argument_group(
        "elastic_hieravg", "each also as environment: HIERAVG_ and the flag in capitals, HIERAVG_GRACE_S=20"
    )

    def add(name: str, default: str | None, text: str) -> None:
        variable = name.removeprefix("--").replace("-", "_")
        given = flag_default(variable)
        ours.add_argument(name, default=default if given is None else given, help=text)

    add("--hierarchy", DEFAULT_HIERARCHY, "levels and their periods in steps, innermost first")
    add("--nnodes-file", None, "a file with MIN:MAX in place of --nnodes, followed when it changes")
    add("--membership", "in-place", "in-place: survivors keep their processes; restart: all start anew")
    add("--on-misfit", "repair", "group sizes that cannot be had: repair, or hold the job (strict)")
    add("--node-id", None, "this node's name; the host's name if not given")
    add("--lease-ttl-s", "3", "a node that is silent for so long is lost")
    add(
        "--hang-timeout-s",
        None,
        "a worker without a step for so long is killed; follows its own steps if not given",
    )
    add("--grace-s", "25", "how long this node may take to leave on SIGTERM")
    add("--warmup-steps", "0", "so many steps are synchronous at the start")
    add("--metrics-port", None, "where this node's metrics are served: a port (9400), auto, or off")
    add("--metrics-host", None, "the address they are served at: 127.0.0.1, or 0.0.0.0 in a pod")
    add("--log-format", "plain", "plain, or json: one object a line")
    add("--warm", None, "have processes wait that have imported these modules: torch, or torch,my.module")
    ours.add_argument(
        "--label", action="append", default=[], metavar="KEY=VALUE", help="a label of this node; repeatable"
    )
