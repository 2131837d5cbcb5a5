"""The agent's end of the connections to its workers.

One socket without a name in the file system, one thread for all of them. What a worker says, and that its
connection ended, is told in that thread. Invariant: nobody is listened to who does not know the token.
"""

import contextlib
import queue
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_hieravg.config import AGENT_SOCKET_VARIABLE, AGENT_TOKEN_VARIABLE
from elastic_hieravg.membership.frames import RECEIVE_BYTES, Decoder, FrameError, encode
from elastic_hieravg.membership.local import FromAgent, FromWorker, Hello, from_message, to_message

BACKLOG = 256
# A worker that does not read what it is told is let go.
UNSENT_BYTES_MAX = 16 * 1024 * 1024


@dataclass(eq=False, slots=True)
class _Worker:
    sock: socket.socket
    local_rank: int | None = None
    process_id: int = 0
    decoder: Decoder = field(default_factory=Decoder)
    unsent: bytearray = field(default_factory=bytearray)


class WorkerChannel:
    """`on_message` and `on_gone` are called with the worker's local rank and process id."""

    def __init__(
        self,
        *,
        on_message: Callable[[int, int, FromWorker], None],
        on_gone: Callable[[int, int], None],
    ) -> None:
        self._on_message = on_message
        self._on_gone = on_gone
        name, self._token = f"hieravg-agent-{secrets.token_hex(8)}", secrets.token_hex(16)
        self.variables = {AGENT_SOCKET_VARIABLE: name, AGENT_TOKEN_VARIABLE: self._token}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # An abstract name vanishes with the process.
        self._listener.bind(f"\0{name}")
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._workers: set[_Worker] = set()
        self._orders: queue.SimpleQueue[FromAgent | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hieravg-workers", daemon=True)
        self._thread.start()

    def tell(self, message: FromAgent) -> None:
        """Tell every worker that is connected now. Any thread may call it."""
        self._order(message)

    def close(self) -> None:
        self._is_closed = True
        self._order(None)
        self._thread.join()

    def _order(self, order: FromAgent | None) -> None:
        self._orders.put(order)
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, events in self._selector.select():
                    if key.fileobj is self._listener:
                        self._welcome()
                    elif key.fileobj is self._woken:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(4096)
                    else:
                        self._serve(key.data, events)
                self._take_orders()
        finally:
            for worker in list(self._workers):
                self._let_go(worker)
            for sock in (self._listener, self._waker, self._woken):
                sock.close()
            self._selector.close()

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            worker = _Worker(sock)
            self._workers.add(worker)
            self._selector.register(sock, selectors.EVENT_READ, worker)

    def _serve(self, worker: _Worker, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(worker)
            if events & selectors.EVENT_READ:
                data = worker.sock.recv(RECEIVE_BYTES)
                if not data:
                    raise ConnectionResetError("the worker hung up")
                for message in worker.decoder.feed(data):
                    self._hear(worker, from_message(message))
        except BlockingIOError:
            return
        except (OSError, FrameError):
            self._let_go(worker)
            if worker.local_rank is not None and not self._is_closed:
                self._on_gone(worker.local_rank, worker.process_id)

    def _hear(self, worker: _Worker, message: FromWorker | FromAgent) -> None:
        if isinstance(message, Hello) and message.token == self._token:
            worker.local_rank, worker.process_id = message.local_rank, message.process_id
        if worker.local_rank is None:
            raise FrameError("a stranger")
        self._on_message(worker.local_rank, worker.process_id, message)  # type: ignore[arg-type]

    def _take_orders(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if order is None:
                    continue
                frame = encode(to_message(order))
                for worker in [each for each in self._workers if each.local_rank is not None]:
                    worker.unsent += frame
                    self._flush(worker)

    def _flush(self, worker: _Worker) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while worker.unsent:
                del worker.unsent[: worker.sock.send(worker.unsent)]
        if len(worker.unsent) > UNSENT_BYTES_MAX:
            worker.unsent.clear()
            with contextlib.suppress(OSError):
                worker.sock.shutdown(socket.SHUT_RDWR)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self._selector.modify(worker.sock, events, worker)

    def _let_go(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        self._selector.unregister(worker.sock)
        worker.sock.close()
