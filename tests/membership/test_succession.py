"""Who may serve the store after its host, and which generations a host may write: tables."""

import pytest

from elastic_hieravg.errors import StoreAwayError
from elastic_hieravg.membership.candidacy import SETTLE_S, Candidacy
from elastic_hieravg.membership.hosting import Hosting
from elastic_hieravg.membership.knowledge import Knowledge
from elastic_hieravg.membership.kv import ABSENT, Changes, Entry, Put, Snapshot, Write
from elastic_hieravg.membership.ledger import Ledger
from elastic_hieravg.membership.mirror import Keys
from elastic_hieravg.membership.records import Generation, Kind, NodeRecord, NodeState, Suspicion
from elastic_hieravg.membership.succession import (
    Before,
    Brought,
    Registration,
    before_of,
    first_revision,
    newest,
    objection,
    read_before,
    tally,
    term_of,
)
from elastic_hieravg.plan import Node

KEYS = Keys("run")
NOW_S = 1000.0


def generation(names: str, number: int = 7) -> Generation:
    """A member for each letter; its incarnation is the letter and a 1."""
    members = tuple(Node(name, 1, {}, f"{name}1") for name in names)
    addresses = dict.fromkeys(names, "h")
    return Generation(number, Kind.LOSS, "why", members, addresses, "digest", (number,), "", "a1")


def registration(who: str, *, host: str = "a1", promised: int = 0, revision: int = 5) -> Registration:
    """A letter: it lost the host `host`. With + it saw that process end, with * it held its lease, too."""
    return Registration(
        f"{who[0]}1",
        revision,
        promised,
        host,
        has_ended="+" in who or "*" in who,
        held_lease="*" in who,
    )


@pytest.mark.parametrize(
    ("members", "registered", "is_enough", "is_complete"),
    [
        ("ab", "b*", True, True),
        ("ab", "b+", False, True),
        ("ab", "b", False, False),
        ("abc", "b c", True, False),
        ("abc", "b* c*", True, True),
        ("abc", "b*", False, False),
        ("abcd", "b* c*", True, False),
        ("abcd", "b* c+", False, False),
        ("abcd", "b* c", False, False),
        ("abcd", "b c d", True, False),
        ("abcde", "b* c*", False, False),
        ("abcde", "b c d", True, False),
        # Who is not of the generation does not count, and the host is needed for half to be enough.
        ("abc", "b* x* y*", False, False),
        ("bcde", "b* c*", False, False),
        ("bcde", "b* c* d*", True, False),
        ("a", "x*", False, False),
    ],
)
def test_more_than_half_serve_on_and_half_only_if_the_host_cannot_have_gone_on(
    members: str, registered: str, is_enough: bool, is_complete: bool
) -> None:
    count = tally(generation(members), [registration(each) for each in registered.split()])
    assert (count.is_enough, count.is_complete) == (is_enough, is_complete), count.reason


def test_half_is_not_enough_after_another_host_or_another_vote() -> None:
    both = [registration("b*"), registration("c*", host="b1")]
    assert not tally(generation("abcd"), both).is_enough
    voted = [registration("b*"), Registration("c1", 5, 2, "")]
    assert not tally(generation("abcd"), voted).is_enough
    assert not tally(None, [registration("b*")]).is_enough


def test_voters_for_a_generation_that_may_be_unknown_are_many_of_the_one_before_too() -> None:
    """The host left out e to h in silence, and ended: those and d, who does not know it, may vote as well."""
    before = Before(8, tuple(f"{name}1" for name in "abcdefgh"))
    voters = [registration("b*"), registration("c*")]
    assert tally(generation("abcd"), voters).is_enough
    assert not tally(generation("abcd"), voters, before=before).is_enough
    # With d there are b to d and the host itself, half of them; with e more.
    voters.append(registration("d*"))
    assert not tally(generation("abcd"), voters, before=before).is_enough
    voters.append(registration("e+"))
    assert tally(generation("abcd"), voters, before=before).is_enough


@pytest.mark.parametrize(
    ("last", "following", "gone", "is_allowed"),
    [
        # One of two goes on for the host; the other side needs proof that it ended.
        ("ab", "a", "", True),
        ("abc", "a", "", False),
        ("abc", "a", "b1", True),
        ("abcd", "ab", "", True),
        ("abcd", "a", "", False),
        ("abcd", "a", "d1", True),
        ("abcd", "a", "b1 c1 d1", True),
        ("abcde", "ab", "", False),
        ("abcde", "ab", "e1", True),
        ("abc", "abcd", "", True),
    ],
)
def test_a_host_leaves_out_no_silent_majority(last: str, following: str, gone: str, is_allowed: bool) -> None:
    why = objection(
        generation(last), generation(following, 8), before=None, knowing=set(), gone=set(gone.split())
    )
    assert (not why) == is_allowed, why


@pytest.mark.parametrize(
    ("before", "count", "knowing", "gone", "is_allowed"),
    [
        ("a1 b1 c1 d1", 4, "a1", "", False),
        ("a1 b1 c1 d1", 4, "a1 b1", "", False),
        ("a1 b1 c1 d1", 4, "a1", "b1", False),
        ("a1 b1 c1 d1", 4, "a1", "b1 c1", True),
        ("a1 b1 c1", 3, "a1", "", False),
        ("a1 b1 c1", 3, "a1 c1", "", True),
        ("a1", 4, "", "", True),
        ("a1 x1", 2, "a1", "", True),
        ("a1 b1", 2, "x1", "", False),
        # Half that is still in it may hold its leases, and half of such can vote.
        ("a1 b1", 2, "a1", "", False),
        ("a1 b1 x1 y1", 4, "a1 b1", "", True),
        ("a1 b1 c1 d1", 4, "a1 b1 c1", "", True),
    ],
)
def test_a_host_writes_nothing_before_the_last_generation_is_known(
    before: str, count: int, knowing: str, gone: str, is_allowed: bool
) -> None:
    why = objection(
        generation("abcd"),
        generation("abc", 8),
        before=Before(count, tuple(before.split())),
        knowing=set(knowing.split()),
        gone=set(gone.split()),
    )
    assert (not why) == is_allowed, why


def test_what_a_generation_leaves_behind_is_read_back() -> None:
    left = before_of(generation("abcd"), generation("ab", 8), gone={"a1", "d1"})
    assert left == Before(4, ("a1", "b1", "c1"))
    assert read_before(left.to_json()) == left


def test_the_newest_state_wins_and_a_later_term_is_newer() -> None:
    assert term_of(first_revision(3)) == 3
    old = Brought(Snapshot({"k": Entry("old", 90)}, 95), {1: 3.0})
    new = Brought(Snapshot({"k": Entry("new", 80)}, first_revision(1)), {2: 120.0})
    assert newest([old, new]) == Brought(new.known, {1: 3.0, 2: 120.0})


def brought(members: str, revision: int, number: int = 7) -> Brought:
    entry = Entry(generation(members, number).to_json(), revision - 1, 9)
    return Brought(Snapshot({KEYS.generation: entry}, revision), {9: 3.0})


class Candidates:
    """A candidacy at work: everybody registers and votes when asked."""

    def __init__(self, members: str) -> None:
        self.members = members
        self.candidacy = Candidacy(KEYS, salt=7)
        self.now_s = NOW_S

    def register(self, *who: str, promised: int = 0) -> None:
        for each in who:
            self.candidacy.register(self.now_s, each[0], registration(each, promised=promised))

    def look(self, after_s: float = 0.0) -> tuple[int, int] | None:
        """The mandate's term and revision."""
        self.now_s += after_s
        mandate = self.candidacy.look(self.now_s, known=brought(self.members, 10).known)
        return None if mandate is None else (mandate.term, mandate.brought.known.revision)

    def vote(self, who: str, state: Brought, *, term: int) -> None:
        self.candidacy.vote(who[0], term=term, registration=registration(who), brought=state)


def test_votes_are_asked_for_once_enough_are_there_and_the_newest_state_is_served() -> None:
    vote = Candidates("abc")
    vote.register("b*", promised=2)
    assert vote.look(SETTLE_S) is None
    assert not vote.candidacy.is_asked("b")
    vote.register("b*", "c*", promised=2)
    assert vote.look() is None
    term = vote.candidacy.term
    assert term > 2
    assert vote.candidacy.is_asked("b")
    vote.vote("b*", brought("abc", 10), term=term)
    assert vote.look() is None, "its own vote is not more than half of what it knows"
    vote.vote("c*", brought("abc", 12), term=term - 1)
    assert vote.look() is None, "a vote in another term"
    vote.vote("c*", brought("abc", 12), term=term)
    assert vote.look() == (term, 12)


def test_what_a_voter_brings_decides_how_many_are_needed() -> None:
    vote = Candidates("abc")
    vote.register("b", "c")
    vote.look(0.0)
    vote.look(SETTLE_S)
    term = vote.candidacy.term
    vote.vote("b", brought("abc", 10), term=term)
    # It alone knows of a generation in which two are not enough.
    vote.vote("c", brought("abcde", 12, number=8), term=term)
    assert vote.look(SETTLE_S) is None
    assert vote.look(SETTLE_S) is None
    vote.vote("d", brought("abc", 10), term=term)
    vote.look()
    assert vote.look(SETTLE_S) == (term, 12)


def test_a_voter_who_has_promised_more_is_asked_again_in_a_later_term() -> None:
    vote = Candidates("abc")
    vote.register("b*", "c*")
    vote.look()
    promised = vote.candidacy.term + 1000
    vote.register("c*", promised=promised)
    vote.look()
    refused = vote.candidacy.term
    assert refused > promised
    vote.candidacy.refuse(refused)
    vote.look()
    assert vote.candidacy.term > refused
    vote.vote("b*", brought("abc", 10), term=vote.candidacy.term)
    vote.candidacy.withdraw()
    assert vote.look(SETTLE_S) is None
    assert not vote.candidacy.is_asked("b")


def test_a_registration_that_is_not_said_again_is_forgotten() -> None:
    vote = Candidates("abc")
    vote.register("b*")
    vote.look(10.0)
    vote.register("c*")
    assert vote.look() is None
    assert vote.candidacy.term == 0


def test_a_ledger_goes_on_with_the_same_entries_leases_and_larger_revisions() -> None:
    known = Snapshot({"a": Entry("1", 3, 7), "b": Entry("2", 4), "c": Entry("3", 5, 8)}, 5)
    ledger = Ledger.resumed(
        NOW_S, known=known, revision=100, ttls_s={7: 50.0}, other_ttl_s=3.0, first_lease_id=1000
    )
    assert ledger.get("") == Snapshot(known.entries, 100)
    assert ledger.changes_after(5, prefix="") is None, "whoever comes from before gets everything"
    assert ledger.changes_after(100, prefix="") == Changes((), 100)
    assert ledger.keep_alive(NOW_S + 1, lease_id=7) == 50.0
    assert ledger.write(Write({"a": 3}, (Put("a", "new", 7),))) == 101
    ledger.expire(NOW_S + 4)
    assert ledger.get("").entries.keys() == {"a", "b"}
    assert ledger.grant(NOW_S, ttl_s=1.0) == 1000


class TestKnowledge:
    ME = ("h", 1)

    def record(self, incarnation: str, state: NodeState = NodeState.READY, standby: int = 1) -> Write:
        record = NodeRecord(Node("b", 1, {}, incarnation), state, "h", 2, standby=standby)
        return Write({}, (Put(KEYS.node("b"), record.to_json(), 7),))

    def test_an_agent_votes_as_what_it_last_asked_to_be(self) -> None:
        knowledge = Knowledge(KEYS, self.ME)
        assert knowledge.identity == ""
        knowledge.note_write(self.record("b1"))
        knowledge.note_write(self.record("x1", standby=9))
        assert (knowledge.identity, knowledge.renounced) == ("b1", [])
        knowledge.note_write(self.record("b2"))
        assert (knowledge.identity, knowledge.renounced) == ("b2", ["b1"])
        knowledge.note_write(self.record("b2", NodeState.LEAVING))
        assert (knowledge.identity, knowledge.renounced) == ("", ["b1", "b2"])

    def test_a_lease_is_held_from_when_its_host_was_asked(self) -> None:
        knowledge = Knowledge(KEYS, self.ME)
        knowledge.note_write(self.record("b1"))
        assert not knowledge.holds_lease(NOW_S)
        knowledge.note_lease(NOW_S, 7, ttl_s=3.0)
        knowledge.note_lease(NOW_S + 2, 8, ttl_s=300.0)
        assert knowledge.holds_lease(NOW_S + 2.9)
        assert not knowledge.holds_lease(NOW_S + 3.0)

    def test_candidates_are_the_members_whose_records_are_there_in_rank_order(self) -> None:
        knowledge = Knowledge(KEYS, self.ME)
        entries = {KEYS.generation: Entry(generation("cab").to_json(), 5)}
        for name, standby in (("a", 10), ("b", 0), ("c", 30), ("d", 40)):
            record = NodeRecord(Node(name, 1, {}, f"{name}1"), NodeState.READY, "h", 2, standby=standby)
            entries[KEYS.node(name)] = Entry(record.to_json(), 4, 7)
        assert knowledge.apply(Snapshot(entries, 9))
        assert list(knowledge.candidates()) == [("c1", ("h", 30)), ("a1", ("h", 10))]
        assert [who for who, _ in knowledge.agents()] == ["c1", "a1", "d1"]
        assert not knowledge.apply(Changes(((KEYS.node("c"), None),), 10))
        assert [who for who, _ in knowledge.candidates()] == ["a1"]
        knowledge.note_lease(NOW_S, 7, ttl_s=3.0)
        knowledge.note_lease(NOW_S, 8, ttl_s=3.0)
        assert knowledge.brought().ttls_s == {7: 3.0}
        assert knowledge.brought().known.revision == 10


class TestHosting:
    """A generation is admitted by the rules, and leaves behind what the next one is judged by."""

    def host(self, members: str) -> tuple[Hosting, Ledger]:
        hosting, ledger = Hosting(KEYS, open_s=NOW_S + 2), Ledger()
        first = self.write(ledger, members, 1)
        with pytest.raises(StoreAwayError, match="is new, and waits a moment"):
            hosting.admit(NOW_S, ledger, first)
        ledger.write(hosting.admit(NOW_S + 2, ledger, first))
        # Somebody who looks for its host holds up a start, and nothing later.
        hosting.hold(NOW_S + 100)
        return hosting, ledger

    def write(self, ledger: Ledger, members: str, number: int) -> Write:
        entry = ledger.get(KEYS.generation).entries.get(KEYS.generation)
        put = Put(KEYS.generation, generation(members, number).to_json())
        return Write({KEYS.generation: entry.revision if entry else ABSENT}, (put,))

    def test_the_last_generation_has_to_be_known_before_the_next(self) -> None:
        hosting, ledger = self.host("abcd")
        second = hosting.admit(NOW_S, ledger, self.write(ledger, "abc", 2))
        assert ledger.write(second)
        left = ledger.get(KEYS.quorum).entries[KEYS.quorum]
        assert read_before(left.value) == Before(4, ("a1", "b1", "c1", "d1"))
        third = self.write(ledger, "ab", 3)
        hosting.hear(NOW_S, "a", incarnation="a1", revision=ledger.revision, renounced=[])
        hosting.hear(NOW_S, "b", incarnation="b1", revision=ledger.revision - 1, renounced=[])
        with pytest.raises(StoreAwayError, match="not enough of 4 nodes are known to follow generation 2"):
            hosting.admit(NOW_S, ledger, third)
        other = Write({}, (Put(KEYS.node("a"), "anything"),))
        assert hosting.admit(NOW_S, ledger, other) is other
        hosting.hear(NOW_S, "b", incarnation="b1", revision=ledger.revision, renounced=[])
        assert hosting.admit(NOW_S, ledger, third).puts[0] == third.puts[0]
        # Everybody is told that it is known by enough.
        ledger.write(hosting.admit(NOW_S, ledger, Write({}, (Put(KEYS.refusal("x"), "anything"),))))
        assert not ledger.get(KEYS.quorum).entries

    @pytest.mark.parametrize("proof", ["ended", "ended long after", "leaving", "renounced"])
    def test_who_is_known_to_be_gone_need_not_be_waited_for(self, proof: str) -> None:
        hosting, ledger = self.host("abc")
        second = self.write(ledger, "a", 2)
        with pytest.raises(StoreAwayError, match="b, c: more than half of the 3 nodes are silent"):
            hosting.admit(NOW_S, ledger, second)
        match proof:
            case "ended" | "ended long after":
                hosting.hear(NOW_S, "c", incarnation="c1", revision=1, renounced=[], echo_s=NOW_S - 1)
                put = Put(KEYS.suspicion("c"), Suspicion("c1", "a", "its process ended").to_json())
                seen_s = NOW_S + (1 if proof == "ended" else 3)
                ledger.write(hosting.admit(seen_s, ledger, Write({}, (put,))))
            case "leaving":
                record = NodeRecord(Node("c", 1, {}, "c1"), NodeState.LEAVING, "h", 1)
                ledger.write(Write({}, (Put(KEYS.node("c"), record.to_json()),)))
            case "renounced":
                hosting.hear(NOW_S, "c", incarnation="c2", revision=1, renounced=["c1"])
        if proof == "ended long after":
            # It may have voted for another host in between.
            with pytest.raises(StoreAwayError, match="are silent"):
                hosting.admit(NOW_S, ledger, second)
            return
        hosting.admit(NOW_S, ledger, second)

    def test_other_writes_pass_as_they_are(self) -> None:
        hosting, ledger = self.host("abc")
        write = Write({}, (Put(KEYS.node("a"), "anything"),))
        assert hosting.admit(NOW_S, ledger, write) is write
        assert hosting.is_silent(NOW_S, "h:1", silent_s=2.0)
        hosting.hear(NOW_S, "h:1", incarnation="", revision=1, renounced=[])
        assert not hosting.is_silent(NOW_S + 1, "h:1", silent_s=2.0)
        assert hosting.is_silent(NOW_S + 2, "h:1", silent_s=2.0)
