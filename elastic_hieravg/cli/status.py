"""`hieravg status`: what a running job does, as its agent tells it at `/status`.

It only reads. stdout is the status, for people or as JSON; stderr says why there is none. rich and the network
are imported when the command runs, not before: `hieravg plan` answers at once.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from elastic_hieravg.config import DEFAULT_METRICS_PORT, flag_default
from elastic_hieravg.errors import AgentAwayError, HierAvgError, Problem, UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = str(DEFAULT_METRICS_PORT)
# From the first word to the last; the agent answers within milliseconds.
ANSWER_S = 5.0
# A thousand nodes of eight workers need about 3 MB.
DOCUMENT_BYTES_MAX = 32 * 1024 * 1024
CHUNK_BYTES = 64 * 1024
WATCH_PERIOD_S = 1.0
# Nodes tell each other of themselves every other second.
ASKED_AGAIN_MAX = 3
# Where nobody says how wide the output is: lines of a file, or of a pipe.
PLAIN_WIDTH = 180
PORT_MAX = 65535

EPILOG = """\
example:
  hieravg status --url http://node-a:9400 --watch

Any agent of the job will do: each knows all nodes. The port is in the agent's log.
HIERAVG_METRICS_HOST and HIERAVG_METRICS_PORT say where, if --url does not.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "status",
        help="show what a running job does: nodes, levels, rounds, and what needs attention",
        description="Show the status of a running job, as one of its agents tells it. Nothing is changed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--url", metavar="URL", help=f"where an agent is: http://{DEFAULT_HOST}:{DEFAULT_PORT}")
    parser.add_argument("--json", action="store_true", help="print the document, for scripts")
    parser.add_argument("--watch", action="store_true", help="show it anew every second, until Ctrl-C")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    url = read_url(flags.url)
    if flags.watch and (flags.json or not sys.stdout.isatty()):
        found = "--json" if flags.json else "output that is not a terminal"
        hint = "leave --watch out, and run the command again when you need it"
        raise UsageError(Problem(f"--watch cannot be used with {found}", hint))
    if flags.watch:
        return _watch(url)
    document = _whole(url)
    if flags.json:
        print(json.dumps(document, indent=2))
    else:
        _print(_console(), _shown(document))
    return 0


def _whole(url: str) -> dict[str, object]:
    """The status with all nodes in it: an agent asks the others only while somebody looks, so ask again."""
    from elastic_hieravg.metrics.status_reading import read_document  # noqa: PLC0415

    document = read_document(fetch(url))
    for _ in range(ASKED_AGAIN_MAX):
        nodes = document.get("nodes")
        entries = [each for each in nodes if isinstance(each, dict)] if isinstance(nodes, list) else []
        if not any(each.get("state") == "training" and each.get("age_s") is None for each in entries):
            break
        time.sleep(WATCH_PERIOD_S)
        document = read_document(fetch(url))
    return document


def read_url(given: str | None) -> str:
    """Where the status is: from the flag, else from the environment, else where agents are by default.

    >>> read_url("http://node-a:9400")
    'http://node-a:9400/status'
    """
    what = "--url is"
    if given is None:
        host, port = flag_default("metrics_host") or DEFAULT_HOST, flag_default("metrics_port") or DEFAULT_PORT
        if not port.isascii() or not port.isdecimal():
            message = f"HIERAVG_METRICS_PORT is {port!r}, which is not the number of a port"
            raise UsageError(Problem(message, "give the address that the agent's log names, with --url"))
        given, what = f"http://{_reachable(host)}:{port}", "HIERAVG_METRICS_HOST and _PORT give"
    hint = f"write an address like http://{DEFAULT_HOST}:{DEFAULT_PORT}"
    try:
        parts = urlsplit(given)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as exc:
        raise UsageError(Problem(f"{what} {given!r}, which is not an address: {exc}", hint)) from exc
    if not is_usable or not given.isascii() or not given.isprintable() or " " in given:
        raise UsageError(Problem(f"{what} {given!r}, which is not an address of an agent", hint))
    path = parts.path.rstrip("/").removesuffix("/status")
    return urlunsplit((parts.scheme, parts.netloc, f"{path}/status", "", ""))


def _reachable(host: str) -> str:
    """Where to ask an agent that listens there: one that listens everywhere is also here."""
    host = {"0.0.0.0": DEFAULT_HOST, "::": "::1", "": DEFAULT_HOST}.get(host, host)  # noqa: S104 - not bound
    return f"[{host}]" if ":" in host else host


def fetch(url: str) -> str:
    """What is told there, within a time and a size."""
    import http.client  # noqa: PLC0415
    from urllib import error, request  # noqa: PLC0415

    # No proxy, no redirect, nothing but http: an agent is near, and answers itself.
    opener = request.OpenerDirector()
    opener.add_handler(request.HTTPHandler())
    opener.add_handler(request.HTTPSHandler())
    opener.add_handler(request.HTTPErrorProcessor())
    opener.add_handler(request.HTTPDefaultErrorHandler())
    deadline_s = time.monotonic() + ANSWER_S
    try:
        with opener.open(url, timeout=ANSWER_S) as response:
            content = _read_bounded(response.read1, deadline_s=deadline_s, url=url)
            return content.decode()
    except error.HTTPError as exc:
        exc.close()
        raise _away(url, f"HTTP {exc.code} {exc.reason}") from exc
    except UnicodeDecodeError as exc:
        raise _away(url, "what it says is not text") from exc
    except (OSError, http.client.HTTPException) as exc:
        raise _away(url, str(getattr(exc, "reason", None) or exc) or type(exc).__name__) from exc


def _read_bounded(read: Callable[[int], bytes], *, deadline_s: float, url: str) -> bytes:
    content = bytearray()
    while chunk := read(CHUNK_BYTES):
        content += chunk
        if len(content) > DOCUMENT_BYTES_MAX:
            raise _away(url, f"it says more than {DOCUMENT_BYTES_MAX} bytes")
        if time.monotonic() > deadline_s:
            raise _away(url, f"it is not done after {ANSWER_S:.0f} s")
    return bytes(content)


def _away(url: str, why: str) -> AgentAwayError:
    hint = (
        "check that the job runs; give the address that the agent's log names with --url, "
        "or set HIERAVG_METRICS_HOST and HIERAVG_METRICS_PORT"
    )
    return AgentAwayError(Problem(f"no agent answers at {url}: {why}", hint))


def _shown(document: dict[str, object]) -> "RenderableType":
    from elastic_hieravg.metrics.status_reading import read_status  # noqa: PLC0415
    from elastic_hieravg.metrics.status_text import status_text  # noqa: PLC0415

    return status_text(read_status(document))


def _console() -> "Console":
    from io import TextIOWrapper  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that does not know a character shows a question mark.
        sys.stdout.reconfigure(errors="replace")
    is_terminal = sys.stdout.isatty()
    return Console(
        force_terminal=is_terminal,
        color_system="auto" if is_terminal else None,
        width=None if is_terminal else PLAIN_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _print(console: "Console", shown: "RenderableType") -> None:
    with console.capture() as capture:
        console.print(shown)
    # Tables fill their lines with spaces, which only get in the way of whoever reads them out of a file.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _watch(url: str) -> int:
    """Redraw until Ctrl-C. Only an agent that does not answer at first is an error; later it may come back."""
    from rich.console import Group  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from elastic_hieravg.metrics.attention import span_text  # noqa: PLC0415
    from elastic_hieravg.metrics.status_reading import read_document  # noqa: PLC0415

    console = _console()
    shown = _shown(read_document(fetch(url)))
    answered_s = time.monotonic()
    try:
        with Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_PERIOD_S)
                try:
                    shown = _shown(read_document(fetch(url)))
                except HierAvgError as exc:
                    silent = span_text(time.monotonic() - answered_s)
                    told = f" no answer for {silent}; below is what it said last; {exc.problems[0].message} "
                    live.update(Group(Text(told, style="bold white on red"), shown), refresh=True)
                else:
                    answered_s = time.monotonic()
                    live.update(shown, refresh=True)
    except KeyboardInterrupt:
        _print(console, shown)
        return 0
