"""The store of one round, as torch's agent sees it: its waits end when the round does.

torch's agent asks the store for every node's role right after the rendezvous and has no second try: if a node
dies in that moment, the agent waits for minutes and then ends the job. Here the wait ends as soon as the
membership knows of the loss, with an answer good enough to start workers that are replaced at once. All that
we know of torch's agent beyond its interface is in this file. Checked against torch 2.13.
"""

import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore

# Where torch's agents tell each other their roles, and learn their ranks.
ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"

T = TypeVar("T")


class RoundStore(Store):
    """`await_end` waits until the membership knows that the round is over, or says that it is not."""

    def __init__(self, store: TCPStore, *, rank: int, world_size: int, await_end: Callable[[], bool]) -> None:
        super().__init__()
        self._store: Any = store
        self._rank = rank
        self._world_size = world_size
        self._await_end = await_end
        self._own_role = ""

    def set(self, key: str, value: Any) -> None:
        if key.startswith(ROLE_INFO):
            self._own_role = value if isinstance(value, str) else bytes(value).decode()
        self._call(lambda: self._store.set(key, value), instead=lambda: None)

    def get(self, key: str) -> bytes:
        return self._call(lambda: bytes(self._store.get(key)), instead=lambda: self._guess(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        wanted = list(keys)
        return self._call(
            lambda: self._store.multi_get(wanted), instead=lambda: [self._guess(key) for key in wanted]
        )

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._call(lambda: self._store.multi_set(list(keys), list(values)), instead=lambda: None)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), *([] if timeout is None else [timeout]))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def _call(self, call: Callable[[], T], *, instead: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError:
            if not self._await_end():
                raise
            return instead()

    def _guess(self, key: str) -> bytes:
        """What a node that is lost would have said, if it were like this one."""
        role = json.loads(self._own_role)
        if key.startswith(ROLE_INFO):
            return json.dumps({**role, "rank": int(key.removeprefix(ROLE_INFO))}).encode()
        if key.startswith(ASSIGNED_RANKS):
            local_size = int(role["local_world_size"])
            first, size = self._rank * local_size, self._world_size * local_size
            return json.dumps([first, size, first, size]).encode()
        raise KeyError(key)


def cut_connections(host: str, port: int) -> None:
    """End every connection of this process to that place, and so every wait for an answer from there."""
    with contextlib.suppress(OSError):
        addresses = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are wanted, not paths
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):  # noqa: PTH116
                    continue
                # A copy of the descriptor: the number may mean something else a moment later.
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    peer = connection.getpeername()
                    is_there = (
                        len(peer) >= 2 and peer[0].removeprefix("::ffff:") in addresses and peer[1] == port
                    )
                    if is_there:
                        connection.shutdown(socket.SHUT_RDWR)
