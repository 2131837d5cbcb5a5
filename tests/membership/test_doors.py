"""Doors: a process that ended is told of, and one that is slow, frozen or out of reach is not."""

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_hieravg.errors import UsageError
from elastic_hieravg.membership.doors import KNOCK_EVERY_S, KNOCK_TIMEOUT_S, NAME_BYTES, Door, Doors

HEARD_S = 60.0
# Long enough for several tries, so that a wrong word would have come.
SILENCE_S = 2 * (KNOCK_EVERY_S + KNOCK_TIMEOUT_S)
PROCESS = """
import sys
from elastic_hieravg.membership.doors import Doors
doors = Doors(sys.argv[1], on_death=print, on_life=print)
for name in sys.argv[2:]:
    doors.own(name)
print(doors.port, flush=True)
sys.stdin.read()
"""


def freeze(process: "subprocess.Popen[str]") -> None:
    """Stop a process, and wait until it has stopped: on a busy machine it may run on for a while."""
    process.send_signal(signal.SIGSTOP)
    deadline_s = time.monotonic() + HEARD_S
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Watcher:
    """A door of this process, and what it was told of others'."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.told: queue.SimpleQueue[tuple[str, Door, str]] = queue.SimpleQueue()
        self.doors = Doors(
            address,
            on_death=lambda door, why: self.told.put(("death", door, why)),
            on_life=lambda door: self.told.put(("life", door, "")),
        )

    def hear(self) -> tuple[str, Door, str]:
        return self.told.get(timeout=HEARD_S)

    def hear_nothing(self) -> None:
        with pytest.raises(queue.Empty):
            self.told.get(timeout=SILENCE_S)

    def await_open(self, count: int = 1) -> None:
        """Until so many doors are held open."""
        deadline_s = time.monotonic() + HEARD_S
        while sum(watched.was_open for watched in list(self.doors._watched.values())) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@contextlib.contextmanager
def neighbour(*names: str, address: str = "127.0.0.1") -> Iterator[tuple["subprocess.Popen[str]", Door]]:
    """A process with a door that answers for these names."""
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", PROCESS, address, *names]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, Door(address, int(process.stdout.readline()), names[0])
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    opened = Watcher()
    yield opened
    opened.doors.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_killed_process_is_told_of(address: str) -> None:
    watcher = Watcher(address)
    with neighbour("b0", address=address) as (process, door):
        watcher.doors.watch([door])
        watcher.await_open()
        process.kill()
        process.wait()
        assert watcher.hear() == ("death", door, "its process ended")
    watcher.doors.close()


def test_a_frozen_process_is_not_told_of_until_it_is_killed(watcher: Watcher) -> None:
    with neighbour("b0") as (process, door):
        watcher.doors.watch([door])
        watcher.await_open()
        freeze(process)
        watcher.hear_nothing()
        process.kill()
        assert watcher.hear() == ("death", door, "its process ended")


def test_a_process_that_was_frozen_when_it_was_first_asked_opens_later(watcher: Watcher) -> None:
    with neighbour("b0") as (process, door):
        freeze(process)
        watcher.doors.watch([door])
        watcher.hear_nothing()
        process.send_signal(signal.SIGCONT)
        watcher.await_open()
        process.kill()
        assert watcher.hear()[0] == "death"


def test_a_connection_that_ends_while_the_process_lives_means_nothing(watcher: Watcher) -> None:
    # The other end is here, so that its connections can be cut.
    other = Watcher()
    other.doors.own("b0")
    door = Door("127.0.0.1", other.doors.port, "b0")
    watcher.doors.watch([door])
    watcher.await_open()
    num_cut = 0
    for visitor in list(other.doors._visitors):
        visitor.shutdown(socket.SHUT_RDWR)
        num_cut += 1
    assert num_cut == 1
    watcher.hear_nothing()
    watcher.await_open()
    other.doors.close()
    assert watcher.hear() == ("death", door, "its process ended")


def test_another_process_at_the_same_door_means_death(watcher: Watcher) -> None:
    with neighbour("c0") as (_, door):
        # As after a restart of the machine, when the port has a new owner.
        stale = Door(door.address, door.port, "b0")
        watcher.doors.watch([stale])
        assert watcher.hear() == ("death", stale, "another process is at its door")


def test_a_door_that_was_never_open_is_no_proof(watcher: Watcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    watcher.doors.watch([Door("127.0.0.1", port, "b0")])
    watcher.hear_nothing()


def test_a_process_may_answer_for_many_names(watcher: Watcher) -> None:
    with neighbour("b0", "b1") as (process, door):
        watcher.doors.watch([door])
        watcher.await_open()
        # It started anew: the connection is kept, and told of under the newest name.
        renewed = Door(door.address, door.port, "b1")
        watcher.doors.watch([renewed])
        process.kill()
        assert watcher.hear() == ("death", renewed, "its process ended")


def test_a_door_that_is_no_longer_watched_is_not_told_of(watcher: Watcher) -> None:
    with neighbour("b0") as (process, door), neighbour("c0") as (other, other_door):
        watcher.doors.watch([door, other_door])
        watcher.await_open(2)
        watcher.doors.watch([other_door])
        process.kill()
        process.wait()
        other.kill()
        assert watcher.hear()[1] == other_door
        watcher.hear_nothing()


def test_a_probe_tells_life_and_death_and_nothing_of_silence(watcher: Watcher) -> None:
    with neighbour("b0") as (process, door):
        watcher.doors.probe(door)
        assert watcher.hear() == ("life", door, "")
        freeze(process)
        watcher.doors.probe(door)
        watcher.hear_nothing()
        # It only was slow to answer: what was asked is answered in the end.
        process.send_signal(signal.SIGCONT)
        assert watcher.hear() == ("life", door, "")
        process.kill()
        process.wait()
        watcher.doors.probe(door)
        assert watcher.hear() == ("death", door, "its process ended")


def test_garbage_at_the_door_is_answered_no(watcher: Watcher) -> None:
    watcher.doors.own("a0")
    for said in (b"\0" * NAME_BYTES, b"\xff\xfe", b"a0 and more", b"GET / HTTP/1.1\r\n\r\n" * 1000):
        with socket.create_connection(("127.0.0.1", watcher.doors.port), timeout=HEARD_S) as visitor:
            visitor.sendall(said)
            assert visitor.recv(1) == b"0"
    with socket.create_connection(("127.0.0.1", watcher.doors.port), timeout=HEARD_S) as visitor:
        visitor.sendall(b"a0")
        assert visitor.recv(1) == b"1"


def test_an_address_of_another_machine_is_told_with_what_to_do() -> None:
    ignored: Any = None
    for address in ("192.0.2.1", "nowhere.invalid"):
        with pytest.raises(UsageError, match=rf"cannot be reached at {address}: .*\n\nhint: give an address"):
            Doors(address, on_death=ignored, on_life=ignored)


def test_closing_ends_the_thread_and_every_connection() -> None:
    before = threading.active_count()
    first, second = Watcher(), Watcher()
    second.doors.own("b0")
    first.doors.watch([Door("127.0.0.1", second.doors.port, "b0")])
    first.await_open()
    for each in (first, second):
        each.doors.close()
    assert threading.active_count() == before
