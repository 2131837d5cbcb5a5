"""A process that has imported what a worker needs, and waits to become one.

The agent starts it and later hands it a worker's arguments, environment and output; from then on it is that
worker, with the same process id. What it imports it is told: nothing here imports torch.
Invariant: it ends with its agent as long as nothing was handed to it.
"""

import builtins
import ctypes
import importlib
import importlib.util
import io
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from elastic_hieravg.config import replace_environment

READY = b"r"
ORDER = b"o"
LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
# The descriptors of a worker's output, as they follow in an order.
OUTPUTS = {"stdout": 1, "stderr": 2}


@dataclass(frozen=True, slots=True)
class Target:
    """What a Python command line runs: a script or, with `-m`, a module; and its arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    @property
    def first_path(self) -> str:
        """What Python puts first on its search path for it."""
        return str(Path.cwd() if self.is_module else Path(self.name).resolve().parent)


def read_target(words: Sequence[str]) -> Target | None:
    """What follows the interpreter on a command line; None if it is something else than torchrun writes.

    >>> read_target(["-u", "-m", "package.train", "--steps", "7"])
    Target(name='package.train', is_module=True, arguments=('--steps', '7'))
    """
    rest = list(words)
    rest = rest[1:] if rest[:1] == ["-u"] else rest
    is_module = rest[:1] == ["-m"]
    rest = rest[1:] if is_module else rest
    if not rest or rest[0].startswith("-"):
        return None
    return Target(rest[0], is_module, tuple(rest[1:]))


def write_order(
    sock: socket.socket, words: Sequence[str], environment: Mapping[str, str], outputs: Mapping[str, int]
) -> None:
    """The agent's side: make a waiting process a worker. `outputs`: descriptors of files, by stream."""
    content = {"words": list(words), "environment": dict(environment), "outputs": list(outputs)}
    order = json.dumps(content).encode()
    socket.send_fds(sock, [ORDER], list(outputs.values()))
    sock.sendall(LENGTH.pack(len(order)) + order)


def main() -> None:
    descriptor, modules, first_path = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
    _end_with_parent(is_wanted=True)
    if not sys.flags.safe_path:
        sys.path[0] = first_path
    for name in modules:
        importlib.import_module(name)
    _import_late_ones()
    with socket.socket(fileno=descriptor) as sock:
        words = _become(sock)
    if words is not None:
        _run(words)


def _import_late_ones() -> None:
    """torch imports hundreds of modules only when the first optimizer is made."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def _become(sock: socket.socket) -> Sequence[str] | None:
    """Wait for the order and take its environment and output; the command line, None if the agent is gone."""
    try:
        sock.sendall(READY)
        mark, descriptors, _, _ = socket.recv_fds(sock, len(ORDER), len(OUTPUTS))
        if mark != ORDER:
            return None
        (length,) = LENGTH.unpack(_receive(sock, LENGTH.size))
        order = json.loads(_receive(sock, length))
    except (OSError, struct.error):
        return None
    _end_with_parent(is_wanted=False)
    replace_environment(order["environment"])
    for stream, descriptor in zip(order["outputs"], descriptors, strict=True):
        os.dup2(descriptor, OUTPUTS[stream])
        os.close(descriptor)
    words: Sequence[str] = order["words"]
    return words


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    received = io.BytesIO()
    while received.tell() < num_bytes:
        part = sock.recv(num_bytes - received.tell())
        if not part:
            raise ConnectionResetError("the agent hung up")
        received.write(part)
    return received.getvalue()


def _run(words: Sequence[str]) -> None:
    """Run a command line's script or module as `__main__`, as Python does: it stays there to the end."""
    target = read_target(words)
    assert target is not None, "the agent has read it"
    main_module = ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    if target.is_module:
        spec = importlib.util.find_spec(target.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target.name}.__main__")
        if spec is None or spec.loader is None or spec.origin is None:
            sys.exit(f"{sys.executable}: no module named {target.name}")
        path = first_word = spec.origin
        main_module.__spec__, main_module.__loader__, main_module.__package__ = spec, spec.loader, spec.parent
    else:
        # Not resolved: a script that is a link is known by the link's name.
        path, first_word = str(Path.cwd() / target.name), target.name
        main_module.__package__ = None
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    main_module.__file__ = path
    sys.modules["__main__"] = main_module
    sys.argv = [first_word, *target.arguments]
    exec(code, main_module.__dict__)  # noqa: S102 - this is what an interpreter does


def _end_with_parent(*, is_wanted: bool) -> None:
    """While it imports it cannot see that its agent is gone; the kernel tells."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if is_wanted else 0)


if __name__ == "__main__":
    main()
