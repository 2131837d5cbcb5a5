"""What an agent says of the job at `/status`, asked again and again by a thread while the demo goes on.

An agent that does not answer is no error here: the facts come from the workers, this is for the eyes.
Invariant: the thread ends with its owner.
"""

import http.client
import threading

from elastic_hieravg.errors import HierAvgError
from elastic_hieravg.metrics.status_reading import Status, read_document, read_status

PERIOD_S = 0.3
ANSWER_S = 2.0
# Four nodes of two workers need about 10 KB.
DOCUMENT_BYTES_MAX = 4 * 1024 * 1024


class Watcher:
    """`newest` is None until the agent at this port has answered."""

    def __init__(self, port: int) -> None:
        self.newest: Status | None = None
        self._port = port
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hieravg-demo-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self.newest = self._ask() or self.newest

    def _ask(self) -> Status | None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            connection.request("GET", "/status")
            content = connection.getresponse().read(DOCUMENT_BYTES_MAX)
            return read_status(read_document(content.decode()))
        except (OSError, http.client.HTTPException, UnicodeDecodeError, HierAvgError):
            return None
        finally:
            connection.close()
