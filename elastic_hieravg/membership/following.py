"""How one agent follows the embedded store's host, and finds the next one when it is lost.

A thread that tells the host what this agent knows, notices its loss, and asks the others; what it decides is
decided by `stewardship` and `succession`. Invariant: nothing that comes from a host that is followed no more
reaches the agent's knowledge.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_hieravg.errors import Problem, StoreAwayError, StoreDeniedError, StoreError
from elastic_hieravg.membership.embedded import EmbeddedKeyValue
from elastic_hieravg.membership.hosts import (
    Host,
    Where,
    brought_message,
    host_message,
    read_host,
    registration_message,
)
from elastic_hieravg.membership.kv import Changes, Snapshot
from elastic_hieravg.membership.stewardship import Stewardship, name_of

# A host is told so often that its follower lives, and what it knows.
BEAT_S = 0.5
# One that does not answer for so long is lost; `hosting.ENDED_S` counts on it.
HOST_SILENT_S = 4.0
# How long a host or a candidate may take to answer, and how long for a call to the store.
ASK_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 2.0
# One that was lost or is no member may take so long: it is asked again anyway.
PROBE_TIMEOUT_S = 0.3
# An agent that did not answer is left out for so long.
SKIP_S = 4.0
RETRY_S = 0.05
# Things that are tried again and are not urgent.
SELDOM_S = 1.0
# From then on the membership is called frozen.
FROZEN_S = 30.0
# How long the first agent may take to serve the store.
SERVE_WAIT_S = 60.0
# Of the agents that are not heard, so many are called on in a turn, and so many are remembered.
CALLS_PER_TURN = 4
REMEMBERED_MAX = 256


class Follower:
    """`on_switch` is called, in the thread, when `client` is another one or none.

    `report` is told, once each time, that the membership is frozen, and why.
    """

    def __init__(
        self,
        steward: Stewardship,
        endpoints: Sequence[Where],
        *,
        on_switch: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        self._steward = steward
        self._endpoints = tuple(endpoints)
        self._on_switch = on_switch
        self._report = report
        self._closed = threading.Event()
        self._version = 0
        self._client: EmbeddedKeyValue | None = None
        self._line: EmbeddedKeyValue | None = None
        self._lines: dict[Where, EmbeddedKeyValue] = {}
        self._skipped_until_s: dict[Where, float] = {}
        self._agents: dict[Where, None] = {}
        self._lost_s = self._seldom_s = -1.0
        self._is_frozen = False
        self._thread = threading.Thread(target=self._run, name="hieravg-host", daemon=True)
        self._follow(self._find())
        self._thread.start()

    @property
    def client(self) -> tuple[int, EmbeddedKeyValue | None]:
        """The host's client, and a number that changes with it."""
        with self._steward.lock:
            return self._version, self._client

    def saw(self, version: int, update: Snapshot | Changes) -> bool:
        """Note what the store told. False if that was a host that is followed no more."""
        steward = self._steward
        with steward.lock:
            if version != self._version:
                return False
            if steward.knowledge.apply(update):
                # The host needs to know that its generation is known.
                steward.wake.set()
        return True

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._steward.wake.set()
        self._thread.join()
        if self._line is not None and self._steward.host is not None and self._steward.hosted is None:
            # Said while this process still answers: nobody has to wait for it.
            self._steward.knowledge.renounce()
            with contextlib.suppress(StoreError):
                self._line.call(self._steward.beat())
        _close(self._client, self._line, *self._lines.values())

    def _run(self) -> None:
        while not self._closed.is_set():
            wait_s = self._turn()
            self._steward.wake.wait(wait_s)
            self._steward.wake.clear()

    def _turn(self) -> float:
        """One look after the host; how long to the next, in seconds."""
        steward = self._steward
        with steward.lock:
            hint, steward.hint = steward.hint, None
            has_to_lose, steward.has_to_lose = steward.has_to_lose, False
        if has_to_lose:
            self._lose()
        if hint is not None and self._try(hint):
            return 0.0
        return self._seek() if steward.host is None else self._look_after(steward.host)

    # --- following ------------------------------------------------------------------------------------------

    def _look_after(self, host: Host) -> float:
        steward, line = self._steward, self._line
        assert line is not None
        now_s = time.monotonic()
        try:
            answer = line.call(steward.beat())
        except StoreAwayError:
            if line.is_gone or now_s > steward.heard_s + HOST_SILENT_S:
                self._lose()
                return 0.0
            return RETRY_S
        told = read_host(answer["host"])
        if told is None or told.server_id != host.server_id:
            # It lives and serves no more.
            self._lose(was_told=True)
            return 0.0
        with steward.lock:
            steward.heard_s, steward.host, steward.echo_s = time.monotonic(), told, float(answer["at_s"])
        if steward.hosted is not None and now_s > self._seldom_s + SELDOM_S:
            self._seldom_s = now_s
            self._call_on_others(told)
        return BEAT_S

    def _follow(self, host: Host) -> None:
        steward = self._steward
        former = (self._client, self._line, *self._lines.values())
        with steward.lock:
            self._version += 1
            steward.host, steward.lost = host, None
            steward.promised = max(steward.promised, host.term)
            # What the host counts from is echoed with the second beat: the first has nothing of it yet.
            steward.heard_s, steward.echo_s = time.monotonic(), -1.0
            steward.has_ended = steward.held_lease = False
            steward.withdraw()
            self._client = self._reach(host)
        self._line = self._reach(host, timeout_s=ASK_TIMEOUT_S)
        self._lines = {}
        self._skipped_until_s.clear()
        self._is_frozen = False
        self._seldom_s = -1.0
        self._on_switch()
        _close(*former)

    def _lose(self, *, was_told: bool = False) -> None:
        """The host is lost; `was_told`: it said itself that it serves no more."""
        steward, line = self._steward, self._line
        assert line is not None
        with steward.lock:
            if steward.host is None:
                return
            self._version += 1
            steward.host, steward.lost = None, steward.host
            former, self._client = self._client, None
            steward.was_told = was_told
            if line.is_gone:
                steward.note_end()
        self._lost_s, self._seldom_s = time.monotonic(), -1.0
        self._on_switch()
        _close(former)

    def _reach(self, host: Host, *, timeout_s: float = CALL_TIMEOUT_S) -> EmbeddedKeyValue:
        run_id, server_id = self._steward.run_id, host.server_id
        return EmbeddedKeyValue(*host.where, run_id=run_id, server_id=server_id, call_timeout_s=timeout_s)

    def _call_on_others(self, hosted: Host) -> None:
        """Be found at the endpoints, and tell agents that are not heard where the store is."""
        steward = self._steward
        message = {"call": "moved", "host": host_message(hosted)}
        for endpoint in self._endpoints:
            if not steward.bind(endpoint):
                self._hear(self._ask(endpoint, message, timeout_s=PROBE_TIMEOUT_S))
        with steward.lock:
            live = {where for _, where in steward.knowledge.agents()} - {steward.me}
        self._agents |= dict.fromkeys(sorted(live))
        now_s, silent_s = time.monotonic(), SELDOM_S + 2 * BEAT_S
        silent = [each for each in self._agents if steward.is_silent(now_s, each, silent_s=silent_s)]
        for where in silent[:CALLS_PER_TURN]:
            answer = self._ask(where, message, timeout_s=PROBE_TIMEOUT_S)
            del self._agents[where]
            if answer is not None or where in live or where in self._skipped_until_s:
                # At the end of the row: it lives, or may live.
                self._agents[where] = None
            self._hear(answer)
        while len(self._agents) > REMEMBERED_MAX:
            del self._agents[next(iter(self._agents))]

    def _hear(self, answer: Mapping[str, Any] | None) -> None:
        if answer is not None:
            self._steward.take_hint(read_host(answer["host"]))

    # --- without a host -------------------------------------------------------------------------------------

    def _find(self) -> Host:
        """The host, for an agent that comes from elsewhere; it serves itself if it is the first."""
        deadline_s = time.monotonic() + SERVE_WAIT_S
        first, *others = self._endpoints
        while True:
            for endpoint in others:
                host = None if self._steward.bind(endpoint) else self._told_at(endpoint)
                if host is not None:
                    return host
            host = self._steward.found(first) or self._told_at(first)
            if host is not None:
                return host
            if time.monotonic() > deadline_s:
                raise StoreAwayError(
                    Problem(
                        f"no agent served the store at {first[0]}:{first[1]} for {SERVE_WAIT_S:.0f} s",
                        "check that the first node's agent runs, and that --rdzv-endpoint is its address",
                    )
                )
            time.sleep(RETRY_S)

    def _told_at(self, where: Where) -> Host | None:
        answer = self._ask(where, {"call": "who"})
        return None if answer is None else read_host(answer["host"])

    def _seek(self) -> float:
        """One try to find the next host, or to be it."""
        steward = self._steward
        now_s = time.monotonic()
        if now_s > self._seldom_s + SELDOM_S:
            if self._look_back() or self._look_around(now_s):
                return 0.0
            self._seldom_s = time.monotonic()
        if now_s < steward.quiet_until_s:
            return RETRY_S
        with steward.lock:
            candidates = list(steward.knowledge.candidates())
            message = {"call": "register", **self._said()}
        for incarnation, where in candidates:
            if where == steward.me:
                if incarnation == steward.knowledge.identity:
                    steward.stand()
                    return RETRY_S
                continue
            answer = self._ask(where, message)
            if answer is not None and (answer["host"] or answer.get("is_standing")):
                steward.withdraw()
                return self._take(where, answer)
        return RETRY_S

    def _said(self) -> dict[str, Any]:
        """Who this is, for a candidate; under the steward's lock."""
        registration = self._steward.registration()
        said = {"who": self._steward.name, "term": registration.promised}
        return {**said, "registration": registration_message(registration)}

    def _take(self, where: Where, answer: Mapping[str, Any]) -> float:
        """What an agent that comes before this one answers."""
        host = read_host(answer["host"])
        if host is not None:
            return 0.0 if self._try(host) else RETRY_S
        steward, term = self._steward, int(answer.get("elect", 0))
        if term:
            with steward.lock:
                said = self._said()
                registration = steward.vote_in(term, name_of(where))
                brought = steward.knowledge.brought()
            if registration is None:
                self._ask(where, {"call": "register", **said, "refused_term": term})
            else:
                vote = {**said, "registration": registration_message(registration), "voted_term": term}
                self._ask(where, {"call": "vote", **vote, "brought": brought_message(brought)})
        return RETRY_S

    def _try(self, host: Host, *, is_anew: bool = False) -> bool:
        """Follow a host if it answers as such, and is not behind what is known here."""
        steward = self._steward
        lost = steward.lost
        is_same = lost is not None and host.server_id == lost.server_id
        is_later = lost is None or host.term > lost.term or is_same
        if not is_anew and (host.term < steward.promised or not is_later):
            return False
        line = self._reach(host, timeout_s=ASK_TIMEOUT_S)
        try:
            told = read_host(line.call(steward.beat())["host"])
        except StoreError:
            return False
        finally:
            line.close()
        if told is None or told.server_id != host.server_id:
            return False
        if is_anew:
            with steward.lock:
                steward.promised = steward.heard_term = host.term
        self._follow(told)
        return True

    def _look_back(self) -> bool:
        """Whether the lost host is there again; or whether its process has ended."""
        steward = self._steward
        lost = steward.lost
        if lost is None or steward.has_ended:
            return False
        line = self._reach(lost, timeout_s=PROBE_TIMEOUT_S)
        try:
            # If this agent has voted since, the old host has to be voted for anew.
            line.call({"call": "who", "term": steward.promised})
        except StoreError:
            if line.is_gone:
                with steward.lock:
                    steward.note_end()
            return False
        finally:
            line.close()
        return self._try(lost)

    def _look_around(self, now_s: float) -> bool:
        """Ask at the endpoints, and say so if nobody can be found for long."""
        steward = self._steward
        is_long = now_s > self._lost_s + FROZEN_S
        for endpoint in self._endpoints:
            answer = self._ask(endpoint, {"call": "who", "is_seeking": True}, timeout_s=PROBE_TIMEOUT_S)
            host = None if answer is None else read_host(answer["host"])
            if host is not None and self._try(host, is_anew=is_long and steward.has_ended):
                return True
        if is_long and not self._is_frozen:
            self._is_frozen = True
            self._report(
                f"the membership is frozen: {steward.why_away()}. Training goes on; no node can join or leave. "
                "A store of its own survives the loss of any node: --rdzv-backend etcd3"
            )
        return False

    def _ask(
        self, where: Where, message: dict[str, Any], *, timeout_s: float = ASK_TIMEOUT_S
    ) -> dict[str, Any] | None:
        """What an agent answers, or None. One that says nothing at all is left out for some time."""
        now_s = time.monotonic()
        if where == self._steward.me or now_s < self._skipped_until_s.get(where, now_s):
            return None
        line = self._lines.get(where)
        if line is None:
            run_id = self._steward.run_id
            line = EmbeddedKeyValue(*where, run_id=run_id)
            self._lines[where] = line
        try:
            answer = line.call(message, timeout_s=timeout_s)
        except StoreDeniedError:
            if not self._thread.is_alive():
                # At the start it is a mistake somebody has to know of; later it is somebody else's affair.
                raise
            return None
        except StoreAwayError as exc:
            if isinstance(exc.__cause__, ConnectionError):
                self._skipped_until_s.pop(where, None)
            else:
                self._skipped_until_s[where] = now_s + SKIP_S
            return None
        self._skipped_until_s.pop(where, None)
        return answer


def _close(*clients: EmbeddedKeyValue | None) -> None:
    for client in clients:
        if client is not None:
            client.close()
