"""Who serves the embedded store after its host is lost, and what a host may write. Pure.

One agent hosts the store; the others follow it, and each holds everything it was told. No replica has to answer
before a write is applied. Five rules keep two stores from going on side by side, because a generation is worked
in only when every one of its members follows it:

1. A term is what one host serves; no two hosts have the same. A follower that votes for a new one brings all it
   knows, and from then on takes nothing from a host of a lower term. Revisions begin with the term.
2. A new host needs the votes of more than half of the newest generation that any of the voters knows. Exactly
   half is enough if all of these saw the process of their common host end, it was a member, none of their
   leases can have ended before it did, and none has voted since: then it wrote no generation without them.
3. A host writes no generation that leaves out, in silence, more than half of the one before. Silent is who
   has not said itself that it goes or starts anew, and is not known to have followed this host until its
   process ended: somebody who ended may have voted for another host before.
4. A host writes no generation before enough members of the last but one know the last: so many that no new
   host can be voted for by people who do not know it. As long as the voters do not know that it is so, they
   have to be so many of the last but one, too.
5. A vote counts for the incarnation that its agent last asked to be; who leaves or starts anew votes no more.

Why it is enough: voters who do not know the generation G+1 are more than half of G. By 3 one of them is in G+1,
and G+1 cannot be worked in without it; by 4 there is no G+2. What is left of the old host's side stands still.
In doubt nobody serves: the membership is frozen, and training goes on.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from elastic_hieravg.membership.kv import Snapshot
from elastic_hieravg.membership.records import Generation
from elastic_hieravg.plan.document import Fields, canonical_json, parse_json

TERM_BITS = 32
# What tells terms apart that are given at the same time.
SALT_BITS = 16
NAMED_MAX = 5


def term_of(revision: int) -> int:
    return revision >> TERM_BITS


def first_revision(term: int) -> int:
    """Where a term's revisions begin."""
    return term << TERM_BITS


def term_after(term: int, *, salt: int) -> int:
    """A later term than this one; `salt` makes it its owner's."""
    return (((term >> SALT_BITS) + 1) << SALT_BITS) | salt % (1 << SALT_BITS)


@dataclass(frozen=True, slots=True)
class Registration:
    """Somebody who lost its host.

    `incarnation`: whom its vote counts for, or nothing. `revision`: up to where it knows the store. `promised`:
    the term below which it takes nothing. `host`: the incarnation of the host it followed, if it has not voted
    since. `has_ended`: it saw that host's process end. `held_lease`: it served until then, and this one's own
    lease was not over.
    """

    incarnation: str
    revision: int
    promised: int
    host: str
    has_ended: bool = False
    held_lease: bool = False


@dataclass(frozen=True, slots=True)
class Brought:
    """What a voter knows of the store, and of the times its leases live, in seconds."""

    known: Snapshot
    ttls_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Tally:
    """`is_complete`: nobody else is to be waited for. `ended`: the host that served all of these to its end."""

    is_enough: bool
    is_complete: bool
    reason: str
    ended: str = ""


def tally(
    generation: Generation | None, registrations: Sequence[Registration], *, before: "Before | None" = None
) -> Tally:
    """Whether these may have a new host among them. `generation` is the newest that anybody of them knows.

    `before` stands beside it as long as it is not known to be known by enough.
    """
    if generation is None:
        return Tally(False, False, "no generation is known yet, so nobody knows who may serve the store")
    members = {node.incarnation for node in generation.members}
    by_member = {each.incarnation: each for each in registrations if each.incarnation in members}
    hosts = {each.host for each in by_member.values()}
    host = hosts.pop() if len(hosts) == 1 else ""
    is_ended = any(each.has_ended for each in by_member.values()) and host in members
    is_half_enough = is_ended and all(each.has_ended and each.held_lease for each in by_member.values())
    ended = host if is_half_enough else ""
    is_enough = 2 * len(by_member) > len(members) - is_half_enough
    if before is not None:
        there = {*(each.incarnation for each in registrations), ended}
        is_enough &= 2 * len([each for each in before.voters if each not in there]) < before.count
    is_complete = by_member.keys() >= members - ({host} if is_ended else set())
    needed = f"{len(by_member)} of the {len(members)} nodes of generation {generation.number}"
    return Tally(is_enough, is_complete, f"{needed} have lost the store's host and found each other", ended)


def newest(brought: Sequence[Brought]) -> Brought:
    """Everybody's times to live, with what the one knows that knows most."""
    best = max(brought, key=lambda each: each.known.revision)
    ttls_s = {lease_id: ttl_s for each in brought for lease_id, ttl_s in each.ttls_s.items()}
    return Brought(best.known, ttls_s)


@dataclass(frozen=True, slots=True)
class Before:
    """Of the generation before the last: how many there were, and who of them may still be there."""

    count: int
    voters: tuple[str, ...]

    def to_json(self) -> str:
        return canonical_json({"count": self.count, "voters": list(self.voters)})


def read_before(text: str) -> Before:
    record = Fields(parse_json(text, where="the quorum's record"), where="the quorum's record")
    voters = tuple(str(value) for _, value in record.items("voters"))
    before = Before(record.number("count"), voters)
    record.close()
    return before


def before_of(last: Generation, following: Generation, *, gone: AbstractSet[str]) -> Before:
    """What has to be remembered of `last` when `following` is written."""
    voters = (
        node.incarnation for node in last.members if following.lists(node) or node.incarnation not in gone
    )
    return Before(len(last.members), tuple(voters))


def is_known(last: Generation, *, before: Before, knowing: AbstractSet[str], gone: AbstractSet[str]) -> bool:
    """Whether so many know a generation that nobody can be voted for who does not."""
    unaware = [each for each in before.voters if each not in knowing and each not in gone]
    # Who was left out in silence has lost its lease, and half of such are not enough for a vote.
    staying = {node.incarnation for node in last.members} & set(unaware)
    return 2 * len(unaware) <= before.count and 2 * len(staying) < before.count


def objection(
    last: Generation,
    following: Generation,
    *,
    before: Before | None,
    knowing: AbstractSet[str],
    gone: AbstractSet[str],
) -> str:
    """Why a host may not write `following` after `last` now, or nothing.

    `knowing`: the incarnations that know `last`. `gone`: those that have ended, or said that they go.
    """
    if before is not None and not is_known(last, before=before, knowing=knowing, gone=gone):
        return f"not enough of {before.count} nodes are known to follow generation {last.number} yet"
    silent = [
        node.node_id for node in last.members if not following.lists(node) and node.incarnation not in gone
    ]
    if 2 * len(silent) > len(last.members):
        named = ", ".join(silent[:NAMED_MAX])
        return f"{named}: more than half of the {len(last.members)} nodes are silent, and may go on elsewhere"
    return ""
