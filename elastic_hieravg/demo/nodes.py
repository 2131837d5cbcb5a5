"""The demo's nodes: agents as processes of this machine, each with its workers below it.

They are started with `hieravg run`, as anybody would, and hurt by signals. Invariant: nothing of them outlives
the demo, however it ends.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic_hieravg.config import environment_with

HIERARCHY = "node=4,global=16"
SLOTS = 2
NODES_MIN, NODES_MAX = 2, 4
# A newcomer waits so long for others who may come too.
SETTLE_S = 0.2
# An agent that was killed is gone at once; one that was asked to end has had its time before.
END_S = 10.0
CONNECT_S = 1.0

_AGENT = (
    "import sys; from elastic_hieravg.demo.endings import end_with_parent;"
    "end_with_parent(int(sys.argv.pop(1)));"
    "from elastic_hieravg.cli import main; sys.exit(main())"
)


@dataclass(slots=True)
class Agent:
    """One start of a node. `is_excused`: it may end, because it was hurt or asked to."""

    process: "subprocess.Popen[bytes]"
    is_excused: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


class Nodes:
    """All of it is called by one thread: the kernel ends an agent with the thread that started it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = _free_port()
        self._agents: dict[str, Agent] = {}
        self.starts: Counter[str] = Counter()
        for name in ("lines", "logs"):
            (folder / name).mkdir(parents=True)

    # --- what is done to them ---------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        command = [sys.executable, "-P", "-c", _AGENT, str(os.getpid()), "run"]
        command += ["--node-id", name, f"--nnodes={NODES_MIN}:{NODES_MAX}", f"--nproc-per-node={SLOTS}"]
        command += [f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=demo", "--rdzv-backend=c10d"]
        command += [f"--rdzv-conf=last_call_timeout={SETTLE_S}", "--local-addr=127.0.0.1"]
        command += ["--membership", "in-place", "--hierarchy", HIERARCHY, "--warmup-steps", "0"]
        command += ["--metrics-port", "auto", "--metrics-host", "127.0.0.1", "--log-format", "plain"]
        command += [f"--log-dir={self._folder / 'logs'}", "-m", "elastic_hieravg.demo.train"]
        command += ["--folder", str(self._folder), "--name", name]
        with self.log(name).open("ab") as out, environment_with("OMP_NUM_THREADS", "1"):
            # A session of its own: Ctrl-C is for the demo, which ends its nodes itself.
            process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self._folder,
                start_new_session=True,
            )
        self._agents[name] = Agent(process)
        self.starts[name] += 1

    def kill(self, name: str) -> None:
        """A machine that loses its power: agent and workers die at the same time."""
        agent = self._agents[name]
        agent.is_excused = True
        _send((agent.process.pid, *_children(agent.process.pid)), signal.SIGKILL)
        agent.process.wait(END_S)

    def freeze(self, name: str) -> None:
        agent = self._agents[name].process.pid
        _send((agent, *_children(agent)), signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        agent = self._agents[name].process.pid
        _send((*_children(agent), agent), signal.SIGCONT)

    def ask_to_leave(self, name: str) -> None:
        self._agents[name].is_excused = True
        self._agents[name].process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the training for all, with one last round of all."""
        for agent in self._agents.values():
            agent.is_excused = True
        (self._folder / "stop").touch()

    def close(self) -> None:
        """Nothing is left after this, whatever was going on."""
        for agent in self._agents.values():
            if agent.is_alive:
                _send((agent.process.pid, *_children(agent.process.pid)), signal.SIGKILL)
                agent.process.wait(END_S)

    # --- what becomes of them ---------------------------------------------------------------------------------

    def log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def exit_code(self, name: str) -> int | None:
        return self._agents[name].process.poll()

    def is_store_served(self) -> bool:
        """Whether the first node serves the store, so that the others find it there."""
        with socket.socket() as sock:
            sock.settimeout(CONNECT_S)
            return sock.connect_ex(("127.0.0.1", self._port)) == 0

    def fallen(self) -> str | None:
        """A node whose agent has ended though nobody did anything to it."""
        ended = (name for name, agent in self._agents.items() if not agent.is_excused and not agent.is_alive)
        return next(ended, None)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _send(process_ids: Iterable[int], number: signal.Signals) -> None:
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)


def _children(process_id: int) -> list[int]:
    """The processes it has started and that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name may hold anything, brackets too; what follows its last bracket is regular.
            _, parent, *_ = path.read_text().rpartition(")")[2].split()
            if int(parent) == process_id:
                found.append(int(path.parent.name))
    return found
