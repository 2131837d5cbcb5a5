"""One process for each of a node's workers that has imported torch already, and waits for it to start anew.

They are started some time after the workers, which need the machine themselves then. What cannot be handed over
(another interpreter, another number of threads) starts as ever. Invariant: none of them outlives the agent.
"""

import contextlib
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from elastic_hieravg.agent.warm import READY, Target, read_target, write_order

# What every worker imports that joins a job, beside what the user names.
OWN_MODULES = ("elastic_hieravg.worker",)
# How long after the workers' start: until then they import themselves.
DELAY_S = 5.0
POLL_S = 0.2
# A process that imports for so long is not worth waiting for.
HAND_OVER_TIMEOUT_S = 30.0
# So many deaths of waiting processes in a row, and no more are started.
DEATHS_MAX = 3
# What libraries read when they are loaded, and not again.
_READ_AT_START = ("LD_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "TORCH_", "MALLOC_")
# Of these, some are not: torch's agent sets them for every start.
_READ_LATER = ("TORCH_NCCL_",)

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Waiting:
    process: "subprocess.Popen[bytes]"
    sock: socket.socket
    environment: Mapping[str, str]


class WarmPool:
    """`modules`: what a worker imports. `delay_s`: how long after a worker's start its stand-in is started."""

    def __init__(self, modules: Sequence[str], *, delay_s: float = DELAY_S) -> None:
        self._modules = tuple(dict.fromkeys(modules))
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._waiting: dict[int, _Waiting] = {}
        # Of every worker that was started: its command line and environment, and when.
        self._started: dict[int, tuple[tuple[str, ...], Mapping[str, str], float]] = {}
        self._num_deaths = 0
        self._keeper = threading.Thread(target=self._keep, name="hieravg-warm", daemon=True)
        self._keeper.start()

    def start(
        self,
        local_rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: IO[str] | None,
        stderr: IO[str] | None,
    ) -> "subprocess.Popen[bytes] | None":
        """Start a worker in the process that waits for it; None if it has to be started as ever."""
        with self._lock:
            waiting = self._waiting.pop(local_rank, None)
            self._started[local_rank] = tuple(command), dict(environment), time.monotonic()
        if waiting is None:
            return None
        process = self._hand_over(waiting, command, environment, stdout, stderr)
        if process is not None:
            _log.info("worker %s starts in process %s, which waited for it", local_rank, process.pid)
        return process

    def close(self) -> None:
        self._closed.set()
        self._keeper.join()
        with self._lock:
            left, self._waiting = list(self._waiting.values()), {}
        for waiting in left:
            _end(waiting)

    def _hand_over(
        self,
        waiting: _Waiting,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
    ) -> "subprocess.Popen[bytes] | None":
        outputs = {name: file.fileno() for name, file in (("stdout", stdout), ("stderr", stderr)) if file}
        is_fit = waiting.process.poll() is None and is_same_start(waiting.environment, environment)
        if is_fit:
            with contextlib.suppress(OSError):
                waiting.sock.settimeout(HAND_OVER_TIMEOUT_S)
                write_order(waiting.sock, command[1:], environment, outputs)
                waiting.sock.close()
                return waiting.process
        _end(waiting)
        return None

    def _keep(self) -> None:
        """Have a process for every worker that was started a while ago; this thread is their parent."""
        while not self._closed.wait(POLL_S):
            with self._lock:
                for local_rank, waiting in list(self._waiting.items()):
                    self._look_after(local_rank, waiting)
                missing = [rank for rank in self._started if rank not in self._waiting]
                for local_rank in missing:
                    command, environment, started_s = self._started[local_rank]
                    is_due = time.monotonic() - started_s >= self._delay_s
                    target = read_target(command[1:])
                    if is_due and target is not None and self._num_deaths < DEATHS_MAX:
                        try:
                            self._waiting[local_rank] = self._start_waiting(command[0], target, environment)
                        except OSError as exc:
                            self._died(str(exc))

    def _look_after(self, local_rank: int, waiting: _Waiting) -> None:
        # Nothing yet, or it has ended: that is seen below.
        with contextlib.suppress(OSError):
            if waiting.sock.recv(len(READY)) == READY:
                self._num_deaths = 0
                _log.info("process %s waits to become worker %s", waiting.process.pid, local_rank)
        code = waiting.process.poll()
        if code is not None:
            del self._waiting[local_rank]
            _end(waiting)
            self._died(f"exit code {code}")

    def _died(self, why: str) -> None:
        self._num_deaths += 1
        if self._num_deaths == DEATHS_MAX:
            modules = ", ".join(self._modules)
            _log.error(
                "--warm is not used: processes that import %s end at once (%s); workers start as without it",
                modules,
                why,
            )

    def _start_waiting(self, interpreter: str, target: Target, environment: Mapping[str, str]) -> _Waiting:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        words = [interpreter, "-u", "-m", "elastic_hieravg.agent.warm", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - the interpreter that torchrun would start
                [*words, ",".join(self._modules), target.first_path],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return _Waiting(process, ours, environment)


def is_same_start(before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Whether a process that was started with one environment can become one with the other.

    >>> is_same_start({"OMP_NUM_THREADS": "1", "RANK": "0"}, {"OMP_NUM_THREADS": "1", "RANK": "3"})
    True
    >>> is_same_start({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"})
    False
    """

    def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in environment.items()
            if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
        }

    return read_at_start(before) == read_at_start(after)


def _end(waiting: _Waiting) -> None:
    waiting.sock.close()
    waiting.process.kill()
    waiting.process.wait()
