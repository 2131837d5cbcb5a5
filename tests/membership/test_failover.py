"""The host of the embedded store is killed and frozen: real processes, nobody else pays for it."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.membership.agents import AgentProcess

# Long enough for a host to be given up, for somebody to serve who must not, and for leases to end there.
WRONG_S = 12.0
# A kill is seen at once; this is for a machine with other things to do.
SOON_S = 20.0


class Agents:
    """Agents with names of one letter each. The first one hosts the store; each is `entered` as it adopts."""

    def __init__(self, names: str, *, num_endpoints: int = 1, **config: Any) -> None:
        self.ports = free_ports(num_endpoints)
        self._config = {"run_id": "run", "failover_ports": self.ports, **config}
        self.live: dict[str, AgentProcess] = {}
        self.ended: list[AgentProcess] = []
        self.numbers: list[int] = []
        self.start(names[0])
        for name in names[1:]:
            self.start(name, is_awaited=False)
        for name in names[1:]:
            self.live[name].hear(lambda said: said["told"] == "started")
        self.ready(names)

    def start(self, name: str, *, is_awaited: bool = True, **config: Any) -> None:
        self.live[name] = AgentProcess(node_id=name, **{**self._config, **config})
        if is_awaited:
            self.live[name].hear(lambda said: said["told"] == "started")

    def ready(self, names: str) -> None:
        for name in names:
            self.live[name].tell("ready")

    def adopt(self, members: str, *, within_s: float = 60.0) -> float:
        """All members adopt one generation of these members; when the last of them did."""
        number = self.live[members[0]].hear_adopted(*members, within_s=within_s)["number"]
        assert not self.numbers or number > self.numbers[-1], "numbers only grow"
        self.numbers.append(number)
        for name in members[1:]:
            self.live[name].hear(lambda said: said["told"] == "adopted" and said["number"] == number)
        heard = [next(said for said in reversed(self.live[name].heard) if "number" in said) for name in members]
        assert all(sorted(said["members"]) == sorted(members) for said in heard)
        for name in members:
            self.live[name].tell(f"enter {number}")
        return max(float(said["at_s"]) for said in heard)

    def kill(self, names: str) -> float:
        killed = [self.live.pop(name) for name in names]
        self.ended += killed
        return min(agent.kill() for agent in killed)

    def send(self, names: str, number: signal.Signals) -> None:
        for name in names:
            self.live[name].send(number)

    def assert_nothing_adopted(self, names: str, *, for_s: float) -> None:
        """Nobody of these is told of a generation in this time."""
        before = {name: self.count("adopted", name) for name in names}
        time.sleep(for_s)
        for name in names:
            self.catch_up(name)
            assert self.count("adopted", name) == before[name], self.live[name].heard[-3:]

    def assert_never_alone(self, name: str, *, for_s: float) -> None:
        """It is told of no generation of its own in this time. Leases of others may end one after the other."""
        time.sleep(for_s)
        self.catch_up(name)
        adopted = [said["members"] for said in self.live[name].heard if said["told"] == "adopted"]
        assert adopted
        assert [name] not in adopted

    def count(self, told: str, names: str) -> int:
        return sum(said["told"] == told for name in names for said in self.live[name].heard)

    def catch_up(self, name: str) -> None:
        """Everything it has said until now is in `heard`."""
        self.live[name].tell("status")
        self.live[name].hear(lambda said: said["told"] == "status")

    def assert_nobody_fenced(self, names: str) -> None:
        for name in names:
            self.catch_up(name)
        assert self.count("fenced", names) == 0

    def close(self) -> None:
        for agent in self.live.values():
            agent.send(signal.SIGCONT)
        codes = [agent.close() for agent in self.live.values()]
        for agent in self.ended:
            agent.close()
        assert set(codes) <= {0}, codes


@contextmanager
def agents_of(names: str, **config: Any) -> Iterator[Agents]:
    agents = Agents(names, **config)
    try:
        agents.adopt(names)
        yield agents
    finally:
        agents.close()
    for port in agents.ports:
        # Whoever answered there in the end is gone too.
        socket.create_server(("127.0.0.1", port)).close()


def free_ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
def test_the_host_is_killed_and_the_others_go_on_and_it_joins_again(names: str) -> None:
    with agents_of(names) as agents:
        rest = names[1:]
        killed_s = agents.kill("a")
        assert agents.adopt(rest) - killed_s < SOON_S
        # It knows the endpoint alone, and finds the job.
        agents.start("a")
        agents.ready("a")
        agents.adopt(names)
        # A loss after that is a loss like any other.
        agents.kill(names[-1])
        agents.adopt(names[:-1])
        agents.assert_nobody_fenced(names[1:-1])


def test_the_next_host_is_killed_too_and_the_one_after_it() -> None:
    with agents_of("abcd") as agents:
        for rest in ("bcd", "cd", "d"):
            agents.kill(chr(ord(rest[0]) - 1))
            agents.adopt(rest)
        agents.assert_nobody_fenced("d")
        agents.start("e")
        agents.ready("e")
        agents.adopt("de")


@pytest.mark.parametrize(("names", "killed"), [("abcd", "ab"), ("abcde", "ac")])
def test_the_host_and_another_are_killed_at_once(names: str, killed: str) -> None:
    with agents_of(names) as agents:
        rest = "".join(name for name in names if name not in killed)
        agents.kill(killed)
        agents.adopt(rest)
        agents.assert_nobody_fenced(rest)


def test_a_frozen_host_is_replaced_and_comes_back_as_a_new_incarnation() -> None:
    with agents_of("abc") as agents:
        agents.send("a", signal.SIGSTOP)
        agents.adopt("bc")
        agents.assert_nothing_adopted("bc", for_s=1.0)
        agents.send("a", signal.SIGCONT)
        # What it did in between came to nothing: it was told of no generation but this.
        agents.adopt("abc")
        agents.catch_up("a")
        assert agents.count("fenced", "a") == 1
        assert agents.count("adopted", "a") == 2
        agents.assert_nobody_fenced("bc")


def test_of_two_nothing_changes_while_the_host_is_frozen() -> None:
    with agents_of("ab") as agents:
        agents.send("a", signal.SIGSTOP)
        agents.assert_nothing_adopted("b", for_s=WRONG_S)
        agents.send("a", signal.SIGCONT)
        agents.start("c")
        agents.ready("c")
        agents.adopt("abc")
        agents.assert_nobody_fenced("abc")


def test_less_than_half_serve_nobody() -> None:
    with agents_of("abcde") as agents:
        agents.send("acd", signal.SIGSTOP)
        agents.assert_nothing_adopted("be", for_s=WRONG_S)
        agents.send("acd", signal.SIGCONT)
        agents.start("f")
        agents.ready("f")
        agents.adopt("abcdef")


def test_a_host_does_not_go_on_without_more_than_half_that_may_live() -> None:
    with agents_of("abc") as agents:
        agents.send("bc", signal.SIGSTOP)
        agents.assert_never_alone("a", for_s=WRONG_S)
        agents.send("bc", signal.SIGCONT)
        # They say themselves that they start anew.
        agents.adopt("a")
        agents.adopt("abc")
        # One of them ends, and it is known that it did.
        agents.send("b", signal.SIGSTOP)
        agents.kill("c")
        agents.adopt("a")
        agents.send("b", signal.SIGCONT)
        agents.adopt("ab")
        agents.assert_nobody_fenced("a")


def test_agents_that_are_too_few_say_so_and_join_a_new_store_at_the_endpoint() -> None:
    with agents_of("abc", frozen_s=5.0) as agents:
        agents.kill("ab")
        frozen = agents.live["c"].hear(lambda said: said["told"] == "frozen")
        assert "1 of the 3 nodes of generation" in frozen["why"]
        assert "--rdzv-backend etcd3" in frozen["why"]
        assert agents.count("adopted", "c") == 1
        agents.start("a")
        agents.ready("a")
        agents.adopt("ac")


def test_a_node_leaves_with_the_store_it_hosts() -> None:
    with agents_of("abc") as agents:
        agents.live["a"].tell("leave")
        agents.adopt("bc")
        agents.live["a"].hear(lambda said: said["told"] == "left" and said["in_time"])
        left = agents.live.pop("a")
        assert left.close() == 0
        agents.start("d")
        agents.ready("d")
        agents.adopt("bcd")
        agents.assert_nobody_fenced("bc")


def test_a_node_that_comes_asks_at_any_endpoint() -> None:
    with agents_of("abc", num_endpoints=2) as agents:
        agents.kill("a")
        agents.adopt("bc")
        # The first endpoint is somebody else's now, and says nothing.
        agents.start("d", failover_ports=[free_ports(1)[0], agents.ports[1]])
        agents.ready("d")
        agents.adopt("bcd")
        agents.assert_nobody_fenced("bc")


def test_the_job_ends_for_all_on_the_next_host() -> None:
    with agents_of("abc") as agents:
        agents.kill("a")
        agents.adopt("bc")
        agents.live["c"].tell("finish well")
        for name in "bc":
            assert agents.live[name].hear(lambda said: said["told"] == "ended")["is_success"]
