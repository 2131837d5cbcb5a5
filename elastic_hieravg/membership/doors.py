"""How an agent notices that another one's process ended: a connection that nobody closes on purpose.

Every agent has a door, a port it listens at, and holds a connection to the doors of some others. When such a
connection ends, the door is tried again: refused, or opened by somebody else, means that the process is
gone. Opened as before, or no answer at all, means nothing: a busy or frozen process keeps its door open,
because the kernel answers for it, and a lost network or power is for the lease to find out.
Invariant: a live process is never taken for dead because it is slow.
"""

import contextlib
import errno
import math
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic_hieravg.errors import Problem, UsageError

# Each agent's process is watched by so many others, spread over the job, so that a lost rack is not its own
# only witness.
WATCHERS = 8
# A door that does not answer is tried again so often, with so long for each try.
KNOCK_EVERY_S = 1.0
KNOCK_TIMEOUT_S = 1.0
# One that was open and hangs up is about to be closed for good, most of the time.
KNOCK_SOON_S = 0.1
BACKLOG = 256
VISITORS_MAX = 1024
NAME_BYTES = 64

_MINE, _NOT_MINE = b"1", b"0"


@dataclass(frozen=True, slots=True)
class Door:
    """Where an agent's process is reached, and an incarnation that is or was its own."""

    address: str
    port: int
    incarnation: str


class _State(StrEnum):
    CLOSED = "closed"  # to be tried when its time comes
    KNOCKING = "knocking"  # the connection is being made
    ASKING = "asking"  # connected, waiting to hear whose door it is
    OPEN = "open"  # held; its end means something


def watched_by(node_id: str, node_ids: Sequence[str]) -> tuple[str, ...]:
    """The nodes that this one watches, of all nodes in their order. Each is watched by as many.

    >>> watched_by("a", ["a", "b", "c"])
    ('b', 'c')
    """
    here, count = node_ids.index(node_id), len(node_ids)
    if count - 1 <= WATCHERS:
        distances: Collection[int] = range(1, count)
    else:
        distances = [1 + step * (count - 1) // WATCHERS for step in range(WATCHERS)]
    return tuple(node_ids[(here + distance) % count] for distance in distances)


def turn_of(node_id: str, *, watched: str, node_ids: Sequence[str]) -> int:
    """How many others that watch the same node come before this one."""
    watchers = [each for each in node_ids if each != watched and watched in watched_by(each, node_ids)]
    return watchers.index(node_id) if node_id in watchers else len(watchers)


class Doors:
    """One agent's door and the connections it holds, in a thread of their own until closed.

    `on_death` is called in that thread with the door of a process that has ended; `on_life` with one that was
    asked for by `probe` and answered.
    """

    def __init__(
        self,
        address: str,
        *,
        on_death: Callable[[Door, str], None],
        on_life: Callable[[Door], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_death = on_death
        self._on_life = on_life
        self._clock = clock
        self._mine: set[str] = set()
        self._listener = _listen(address)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._visitors: set[socket.socket] = set()
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._probed: _Watched | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hieravg-doors", daemon=True)
        self._thread.start()

    def own(self, incarnation: str) -> None:
        """Answer for another incarnation too."""
        # At once: its record is written next, and whoever reads that may ask.
        self._mine.add(incarnation)

    def watch(self, doors: Sequence[Door]) -> None:
        """Hold connections to these doors, and to no others."""
        self._order(lambda: self._set_watched(doors))

    def probe(self, door: Door) -> None:
        """Find out whether a process lives. It is asked until it answers, or another is asked for."""
        self._order(lambda: self._set_probed(door))

    def close(self) -> None:
        self._closed.set()
        self._order(lambda: None)
        self._thread.join()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # --- in the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                for key, _ in self._selector.select(self._timeout_s()):
                    self._handle(key)
                self._take_orders()
                self._try_again()
        finally:
            for watched in self._all_watched():
                self._hang_up(watched)
            for visitor in list(self._visitors):
                self._see_off(visitor)
            for sock in (self._listener, self._waker, self._woken):
                sock.close()
            self._selector.close()

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            self._welcome()
        elif key.fileobj is self._woken:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        elif isinstance(key.data, _Watched):
            self._listen_to(key.data)
        else:
            assert isinstance(key.fileobj, socket.socket)
            self._answer(key.fileobj)

    def _take_orders(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()

    # --- visitors -------------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            visitor, _ = self._listener.accept()
            if len(self._visitors) >= VISITORS_MAX:
                visitor.close()
                return
            visitor.setblocking(False)
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._visitors.add(visitor)
            self._selector.register(visitor, selectors.EVENT_READ)

    def _answer(self, visitor: socket.socket) -> None:
        """Say whether the incarnation the visitor asks for is this process's."""
        try:
            asked = visitor.recv(NAME_BYTES)
            if asked:
                visitor.send(_MINE if asked.decode(errors="replace") in self._mine else _NOT_MINE)
                return
        except BlockingIOError:
            return
        except OSError:
            # It is gone, as after an empty read.
            pass
        self._see_off(visitor)

    def _see_off(self, visitor: socket.socket) -> None:
        self._visitors.discard(visitor)
        self._selector.unregister(visitor)
        visitor.close()

    # --- others' doors --------------------------------------------------------------------------------------

    def _set_watched(self, doors: Sequence[Door]) -> None:
        wanted = {(door.address, door.port): door for door in doors}
        for where in self._watched.keys() - wanted.keys():
            self._hang_up(self._watched.pop(where))
        for where, door in wanted.items():
            if where in self._watched:
                self._watched[where].door = door
            else:
                self._watched[where] = _Watched(door)
                self._knock(self._watched[where])

    def _set_probed(self, door: Door) -> None:
        if self._probed is not None:
            self._hang_up(self._probed)
        self._probed = _Watched(door, is_probe=True, was_open=True)
        self._knock(self._probed)

    def _all_watched(self) -> list["_Watched"]:
        return [*self._watched.values(), *([] if self._probed is None else [self._probed])]

    def _knock(self, watched: "_Watched") -> None:
        watched.sock = socket.socket(_family(watched.door.address), socket.SOCK_STREAM)
        watched.sock.setblocking(False)
        watched.state = _State.KNOCKING
        watched.until_s = self._clock() + KNOCK_TIMEOUT_S
        error = watched.sock.connect_ex((watched.door.address, watched.door.port))
        self._selector.register(watched.sock, selectors.EVENT_WRITE, watched)
        if error not in (0, errno.EINPROGRESS):
            self._not_opened(watched, error)

    def _listen_to(self, watched: "_Watched") -> None:
        assert watched.sock is not None
        if watched.state is _State.KNOCKING:
            error = watched.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._not_opened(watched, error)
            else:
                self._ask(watched)
            return
        try:
            heard = watched.sock.recv(len(_MINE))
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if watched.state is _State.ASKING:
            self._hear(watched, heard)
        elif not heard:
            # It was held and has ended. Whether its process has too is told by its door.
            self._hang_up(watched)
            self._knock(watched)

    def _ask(self, watched: "_Watched") -> None:
        assert watched.sock is not None
        watched.state = _State.ASKING
        watched.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._selector.modify(watched.sock, selectors.EVENT_READ, watched)
        with contextlib.suppress(OSError):
            # If it has ended already, reading will tell.
            watched.sock.send(watched.door.incarnation.encode())

    def _hear(self, watched: "_Watched", heard: bytes) -> None:
        if heard == _MINE:
            watched.state, watched.was_open, watched.until_s = _State.OPEN, True, math.inf
            if watched.is_probe:
                self._let_go(watched)
                self._on_life(watched.door)
        elif heard == _NOT_MINE:
            self._dead(watched, "another process is at its door")
        else:
            self._not_opened(watched, errno.ECONNRESET)

    def _not_opened(self, watched: "_Watched", error: int) -> None:
        # Refused by a door that was never open may also be a firewall's word.
        if error == errno.ECONNREFUSED and watched.was_open:
            self._dead(watched, "its process ended")
            return
        self._hang_up(watched)
        is_closing = error == errno.ECONNRESET and watched.was_open
        watched.until_s = self._clock() + (KNOCK_SOON_S if is_closing else KNOCK_EVERY_S)

    def _dead(self, watched: "_Watched", why: str) -> None:
        self._let_go(watched)
        self._on_death(watched.door, why)

    def _let_go(self, watched: "_Watched") -> None:
        self._hang_up(watched)
        if watched is self._probed:
            self._probed = None
        elif self._watched.get((watched.door.address, watched.door.port)) is watched:
            del self._watched[watched.door.address, watched.door.port]

    def _hang_up(self, watched: "_Watched") -> None:
        if watched.sock is not None:
            self._selector.unregister(watched.sock)
            watched.sock.close()
        watched.sock, watched.state = None, _State.CLOSED

    def _timeout_s(self) -> float | None:
        until_s = min((each.until_s for each in self._all_watched()), default=math.inf)
        return None if until_s == math.inf else max(0.0, until_s - self._clock())

    def _try_again(self) -> None:
        now_s = self._clock()
        for watched in [each for each in self._all_watched() if each.until_s <= now_s]:
            if watched.state is _State.CLOSED:
                self._knock(watched)
            else:
                self._not_opened(watched, errno.ETIMEDOUT)


def _listen(address: str) -> socket.socket:
    try:
        return socket.create_server((address, 0), family=_family(address), backlog=BACKLOG)
    except OSError as exc:
        message = f"this node cannot be reached at {address}: {exc.strerror}"
        raise UsageError(
            Problem(message, "give an address or a name of this machine itself with --local-addr")
        ) from exc


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@dataclass(eq=False, slots=True)
class _Watched:
    """Somebody's door as seen from here. `until_s`: when its state is given up, or tried again."""

    door: Door
    is_probe: bool = False
    was_open: bool = False
    state: _State = _State.CLOSED
    sock: socket.socket | None = None
    until_s: float = math.inf
