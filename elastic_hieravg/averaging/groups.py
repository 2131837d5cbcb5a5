"""Process groups that can be built, cut and dropped at any time, without a default group.

Built directly on a prefixed store, among their members only. Cutting ends operations in flight, which
gloo's own `abort` does not. Invariant: a group that was cut or that failed is never used again.
"""

import contextlib
import math
import os
import queue
import select
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, cuda
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store, Work

from elastic_hieravg.averaging.mesh import Peer, lost
from elastic_hieravg.errors import PeerLostError

# More threads than two did not help on two cores; one was slower.
GLOO_THREADS = 2
# Beyond so many, those that are done are forgotten.
WORKS_REMEMBERED = 1024

# How often a rank that waits looks whether a peer has hung up.
LOOK_S = 0.02
# How long operations in flight may take to end once their group is cut.
END_S = 0.5
# How long a message may take in which everybody takes part already.
MESSAGE_TIMEOUT_S = 600.0

# A group's connections are told by the descriptors that appear while it is built: one build at a time.
_BUILDING = threading.Lock()
_GROUPS: "weakref.WeakSet[Group]" = weakref.WeakSet()


class Group:
    """One rank's end of a process group. `index` is its place among `peers`."""

    def __init__(
        self,
        store: Store,
        *,
        index: int,
        peers: tuple[Peer, ...],
        timeout_s: float,
        build_timeout_s: float | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to the others under keys of `store` that nobody else uses.

        `timeout_s`: how long an operation may take; `build_timeout_s`: connecting, as long if not given.
        `is_over`: whether it is known that somebody will not come.
        """
        self.index = index
        self.peers = peers
        self.is_over = False
        self._connections: list[socket.socket] = []
        self._descriptors: list[int] = []
        self._works: dict[int, Work] = {}
        self._timeout_s = timeout_s
        self._waiter: _Waiter | None = None
        with _BUILDING:
            options = _gloo_options(peers[index].address, timeout_s=timeout_s)
            before = _socket_inodes()
            self._backend: Any = _bounded(
                lambda: ProcessGroupGloo(store, index, len(peers), options),
                timeout_s=timeout_s if build_timeout_s is None else build_timeout_s,
                is_over=is_over,
            )
            appeared = [fd for fd, inode in _socket_inodes().items() if before.get(fd) != inode]
            self._keep_connections(appeared)
        _GROUPS.add(self)

    def send(self, values: Tensor, *, to: int, tag: int) -> Work:
        return self._start(self._backend.send, [values], to, tag)

    def post(self, values: Tensor, *, to: int, tag: int) -> None:
        """Send from inside of `watch`; a failure is its failure. Waited for by `finish`."""
        if self.is_over:
            raise RuntimeError("the group was cut")
        work = self._backend.send([values], to, tag)
        self._works[id(work)] = work

    def receive(self, values: Tensor, *, of: int, tag: int) -> Work:
        return self._start(self._backend.recv, [values], of, tag)

    def all_reduce(self, values: Tensor) -> Work:
        return self._start(self._backend.allreduce, [values])

    def wait(self, works: Sequence[Work], *, timeout_s: float = math.inf) -> None:
        """Until these are done, each within `timeout_s`. A failure ends all others that were started."""
        (waiting,) = self.watch([works], timeout_s=timeout_s)
        self.join(waiting)

    def watch(
        self,
        batches: Sequence[Sequence[Work | None]],
        *,
        timeout_s: float = math.inf,
        after_each: Callable[[], object] = lambda: None,
    ) -> "list[Waiting]":
        """Have these waited for, one batch behind the other; each for `join`.

        `after_each` is called by another thread after each of them, at once where there is none. It may start
        operations with `post`.
        """
        for work in chain.from_iterable(batches):
            if work is not None:
                # Once each: gloo would wait for a second message.
                del self._works[id(work)]
        timeout = timedelta(seconds=min(timeout_s, self._timeout_s))
        waiting = [
            Waiting(works, timeout, after_each=after_each, is_over=lambda: self.is_over) for works in batches
        ]
        # All at once: from the first one on another thread starts operations.
        for each in waiting:
            self._hand_over(each)
        return waiting

    def join(self, waiting: "Waiting") -> None:
        """Until what is watched is done. A failure ends all others that were started."""
        while not waiting.is_done.wait(LOOK_S):
            if self.is_over or self._has_hung_up():
                # Gloo itself does not end a receive whose message had begun.
                self.cut()
                waiting.is_done.wait(END_S)
                break
        if waiting.error is not None or not waiting.is_done.is_set():
            error = waiting.error or RuntimeError("a peer hung up in the middle of a message")
            raise self._fail(error, is_stuck=not waiting.is_done.is_set()) from waiting.error

    def finish(self) -> None:
        """Until everything that was started is done."""
        self.wait(list(self._works.values()), timeout_s=MESSAGE_TIMEOUT_S)

    def cut(self) -> None:
        """End every operation in flight. Any thread may call it, at any time."""
        self.is_over = True
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        for connection in self._connections:
            connection.close()
        self._connections, self._descriptors = [], []
        if self._waiter is not None:
            self._waiter.end()
        _GROUPS.discard(self)
        with contextlib.suppress(AttributeError):
            del self._backend

    def drop_in_child(self) -> None:
        """Close the connections in a forked child, without a word to the peers."""
        for connection in self._connections:
            connection.close()
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._connections, self._descriptors = [], []

    def _start(self, operation: Callable[..., Work], *arguments: Any) -> Work:
        try:
            work = operation(*arguments)
        except RuntimeError as exc:
            # Gloo knows already that a connection has ended.
            raise self._fail(exc) from exc
        self._remember(work)
        return work

    def _remember(self, work: Work) -> None:
        if len(self._works) >= WORKS_REMEMBERED:
            # Gradients are waited for by torch, not here.
            self._works = {key: each for key, each in self._works.items() if not each.is_completed()}
        self._works[id(work)] = work

    def _fail(self, error: RuntimeError, *, is_stuck: bool = False) -> PeerLostError:
        """Cut the group and wait until nothing uses its members' memory any more, as far as gloo can tell.

        `is_stuck`: it waits already for something that does not end. Nothing arrives any more either.
        """
        self.cut()
        works, self._works = list(self._works.values()), {}
        if not is_stuck:
            waiting = Waiting(works, timedelta(seconds=END_S), ends_at_error=False)
            self._hand_over(waiting)
            waiting.is_done.wait(END_S)
        return lost("a rank of the group", str(error).splitlines()[0])

    def _hand_over(self, waiting: "Waiting") -> None:
        if self._waiter is None:
            self._waiter = _Waiter()
        self._waiter.orders.put(waiting)

    def _has_hung_up(self) -> bool:
        """Whether the other end of a connection is closed. In the middle of an operation nobody does that."""
        poll = select.poll()
        for connection in list(self._connections):
            with contextlib.suppress(ValueError):
                poll.register(connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def _keep_connections(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            # A copy of the descriptor: the number may be used again once gloo has closed its own.
            connection = socket.socket(fileno=os.dup(descriptor))
            try:
                # Never a listening socket: shutting that down ends the process.
                is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                connection.getpeername()
            except OSError:
                is_listening = 1
            if is_listening or connection.family == socket.AF_UNIX:
                connection.close()
            else:
                self._connections.append(connection)
                self._descriptors.append(descriptor)


@dataclass(eq=False, slots=True)
class Waiting:
    """Operations that somebody waits for, and how that ended."""

    works: Sequence[Work | None]
    timeout: timedelta
    ends_at_error: bool = True
    after_each: Callable[[], object] = lambda: None
    is_over: Callable[[], bool] = lambda: False
    error: RuntimeError | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        for work in self.works:
            try:
                if work is not None:
                    # What does not end once the group is cut is not waited for in turn.
                    work.wait(timedelta(seconds=END_S) if self.is_over() else self.timeout)
                self.after_each()
            except RuntimeError as exc:
                self.error = exc
                if self.ends_at_error:
                    break
        self.is_done.set()


class _Waiter:
    """A thread that waits for gloo, which holds whoever waits for it until its own timeout.

    It ends with its group; if it is held by then, when the operation's time is up.
    """

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hieravg-gloo", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Waited for: a thread that drops the last of a group's operations while Python ends would abort."""
        self.orders.put(None)
        self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            waiting = self.orders.get()
            if waiting is None:
                return
            waiting.run()
            # Else the operations, and the group with them, would live until the next order.
            del waiting


@dataclass(frozen=True, slots=True)
class NodeWorld:
    """The workers of one node, where they are not the world that the environment tells torch of.

    `first_rank` is that of the node's first worker in a default group that a script makes by itself.
    """

    store: Store
    rank: int
    num_ranks: int
    first_rank: int = 0


def node_process_group(world: NodeWorld | None) -> tuple[ProcessGroup, Callable[[], None]]:
    """torch's default group, over the workers of one node, and how to end it. Collective over them.

    A default group that somebody has made already is left alone: what is returned is it, or a part of it.
    """
    if dist.is_initialized():
        if world is None or dist.get_world_size() == world.num_ranks:
            return _default_group(), lambda: None
        ranks = list(range(world.first_rank, world.first_rank + world.num_ranks))
        part = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(part, ProcessGroup)
        return part, lambda: dist.destroy_process_group(part) if dist.is_initialized() else None
    backend = "cpu:gloo,cuda:nccl" if cuda.is_available() else "gloo"
    if world is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=world.store, rank=world.rank, world_size=world.num_ranks)
    made = _default_group()

    def end() -> None:
        if dist.is_initialized() and dist.group.WORLD is made:
            dist.destroy_process_group()

    return made, end


def has_default_group() -> bool:
    """Whether this process has a default group of torch: ours, or one that DDP's or FSDP's user made."""
    return dist.is_available() and dist.is_initialized()


def _default_group() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _gloo_options(address: str, *, timeout_s: float) -> Any:
    # torch has no public way to build a group without a default group; this is all of it that we use.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    options._threads = GLOO_THREADS  # noqa: SLF001
    options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]  # noqa: SLF001
    return options


def _bounded(connect: Callable[[], Any], *, timeout_s: float, is_over: Callable[[], bool]) -> Any:
    """What `connect` returns. gloo's own bound does not hold: if a peer dies at the door, it waits for ever.

    The thread that waits there is left behind; it holds nothing that anybody needs.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(connect())
        except RuntimeError as exc:
            found.append(exc)

    thread = threading.Thread(target=run, name="hieravg-connect", daemon=True)
    thread.start()
    deadline_s = time.monotonic() + timeout_s
    while thread.is_alive() and not is_over() and time.monotonic() < deadline_s:
        thread.join(LOOK_S)
    if not found:
        raise lost("a rank of the group", "it did not come to connect")
    if isinstance(found[0], RuntimeError):
        raise lost("a rank of the group", f"connecting failed: {found[0]}") from found[0]
    return found[0]


def _socket_inodes() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are wanted, not paths
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")  # noqa: PTH116
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _drop_in_child() -> None:
    # Else a forked child keeps the connections open, and its parent's death goes unnoticed.
    for group in list(_GROUPS):
        group.drop_in_child()


os.register_at_fork(after_in_child=_drop_in_child)
