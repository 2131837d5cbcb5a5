"""`hieravg doctor`: what would go wrong with a job on this node, before it is started.

stdout is the findings, for people or as JSON. What is asked may take seconds, never for ever. torch is imported
by a process of its own, so that a broken one is a finding too.
"""

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING

from elastic_hieravg import config
from elastic_hieravg.cli.run import _add_flags as add_flags_of_run
from elastic_hieravg.cli.run import known_variables
from elastic_hieravg.errors import Problem, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_hieravg.doctor.text import Line

EXIT_WELL, EXIT_PROBLEMS = 0, 1
LISTEN_S_MAX = 3600.0
# torchrun's flags that matter here, with the defaults that `hieravg run` has.
TORCHRUN_FLAGS = {
    "--nnodes": ("1:1", "MIN:MAX nodes"),
    "--nproc-per-node": ("1", "workers on this node: a number, auto, gpu or cpu"),
    "--rdzv-backend": ("c10d", "c10d, the store of the first agent, or etcd3"),
    "--rdzv-endpoint": ("", "where the store is: host:port, with commas between several"),
    "--rdzv-id": ("", "the job's name"),
    "--rdzv-conf": (
        "",
        "key=value,key=value: join_timeout, and for etcd cacert, cert, key, user, password_file",
    ),
    "--local-addr": ("", "the address that others are told"),
}

EPILOG = """\
example:
  hieravg doctor --nnodes 1:4 --nproc-per-node 2 --rdzv-endpoint h1:29400 --params 125M
  hieravg doctor --listen 9401          # on h2
  hieravg doctor --peer h2:9401         # on h1: round trip and bandwidth between the two

Give it the flags of `hieravg run`, and it finds what is wrong with them and with this machine. It exits with 0
if there are no problems, with 1 if there are. Nothing is started; in etcd a key is written that goes by itself.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="find out what would go wrong with a job on this node, and what to do about it",
        description="Look at this node as a job would: software, memory, names, ports, settings, etcd, pod.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one document, for scripts")
    parser.add_argument("--params", metavar="COUNT", help="the model's parameters, for example 125M")
    parser.add_argument("--step-s", metavar="SECONDS", help="how long a step takes, if you know")
    parser.add_argument("--peer", metavar="HOST[:PORT]", help="measure how far another node is that listens")
    parser.add_argument("--listen", metavar="PORT", help="be measured by others, until Ctrl-C or for an hour")
    theirs = parser.add_argument_group("torchrun's flags", "as for `hieravg run`, PET_ variables too")
    for flag, (default, text) in TORCHRUN_FLAGS.items():
        given = config.flag_default(_variable(flag), prefix="PET")
        theirs.add_argument(flag, default=default if given is None else given, help=text)
    is_alone = config.flag_default("standalone", prefix="PET") == "1"
    theirs.add_argument("--standalone", action="store_true", default=is_alone, help="a job of this node alone")
    add_flags_of_run(parser)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    if flags.listen is not None:
        if flags.peer is not None or flags.json:
            other = "--json" if flags.peer is None else "--peer"
            hint = f"give {other} on another node, not on the one that listens"
            raise UsageError(Problem(f"--listen and {other} cannot be used together", hint))
        return _listen(flags.listen)
    from elastic_hieravg.doctor.examination import examine, real_probes  # noqa: PLC0415
    from elastic_hieravg.doctor.findings import Severity, count, document  # noqa: PLC0415
    from elastic_hieravg.doctor.text import lines  # noqa: PLC0415

    flags.step_s = _read_step_s(flags.step_s)
    if flags.standalone:
        flags.rdzv_backend, flags.rdzv_endpoint = TORCHRUN_FLAGS["--rdzv-backend"][0], ""
    if "GRPC_VERBOSITY" not in config.environment():
        # A connection that fails is a finding, and no line of gRPC's.
        config.export({"GRPC_VERBOSITY": "NONE"})
    try:
        sections = examine(
            flags, environment=config.environment(), known_flags=known_variables(), probes=real_probes()
        )
    except KeyboardInterrupt:
        _say("stopped by Ctrl-C; not everything was looked at")
        return EXIT_PROBLEMS
    if flags.json:
        print(json.dumps(document(sections), indent=2))
    else:
        _print(lines(sections))
    return EXIT_PROBLEMS if count(sections, Severity.PROBLEM) else EXIT_WELL


def _variable(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _read_step_s(text: str | None) -> float | None:
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        if 0.0 < (seconds := float(text)) < 1e9:
            return seconds
    raise UsageError(Problem(f"--step-s is {text!r}", "give a number of seconds, for example 0.25"))


def _print(lines: "Sequence[Line]") -> None:
    if not sys.stdout.isatty():
        for line in lines:
            print(line)
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(markup=False, emoji=False, highlight=False)
    for line in lines:
        console.print(Text.assemble((line.mark, line.style), line.text), soft_wrap=True)


def _listen(text: str) -> int:
    import socket  # noqa: PLC0415

    from elastic_hieravg.doctor import link  # noqa: PLC0415

    port = link.read_listen(text)
    try:
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
    except OSError as exc:
        raise UsageError(
            Problem(f"--listen is {port}, which cannot be listened at: {exc.strerror}", "give another port")
        ) from exc
    with server:
        _say(f"listening at port {port} of all addresses; ask with: hieravg doctor --peer HOST:{port}")
        with contextlib.suppress(KeyboardInterrupt):
            link.listen(server, seconds_max=LISTEN_S_MAX, say=_say, is_over=lambda: False)
    return EXIT_WELL


def _say(text: str) -> None:
    print(f"hieravg doctor: {text}", file=sys.stderr, flush=True)
