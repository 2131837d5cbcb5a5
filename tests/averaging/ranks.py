"""Real processes for the tests: a pool of ranks that run a function together, die, and are replaced.

Starting a process with torch takes seconds, so the pool lives as long as the test session. A function is
given its `Rank` and returns what the test wants to see; what it raises comes back as text.
"""

import contextlib
import itertools
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from elastic_hieravg.averaging.mesh import Peer

CALL_TIMEOUT_S = 120.0
STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Rank:
    """One rank of a call: `scope` is a name no other call uses."""

    rank: int
    world_size: int
    port: int
    scope: str

    def store(self, name: str = "") -> Store:
        return PrefixStore(f"{self.scope}/{name}", _connect(self.port))

    def peers(self, *node_ids: str) -> tuple[Peer, ...]:
        """All ranks of the call as peers, on the given nodes; on one node if none is given."""
        nodes = node_ids or ("a",) * self.world_size
        return tuple(Peer(f"rank {rank}", node, "127.0.0.1") for rank, node in enumerate(nodes))


@cache
def _connect(port: int) -> Store:
    # Once per process: now and then torch takes five seconds for it.
    return TCPStore("127.0.0.1", port, is_master=False, timeout=STORE_TIMEOUT)


@dataclass(frozen=True)
class Died:
    """What a rank that did not live to answer returns."""

    exit_code: int | None


@dataclass(frozen=True)
class Raised:
    """What a rank whose function raised returns."""

    text: str


class Ranks:
    """The pool."""

    def __init__(self) -> None:
        self._server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: list[tuple[BaseProcess, Connection]] = []
        self._calls = itertools.count()

    def call(self, function: Callable[..., Any], *arguments: Any, world_size: int) -> list[Any]:
        """Run `function(rank, *arguments)` on all ranks at once; what each returned, raised or died of."""
        while len(self._processes) < world_size:
            self._processes.append(self._start())
        scope = f"call-{next(self._calls)}"
        for rank in range(world_size):
            _, connection = self._processes[rank]
            connection.send((function, Rank(rank, world_size, self._server.port, scope), arguments))
        return [self._answer(rank) for rank in range(world_size)]

    def process_id(self, rank: int) -> int:
        process_id = self._processes[rank][0].pid
        assert process_id is not None
        return process_id

    def close(self) -> None:
        for process, connection in self._processes:
            with contextlib.suppress(OSError):
                connection.send(None)
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _answer(self, rank: int) -> Any:
        process, connection = self._processes[rank]
        try:
            if not connection.poll(CALL_TIMEOUT_S):
                process.kill()
            return connection.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            self._processes[rank] = self._start()
            return Died(process.exitcode)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    # A rank must not outlive the test session, whatever it is doing.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while (call := connection.recv()) is not None:
        function, rank, arguments = call
        try:
            answer = function(rank, *arguments)
        except Exception as exc:  # noqa: BLE001 - whatever a test's function raises is its answer
            answer = Raised("".join(traceback.format_exception(exc)))
        connection.send(answer)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
