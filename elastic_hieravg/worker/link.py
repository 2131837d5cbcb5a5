"""A worker's connection to its agent. The worker ends when its agent does.

What the agent says is given to `on_message` in a thread of its own; what is said to the agent never waits
for it. Invariant: a worker does not outlive its agent.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

from elastic_hieravg.membership.frames import FrameError, Stream
from elastic_hieravg.membership.local import FromAgent, FromWorker, Hello, from_message, to_message

CONNECT_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 10.0
SILENCE_S = 60.0
UNSENT_MAX = 1024
# What may be left out does not take more than this part of it.
OFFERS_UNSENT_MAX = 16
# A worker whose agent is gone has nobody to tell.
EXIT_ORPHANED = 1

_log = logging.getLogger(__name__)


class AgentLink:
    def __init__(
        self, where: str, *, token: str, local_rank: int, on_message: Callable[[FromAgent], None]
    ) -> None:
        self._on_message = on_message
        self._is_closed = False
        self.num_dropped = 0
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_TIMEOUT_S)
        sock.connect(f"\0{where}")
        # A socket object for each thread: they wait for different times.
        self._out, self._in = Stream(sock), Stream(sock.dup())
        self._unsent: queue.Queue[FromWorker | None] = queue.Queue(UNSENT_MAX)
        self.send(Hello(token, local_rank, os.getpid()))
        self._threads = [
            threading.Thread(target=target, name=f"hieravg-link-{name}", daemon=True)
            for name, target in (("send", self._send), ("receive", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: FromWorker) -> None:
        """Say something. If the agent does not listen, the link is as good as broken."""
        try:
            self._unsent.put_nowait(message)
        except queue.Full:
            self._lost("it does not listen")

    def offer(self, message: FromWorker) -> None:
        """Say something that may be left out: it is, and counted, while much is still unsent."""
        if self._unsent.qsize() >= OFFERS_UNSENT_MAX:
            self.num_dropped += 1
        else:
            self.send(message)

    def close(self) -> None:
        """Say what is left to say, and hang up."""
        self._is_closed = True
        with contextlib.suppress(queue.Full):
            self._unsent.put(None, timeout=SEND_TIMEOUT_S)
        self._threads[0].join(SEND_TIMEOUT_S)
        self._out.end()
        self._threads[1].join(SEND_TIMEOUT_S)
        self._out.close()
        self._in.close()

    def _send(self) -> None:
        try:
            while (message := self._unsent.get()) is not None:
                self._out.send(to_message(message), deadline_s=time.monotonic() + SEND_TIMEOUT_S)
        except OSError as exc:
            self._lost(str(exc))

    def _receive(self) -> None:
        why = "this worker could not follow it"
        try:
            while True:
                try:
                    message = self._in.receive(deadline_s=time.monotonic() + SILENCE_S)
                except TimeoutError:
                    # An agent has nothing to say while nothing changes.
                    continue
                self._on_message(from_message(message))  # type: ignore[arg-type] # it sends its own kinds only
        except (OSError, FrameError) as exc:
            why = str(exc)
        finally:
            # Whatever ended this: a worker that does not hear its agent must not go on.
            self._lost(why)

    def _lost(self, why: str) -> None:
        if not self._is_closed:
            _log.error("this worker's agent is gone (%s); the worker ends", why)
            # Not an exception: the training thread may be anywhere, and must not go on.
            os._exit(EXIT_ORPHANED)
