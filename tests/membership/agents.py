"""Agent processes as the tests hold them: started, told, listened to, killed and frozen."""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

HEARD_S = 180.0


class AgentProcess:
    """`heard` holds everything it has said so far."""

    def __init__(self, **config: Any) -> None:
        self.node_id: str = config["node_id"]
        self.heard: list[dict[str, Any]] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable]
        command += ["-m", "tests.membership.agent_process", json.dumps(config)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

    def hear(self, until: Callable[[dict[str, Any]], bool], *, within_s: float = HEARD_S) -> dict[str, Any]:
        """The first thing said from now on, or said and not yet asked for, that is as wanted."""
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.node_id} has only said {self.heard[-5:]}") from None
            said: dict[str, Any] = json.loads(line)
            self.heard.append(said)
            if until(said):
                return said

    def hear_adopted(self, *members: str, within_s: float = HEARD_S) -> dict[str, Any]:
        """A generation of exactly these members."""
        return self.hear(
            lambda said: said["told"] == "adopted" and sorted(said["members"]) == sorted(members),
            within_s=within_s,
        )

    def hear_reason(self, wanted: str, *, within_s: float = HEARD_S) -> None:
        """Ask until it decides for that reason."""
        deadline_s = time.monotonic() + within_s
        while True:
            self.tell("status")
            reason = self.hear(lambda said: said["told"] == "status")["reason"]
            if wanted in reason:
                return
            assert time.monotonic() < deadline_s, reason
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> float:
        """Kill it, and say when."""
        self._process.kill()
        killed_s = time.monotonic()
        self._process.wait()
        return killed_s

    def close(self) -> int:
        """Let it end by itself, or kill it if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            code = self._process.wait(HEARD_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)


@contextlib.contextmanager
def agent_processes(node_ids: str, **config: Any) -> Iterator[dict[str, AgentProcess]]:
    """Agents with names of one letter each; who was killed is not ended again."""
    agents = {node_id: AgentProcess(node_id=node_id, **config) for node_id in node_ids}
    try:
        yield agents
    finally:
        for agent in agents.values():
            agent.send(signal.SIGCONT)
            agent.close()
