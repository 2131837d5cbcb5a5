"""A file that says how many nodes the job may have, followed while it changes: a mounted ConfigMap.

Kubernetes replaces such a file by another one, at its own time on every node. What an agent reads there for the
first time is what the job begins with, or nothing if it runs already; what it reads later it says to the job,
once. Invariant: a file that cannot be read or used changes nothing.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elastic_hieravg.config import read_nnodes_file
from elastic_hieravg.errors import InputError
from elastic_hieravg.membership.records import Bounds
from elastic_hieravg.membership.service import Status

POLL_S = 2.0
# Longer than Kubernetes takes to bring a changed file to every node. If the job has other bounds than the file
# for so long, a word was lost; the first member says it again, and nobody else, so that two files never argue.
AGAIN_S = 180.0

_log = logging.getLogger(__name__)


class BoundsFile:
    """`change` is told new bounds, in a thread of its own. `first`: what was read at the start."""

    def __init__(
        self,
        path: Path,
        *,
        first: Bounds,
        change: Callable[[Bounds], None],
        status: Callable[[], Status],
        poll_s: float = POLL_S,
        again_s: float = AGAIN_S,
    ) -> None:
        self._path = path
        self._read = first
        self._change = change
        self._status = status
        self._poll_s = poll_s
        self._again_s = again_s
        self._differs_since_s: float | None = None
        self._complaint = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="hieravg-bounds", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._closed.wait(self._poll_s):
            self._look(time.monotonic())

    def _look(self, now_s: float) -> None:
        try:
            bounds = read_bounds_file(self._path)
        except InputError as exc:
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                now = f"{self._read.nodes_min}:{self._read.nodes_max}"
                _log.warning("the --nnodes-file is not used, and the job keeps its %s nodes: %s", now, exc)
            return
        self._complaint = ""
        if bounds != self._read:
            self._read, self._differs_since_s = bounds, None
            _log.info("%s says %s to %s nodes", self._path, bounds.nodes_min, bounds.nodes_max)
            self._change(bounds)
        elif self._is_forgotten(now_s):
            self._differs_since_s = None
            self._change(bounds)

    def _is_forgotten(self, now_s: float) -> bool:
        """Whether the job has had other bounds for so long that it is for this node to say them again."""
        status = self._status()
        members = status.adopted.generation.members if status.adopted and status.is_listed else ()
        is_first = bool(members) and members[0].node_id == status.node.node_id
        if status.bounds in (None, self._read) or not is_first:
            self._differs_since_s = None
            return False
        if self._differs_since_s is None:
            self._differs_since_s = now_s
        return now_s >= self._differs_since_s + self._again_s


def read_bounds_file(path: Path) -> Bounds:
    return Bounds(*read_nnodes_file(path))
