"""An agent's connections to its workers, from both ends."""

import contextlib
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elastic_hieravg.agent.channel import UNSENT_BYTES_MAX, WorkerChannel
from elastic_hieravg.config import AGENT_SOCKET_VARIABLE, AGENT_TOKEN_VARIABLE
from elastic_hieravg.membership.frames import FRAME_BYTES_MAX, RECEIVE_BYTES, encode
from elastic_hieravg.membership.local import FromAgent, FromWorker, Hello, Ready, Stop, to_message
from elastic_hieravg.worker.link import EXIT_ORPHANED, AgentLink

HEARD_S = 60.0


class Agent:
    """A channel, and what it was told."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[int, int, FromWorker]] = queue.SimpleQueue()
        self.gone: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.channel = WorkerChannel(
            on_message=lambda *told: self.heard.put(told), on_gone=lambda *told: self.gone.put(told)
        )
        self.name = self.channel.variables[AGENT_SOCKET_VARIABLE]
        self.token = self.channel.variables[AGENT_TOKEN_VARIABLE]

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(HEARD_S)
        try:
            sock.connect(f"\0{self.name}")
        except OSError:
            sock.close()
            raise
        return sock


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    with contextlib.closing(made.channel):
        yield made


def hello(token: str, *, local_rank: int = 0) -> bytes:
    return encode(to_message(Hello(token, local_rank, 4711)))


def is_hung_up(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


def test_worker_and_agent_hear_each_other(agent: Agent) -> None:
    told: queue.SimpleQueue[FromAgent] = queue.SimpleQueue()
    link = AgentLink(agent.name, token=agent.token, local_rank=3, on_message=told.put)
    local_rank, _, message = agent.heard.get(timeout=HEARD_S)
    assert (local_rank, type(message)) == (3, Hello)
    link.send(Ready())
    assert agent.heard.get(timeout=HEARD_S)[2] == Ready()
    agent.channel.tell(Stop(is_success=True, reason="done"))
    assert told.get(timeout=HEARD_S) == Stop(is_success=True, reason="done")
    link.close()
    assert agent.gone.get(timeout=HEARD_S)[0] == 3


@pytest.mark.parametrize(
    "said",
    [
        hello("no idea"),
        encode(to_message(Ready())),
        b"GET / HTTP/1.1\r\n\r\n",
        encode({"kind": "Shout"}),
        b"\0\0\0\2{]",
        b"\xff\xff\xff\xff",
    ],
)
def test_stranger_is_not_listened_to(agent: Agent, said: bytes) -> None:
    with contextlib.closing(agent.connect()) as stranger, contextlib.closing(agent.connect()) as worker:
        stranger.sendall(said)
        assert is_hung_up(stranger)
        worker.sendall(hello(agent.token))
        # Only the worker was ever heard, and nobody is missed.
        assert agent.heard.get(timeout=HEARD_S)[1] == 4711
        assert agent.heard.empty()
        assert agent.gone.empty()


def test_stranger_is_told_nothing(agent: Agent) -> None:
    with contextlib.closing(agent.connect()) as stranger, contextlib.closing(agent.connect()) as worker:
        worker.sendall(hello(agent.token))
        agent.heard.get(timeout=HEARD_S)
        agent.channel.tell(Stop(is_success=True, reason="done"))
        assert worker.recv(1)
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.recv(1)


def test_worker_that_does_not_read_is_let_go(agent: Agent) -> None:
    with contextlib.closing(agent.connect()) as deaf, contextlib.closing(agent.connect()) as worker:
        deaf.sendall(hello(agent.token, local_rank=0))
        worker.sendall(hello(agent.token, local_rank=1))
        for _ in range(2):
            agent.heard.get(timeout=HEARD_S)
        stop = Stop(is_success=True, reason="x" * (FRAME_BYTES_MAX // 2))
        num_bytes = len(encode(to_message(stop)))
        for _ in range(2 * UNSENT_BYTES_MAX // num_bytes):
            agent.channel.tell(stop)
            # The other one reads it, and is served on.
            drain(worker, num_bytes)
        assert agent.gone.get(timeout=HEARD_S)[0] == 0
        worker.sendall(encode(to_message(Ready())))
        assert agent.heard.get(timeout=HEARD_S)[::2] == (1, Ready())
        assert agent.gone.empty()


def drain(sock: socket.socket, num_bytes: int) -> None:
    while num_bytes > 0:
        data = sock.recv(min(num_bytes, RECEIVE_BYTES))
        assert data, "the agent hung up"
        num_bytes -= len(data)


def test_worker_ends_with_its_agent(agent: Agent) -> None:
    code = f"""
import time
from elastic_hieravg.worker.link import AgentLink
AgentLink({agent.name!r}, token={agent.token!r}, local_rank=0, on_message=print)
time.sleep(600)
"""
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as worker:
        agent.heard.get(timeout=HEARD_S)
        agent.channel.close()
        assert worker.wait(HEARD_S) == EXIT_ORPHANED


def test_close_leaves_nothing(agent: Agent) -> None:
    before = threading.active_count()
    other = Agent()
    with contextlib.closing(other.connect()) as worker:
        worker.sendall(hello(other.token))
        other.heard.get(timeout=HEARD_S)
        other.channel.close()
        assert is_hung_up(worker)
        assert threading.active_count() == before
        with pytest.raises(ConnectionRefusedError):
            other.connect()
