"""What one agent answers the others about the embedded store's host, and when it begins or ceases to be it.

The steward of all servers of its process; `following.Follower` is the one who asks the others. Both share what
stands here, under one lock that is held for no call to anybody else.
"""

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic_hieravg.errors import Problem, StoreAwayError, UsageError
from elastic_hieravg.membership.candidacy import Candidacy, Mandate
from elastic_hieravg.membership.embedded import EmbeddedServer, new_lease_id
from elastic_hieravg.membership.hosting import Hosting
from elastic_hieravg.membership.hosts import (
    Host,
    Where,
    host_message,
    read_brought,
    read_host,
    read_registration,
)
from elastic_hieravg.membership.knowledge import Knowledge
from elastic_hieravg.membership.kv import Write
from elastic_hieravg.membership.ledger import Ledger
from elastic_hieravg.membership.mirror import Keys
from elastic_hieravg.membership.succession import Registration, first_revision

# A host that was not heard for so long is about to be lost, and not recommended.
RECOMMENDED_S = 2.0
# How long a new store waits to be told that the job lives elsewhere.
FOUND_S = 2.0
# A host that served this agent less than so long ago, and has ended, was host to its end: one that steps down
# votes for nobody before `QUIET_S` are over.
SERVED_S = 2.0
QUIET_S = 2.5
# If no voter knows how long a lease lives.
OTHER_TTL_S = 3.0


class Stewardship:
    """`host` is the one that is followed; `lost` the one that was, and `has_ended` what is known of its end.

    `hosted` is what this process serves itself. `hint`: somebody says that the store is there.
    """

    def __init__(self, address: str, *, run_id: str, found_s: float) -> None:
        self.lock = threading.RLock()
        self.wake = threading.Event()
        self.keys = Keys(run_id)
        self.run_id = run_id
        self._found_s = found_s
        self.host: Host | None = None
        self.heard_s = -1.0
        self.echo_s = -1.0
        self.lost: Host | None = None
        self.has_ended = self.held_lease = self.was_told = False
        self.quiet_until_s = -1.0
        self.hint: Host | None = None
        self.has_to_lose = False
        self.promised = self.heard_term = 0
        self.is_standing = False
        self._ballot: tuple[int, str, Registration] | None = None
        self.candidacy = Candidacy(self.keys, salt=secrets.randbits(32))
        self.hosted: Host | None = None
        self._hosting: Hosting | None = None
        self._bound: dict[Where, EmbeddedServer] = {}
        try:
            self._standby = EmbeddedServer(address, 0, run_id=run_id, steward=self, is_serving=False)
        except OSError as exc:
            message = f"this node cannot be reached at {address}: {exc.strerror}"
            raise UsageError(
                Problem(message, "give an address or a name of this machine itself with --local-addr")
            ) from exc
        self.me: Where = (address, self._standby.port)
        self.name = name_of(self.me)
        self.knowledge = Knowledge(self.keys, self.me)

    # --- servers --------------------------------------------------------------------------------------------

    def found(self, endpoint: Where) -> Host | None:
        """Begin a new store at an endpoint, if it is an address of this machine and nobody is there."""
        # A port that nobody can know of need not wait to be found.
        found_s = self._found_s if endpoint[1] else 0.0
        with self.lock:
            self._hosting = Hosting(self.keys, open_s=time.monotonic() + found_s)
            try:
                server = EmbeddedServer(*endpoint, run_id=self.run_id, steward=self)
            except OSError:
                self._hosting = None
                return None
            self._bound[endpoint] = server
            self.hosted = Host(endpoint[0], server.port, server.server_id, 0)
            return self.hosted

    def bind(self, endpoint: Where) -> bool:
        """Answer at an endpoint, if it is an address of this machine. False if this process does not."""
        if endpoint in self._bound:
            return True
        try:
            server = EmbeddedServer(*endpoint, run_id=self.run_id, steward=self, is_serving=False)
        except OSError:
            return False
        self._bound[endpoint] = server
        return True

    def close(self) -> None:
        for server in (self._standby, *self._bound.values()):
            server.close()

    # --- what this agent says of itself ---------------------------------------------------------------------

    def beat(self) -> dict[str, Any]:
        with self.lock:
            return {
                "call": "beat",
                "who": self.name,
                "term": max(self.promised, self.heard_term),
                "incarnation": self.knowledge.identity,
                "revision": self.knowledge.revision,
                "echo_s": self.echo_s,
                "renounced": self.knowledge.renounced,
            }

    def registration(self) -> Registration:
        """As this agent registers now."""
        identity, revision = self.knowledge.identity, self.knowledge.revision
        term = max(self.promised, self.heard_term)
        lost = self.lost
        if lost is None or self.promised > lost.term:
            return Registration(identity, revision, term, "")
        flags = {"has_ended": self.has_ended, "held_lease": self.held_lease}
        return Registration(identity, revision, term, lost.incarnation, **flags)

    def vote_in(self, term: int, candidate: str) -> Registration | None:
        """Promise to take nothing below this term, and be what was registered before that.

        None if this agent has promised that already, to somebody else.
        """
        if self._ballot is not None and self._ballot[:2] == (term, candidate):
            return self._ballot[2]
        if term <= self.promised:
            return None
        registration = self.registration()
        self._ballot, self.promised = (term, candidate, registration), term
        return registration

    def note_end(self) -> None:
        """The lost host's process has ended."""
        now_s = time.monotonic()
        if not self.has_ended:
            self.has_ended = True
            # A host that was voted out is silent for longer than this before it votes itself.
            is_until_then = now_s < self.heard_s + SERVED_S and not self.was_told
            self.held_lease = is_until_then and self.knowledge.holds_lease(now_s)

    def is_silent(self, now_s: float, where: Where, *, silent_s: float) -> bool:
        """Whether an agent has not been heard by this host for so long."""
        with self.lock:
            hosting = self._hosting
            return hosting is not None and hosting.is_silent(now_s, name_of(where), silent_s=silent_s)

    # --- for the servers, in their threads ------------------------------------------------------------------

    def why_away(self) -> str:
        with self.lock:
            if self.host is not None:
                return f"the store is served at {self.host.address}:{self.host.port}"
            lost = f" at {self.lost.address}:{self.lost.port}" if self.lost else ""
            return f"the store's host{lost} is lost; {self.candidacy.reason or 'looking for the others'}"

    def admit(self, now_s: float, ledger: Ledger, write: Write) -> Write:
        with self.lock:
            if self._hosting is None:
                raise StoreAwayError(Problem(self.why_away(), "training goes on; the membership waits"))
            return self._hosting.admit(now_s, ledger, write)

    def hear(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What another agent says. The answer says where the host is, if that is known."""
        now_s = time.monotonic()
        answer: dict[str, Any] = {}
        with self.lock:
            self._note_term(int(message.get("term", 0)))
            match message["call"]:
                case "who":
                    if message.get("is_seeking") and self._hosting is not None:
                        self._hosting.hold(now_s + self._found_s)
                case "beat":
                    self._hear_beat(now_s, message)
                case "moved":
                    self.take_hint(read_host(message["host"]))
                case "register" | "vote":
                    answer = self._hear_candidate(now_s, message)
                case other:
                    raise ValueError(f"there is no call {other!r}")
            return {**answer, "at_s": now_s, "host": host_message(self._whereabouts(now_s))}

    def take_hint(self, host: Host | None) -> None:
        """Somebody says where the store is. Only a later term than the one known here is news."""
        with self.lock:
            known = [each.term for each in (self.host, self.hosted, self.lost) if each is not None]
            if host is not None and host.term >= self.promised and host.term > max(known, default=-1):
                self.hint = host
                self._note_term(host.term)
                self.wake.set()

    def stand(self) -> None:
        """Nobody before this agent answers: it would serve."""
        with self.lock:
            now_s = time.monotonic()
            self.is_standing = True
            self.candidacy.register(now_s, self.name, self.registration())
            self._advance(now_s)

    def withdraw(self) -> None:
        with self.lock:
            if self.is_standing:
                self.is_standing = False
                self.candidacy.withdraw()

    def _whereabouts(self, now_s: float) -> Host | None:
        if self.hosted is not None:
            return replace(self.hosted, incarnation=self.knowledge.identity)
        return self.host if now_s < self.heard_s + RECOMMENDED_S else None

    def _note_term(self, term: int) -> None:
        """Somebody takes nothing below this term: who serves a lower one has to be voted for anew."""
        self.heard_term = max(self.heard_term, term)
        hosted = self.hosted
        if hosted is None or term <= hosted.term:
            return
        self.hosted = self._hosting = None
        for server in (self._standby, *self._bound.values()):
            if server.server_id == hosted.server_id:
                server.serve(None)
        self.has_to_lose = True
        self.quiet_until_s = time.monotonic() + QUIET_S
        self.wake.set()

    def _hear_beat(self, now_s: float, message: Mapping[str, Any]) -> None:
        if self._hosting is not None:
            self._hosting.hear(
                now_s,
                str(message["who"]),
                incarnation=str(message["incarnation"]),
                revision=int(message["revision"]),
                echo_s=min(now_s, float(message["echo_s"])),
                renounced=[str(each) for each in message["renounced"]],
            )

    def _hear_candidate(self, now_s: float, message: Mapping[str, Any]) -> dict[str, Any]:
        if not self.is_standing or self.host is not None or self.hosted is not None:
            return {}
        who, registration = str(message["who"]), read_registration(message["registration"])
        if message["call"] == "register":
            self.candidacy.refuse(int(message.get("refused_term", 0)))
            self.candidacy.register(now_s, who, registration)
        else:
            brought = read_brought(message["brought"])
            term = int(message["voted_term"])
            self.candidacy.vote(who, term=term, registration=registration, brought=brought)
        self._advance(now_s)
        return {"is_standing": True, "elect": self.candidacy.term if self.candidacy.is_asked(who) else 0}

    def _advance(self, now_s: float) -> None:
        """Ask for votes or begin to serve, if it is time."""
        known = self.knowledge.brought().known
        mandate = self.candidacy.look(now_s, known=known)
        if self.candidacy.is_asked(self.name):
            term, brought = self.candidacy.term, self.knowledge.brought()
            registration = self.vote_in(term, self.name)
            if registration is None:
                self.candidacy.refuse(term)
            else:
                self.candidacy.vote(self.name, term=term, registration=registration, brought=brought)
                mandate = self.candidacy.look(now_s, known=known)
        if mandate is not None and self.hosted is None:
            self._begin(now_s, mandate)

    def _begin(self, now_s: float, mandate: Mandate) -> None:
        """Serve what the voters brought."""
        ttls_s = mandate.brought.ttls_s
        ledger = Ledger.resumed(
            now_s,
            known=mandate.brought.known,
            revision=first_revision(mandate.term),
            ttls_s=ttls_s,
            other_ttl_s=min(ttls_s.values(), default=OTHER_TTL_S),
            first_lease_id=new_lease_id(),
        )
        self._hosting = Hosting(self.keys, open_s=-1.0, ended=mandate.ended)
        self.hosted = self.hint = Host(*self.me, self._standby.server_id, mandate.term)
        self._standby.serve(ledger)
        self.wake.set()


def name_of(where: Where) -> str:
    return f"{where[0]}:{where[1]}"
