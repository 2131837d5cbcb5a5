"""A server in the agent's place: the page as it is, and at `/status` whatever a test wants.

`answer` is a document, bytes to say as they are, a number for an HTTP error, or `SILENCE`. Invariant: what was
asked is counted, and a server that is closed has no thread and no port left.
"""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import elastic_hieravg.metrics

PAGE = Path(elastic_hieravg.metrics.__file__).with_name("page.html")
SILENCE = "silence"
# A client that waits in silence has given up long before.
SILENCE_S = 120.0
JOIN_S = 60.0


class PageServer:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: Counter[str] = Counter()
        self._is_over = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self.port = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Listen, at the same port as before if there was one."""
        self._is_over.clear()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._server.daemon_threads = False
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        """The agent is gone: nobody listens any more."""
        if self._server is None or self._thread is None:
            return
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()
        self._server = None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked[self.path] += 1
                if self.path == "/":
                    self._say(200, PAGE.read_bytes(), "text/html; charset=utf-8")
                elif self.path == "/status":
                    self._tell(owner.answer)
                else:
                    self._say(404, b"", "text/plain")

            def _tell(self, answer: Any) -> None:
                if answer == SILENCE:
                    owner._is_over.wait(SILENCE_S)
                elif isinstance(answer, int):
                    self._say(answer, b"no", "text/plain")
                else:
                    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                    self._say(200, content, "application/json")

            def _say(self, code: int, content: bytes, kind: str) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
                pass

        return Handler
