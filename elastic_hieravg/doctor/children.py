"""Questions that may take for ever, asked in a process that can be ended: lookups of names, torch itself.

A lookup cannot be interrupted and a broken driver may crash, so neither is done in this process. Invariant:
when a function here returns, so have all its processes.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ANSWER_BYTES_MAX = 64 * 1024
LOOKUPS_MAX = 32

_LOOKUP = """
import json, socket, sys, time
kind, name = sys.argv[1:]
began_s = time.monotonic()
why = ""
try:
    if kind == "forward":
        found = [each[4][0] for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    else:
        found = [socket.getnameinfo((name, 0), socket.NI_NAMEREQD)[0]]
except (OSError, UnicodeError) as exc:
    found, why = [], str(exc)
print(json.dumps({"found": list(dict.fromkeys(found)), "why": why, "seconds": time.monotonic() - began_s}))
"""


@dataclass(frozen=True, slots=True)
class Question:
    """What to look up: the addresses of a name, or (`is_reverse`) the name of an address."""

    name: str
    is_reverse: bool = False


@dataclass(frozen=True, slots=True)
class Lookup:
    """`found`: in the order in which they would be tried. `why`: there is none, because."""

    name: str
    found: tuple[str, ...]
    seconds: float
    why: str = ""


def look_up(questions: Sequence[Question], *, timeout_s: float) -> dict[Question, Lookup]:
    """All of them at once, each in a process of its own."""
    asked = list(dict.fromkeys(questions))[:LOOKUPS_MAX]
    with contextlib.ExitStack() as stack:
        processes = {
            each: stack.enter_context(
                _start("-I", "-S", "-c", _LOOKUP, "reverse" if each.is_reverse else "forward", each.name)
            )
            for each in asked
        }
        deadline_s = time.monotonic() + timeout_s
        answers = {each: _answer(process, deadline_s=deadline_s) for each, process in processes.items()}
    return {each: _lookup(each.name, answer, timeout_s) for each, answer in answers.items()}


def ask_module(module: str, *, timeout_s: float) -> dict[str, object] | str:
    """What a module of ours prints as JSON, run by itself; or why there is nothing."""
    with _start("-P", "-m", module) as process:
        return _answer(process, deadline_s=time.monotonic() + timeout_s)


@contextlib.contextmanager
def _start(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, *arguments]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=pipe) as process:  # noqa: S603 - our own code
        try:
            yield process
        finally:
            process.kill()


def _answer(process: "subprocess.Popen[bytes]", *, deadline_s: float) -> dict[str, object] | str:
    """The object it prints, or why there is none."""
    timeout_s = max(0.0, deadline_s - time.monotonic())
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return f"exit code {process.returncode}: {''.join(last)[:500]}"
    try:
        # What libraries print on the way stands before it.
        document = json.loads(output[-ANSWER_BYTES_MAX:].splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        document = None
    return document if isinstance(document, dict) else "what it answers is no JSON object"


def _lookup(name: str, answer: dict[str, object] | str, timeout_s: float) -> Lookup:
    if isinstance(answer, str):
        return Lookup(name, (), timeout_s, answer)
    found, seconds = answer.get("found"), answer.get("seconds")
    addresses = tuple(str(each) for each in found) if isinstance(found, list) else ()
    return Lookup(
        name, addresses, seconds if isinstance(seconds, float) else timeout_s, str(answer.get("why", ""))
    )
