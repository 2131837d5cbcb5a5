"""Whether the membership stays, waits, changes or ends, and why. Pure: the time comes in as an argument.

`decide` looks at what one agent sees of the store and says what that agent should do. It does not write
anything; `member.Member` does. Several agents may decide the same at once: the store lets one of them win.
Invariant: a proposal holds live nodes only, never more than `nodes_max`, and only shrinks or only grows.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from elastic_hieravg.errors import InputError, Problem, raise_if_any
from elastic_hieravg.membership.records import (
    Bounds,
    Closing,
    Generation,
    Job,
    Kind,
    Mode,
    NodeRecord,
    NodeState,
)
from elastic_hieravg.plan import natural_key
from elastic_hieravg.plan.topology import Node

# However often the last one is followed by another, settling ends after so many times its length.
SETTLE_TIMES_MAX = 5
# Who comes later than this in the row of writers does not wait longer.
TURNS_MAX = 6
NODES_NAMED_MAX = 5
_OF_AT_LEAST = " of at least "
# How people know what a job was started with.
_FLAGS = {
    "nodes_min": "--nnodes minimum",
    "nodes_max": "--nnodes maximum",
    "hierarchy": "--hierarchy",
    "mode": "--membership",
    "warmup_steps": "--warmup-steps",
    "on_misfit": "--on-misfit",
}


class Action(StrEnum):
    KEEP = "keep"  # nothing to do until something changes
    WAIT = "wait"  # decide again at `again_s`, or when something changes
    REPLAN = "replan"  # write the proposal as the next generation
    STOP = "stop"  # the job is over, or cannot go on


@dataclass(frozen=True, slots=True)
class Proposal:
    """The next generation, as far as it is a decision: who is in it, and why."""

    kind: Kind
    node_ids: tuple[str, ...]
    reason: str
    hold: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    reason: str
    again_s: float = math.inf
    proposal: Proposal | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """The job and its times.

    `loss_settle_s`: how long a loss waits for others, and a suspicion for the suspect's word.
    `join_settle_s`: how long a newcomer waits for others. `start_wait_s`: how long a start waits for nodes
    that live and are not ready. `stop_s`: how long a restart waits for nodes that still run.
    `pause_s`: how long a job waits that cannot run. `turn_s`: how long each in the row of writers waits for
    the one before. `follows_bounds`: this node was told bounds that change while it runs, so others than the
    job's are no reason to stay out.
    """

    job: Job
    loss_settle_s: float = 0.2
    join_settle_s: float = 1.0
    start_wait_s: float = 60.0
    stop_s: float = 60.0
    pause_s: float = 600.0
    turn_s: float = 0.25
    follows_bounds: bool = False

    def __post_init__(self) -> None:
        raise_if_any(InputError, list(_policy_problems(self)))


@dataclass(frozen=True, slots=True)
class Live:
    """A node whose lease lives, and since when it was seen here in its state."""

    record: NodeRecord
    since_s: float


@dataclass(frozen=True, slots=True)
class Loss:
    """A member of the generation that is no longer there, since when it was seen here, and why."""

    incarnation: str
    since_s: float
    why: str
    is_on_purpose: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """What one agent sees. `nodes` holds nobody who is suspected; `lost` is about members only.

    `broken_since_s`: since when a group of this generation is reported broken. `paused_since_s`: since when
    the job cannot run. `bounds`: the job's, None if not read yet; `bounds_since_s`: since when.
    """

    me: Node
    nodes: Mapping[str, Live]
    generation: Generation | None = None
    lost: Mapping[str, Loss] | None = None
    broken: tuple[str, ...] = ()
    broken_since_s: float = math.inf
    paused_since_s: float = math.inf
    closing: Closing | None = None
    bounds_since_s: float = math.inf
    bounds: Bounds | None = None


def decide(now_s: float, *, view: View, policy: Policy) -> Decision:
    """What the agent that sees this should do now."""
    if view.closing is not None:
        return Decision(Action.STOP, f"the job is closed: {view.closing.reason}")
    choice = _choose(now_s, view, policy)
    if isinstance(choice, Decision):
        return _bound_pause(now_s, choice, view, policy)
    return _in_turn(now_s, choice, view, policy)


def disagreement(asked: Job, job: Job, *, follows_bounds: bool) -> Problem | None:
    """Why a node that was told `asked` cannot be in the job. Bounds that it follows are not asked for."""
    if asked == job:
        return None
    mine, theirs = (asked.within(job.bounds) if follows_bounds else asked).document(), job.document()
    differing = [name for name in mine if mine[name] != theirs[name]]
    if not differing:
        return None
    wanted = ", ".join(f"{_FLAGS[name]} {mine[name]}" for name in differing)
    running = ", ".join(f"{_FLAGS[name]} {theirs[name]}" for name in differing)
    return Problem(
        f"this node asks for {wanted}, and the job runs with {running}",
        "start every node of a job with the same settings, or give another job another --rdzv-id",
    )


def is_usable(live: Live) -> bool:
    """Whether a node can be part of a generation."""
    return live.record.state is NodeState.READY


def has_lost_member(now_s: float, *, view: View, policy: Policy) -> bool:
    """Whether the generation has lost somebody, settled."""
    return any(_is_settled(now_s, loss, policy) for loss in _losses(view).values())


def num_restart_wanted(now_s: float, *, view: View, policy: Policy) -> int:
    """How many changes call for a restart of a generation that runs: losses and newcomers, settled."""
    generation = view.generation
    if generation is None or not generation.lists(view.me):
        return 1
    losses = _losses(view)
    lost = [loss for loss in losses.values() if _is_settled(now_s, loss, policy)]
    if len(generation.members) - len(losses) >= policy.job.nodes_max:
        return len(lost)
    newcomers = _newcomers(view, generation).values()
    return len(lost) + sum(now_s >= live.since_s + policy.join_settle_s for live in newcomers)


@dataclass(frozen=True, slots=True)
class _Due:
    """A proposal and the time from which on the first in the row of writers may write it."""

    proposal: Proposal
    since_s: float


def _choose(now_s: float, view: View, policy: Policy) -> Decision | _Due:
    generation = view.generation
    if generation is None:
        return _start(now_s, view, policy, kind=Kind.START)
    if policy.job.mode is Mode.RESTART:
        return _restart(now_s, view, policy, generation)
    if view.lost:
        return _shrink(now_s, view, policy, generation)
    if view.broken:
        return _rebuild(now_s, view, policy, generation)
    if _is_other_hold(generation, policy):
        return _rebound(view, policy, generation)
    if _asking(view, generation):
        return _meet(now_s, view, policy, generation)
    if _newcomers(view, generation):
        return _grow(now_s, view, policy, generation)
    if generation.hold:
        return Decision(Action.WAIT, f"generation {generation.number} holds: {generation.hold}")
    return Decision(Action.KEEP, f"generation {generation.number} has all its {_count(generation.members)}")


def _start(now_s: float, view: View, policy: Policy, *, kind: Kind) -> Decision | _Due:
    """The first generation, or the first after everybody of the last one was lost."""
    ready = {node_id: live for node_id, live in view.nodes.items() if is_usable(live)}
    if len(ready) < policy.job.nodes_min:
        return Decision(Action.WAIT, _too_few(len(ready), policy))
    first_s = min(live.since_s for live in ready.values())
    due_s = now_s
    if len(ready) < policy.job.nodes_max:
        coming = [node_id for node_id, live in view.nodes.items() if live.record.state is NodeState.JOINING]
        if coming and now_s < first_s + policy.start_wait_s:
            reason = f"{_named(coming)} {_is(coming)} alive and not ready yet"
            return Decision(Action.WAIT, reason, again_s=first_s + policy.start_wait_s)
        due_s = _settled_s([live.since_s for live in ready.values()], policy.join_settle_s)
        if now_s < due_s:
            return _settling(now_s, due_s, f"{_count(ready)} ready of {policy.job.nodes_max}")
    chosen = sorted(ready, key=natural_key)[: policy.job.nodes_max]
    reason = f"{_named(chosen)} {_is(chosen)} ready"
    # Long due if the settling was over before: the row of writers need not wait once more.
    return _Due(Proposal(kind, tuple(chosen), reason), min(now_s, max(due_s, first_s)))


def _shrink(now_s: float, view: View, policy: Policy, generation: Generation) -> Decision | _Due:
    losses = _losses(view)
    due_s = _losses_settled_s(losses, policy)
    if now_s < due_s:
        return _settling(now_s, due_s, f"{_named(losses)} {_is(losses)} lost")
    survivors = [node.node_id for node in generation.members if node.node_id not in losses]
    reason = _loss_reason(losses)
    if not survivors:
        choice = _start(now_s, view, policy, kind=Kind.START)
        if isinstance(choice, Decision):
            return choice
        return _Due(
            Proposal(Kind.START, choice.proposal.node_ids, f"{reason}; nobody was left"), choice.since_s
        )
    return _Due(Proposal(Kind.LOSS, tuple(survivors), reason, _hold(len(survivors), policy)), due_s)


def _rebuild(now_s: float, view: View, policy: Policy, generation: Generation) -> Decision | _Due:
    """The same members once more. A death that broke the group has the settling time to show."""
    due_s = view.broken_since_s + policy.loss_settle_s
    groups = "a group" if len(view.broken) == 1 else f"{len(view.broken)} groups"
    if now_s < due_s:
        return _settling(now_s, due_s, f"{groups} failed and nobody is lost")
    members = tuple(node.node_id for node in generation.members)
    reason = f"{groups} failed and nobody was lost"
    return _Due(Proposal(Kind.REBUILD, members, reason, _hold(len(members), policy)), due_s)


def _rebound(view: View, policy: Policy, generation: Generation) -> _Due:
    """The same members, held or set free: the job's bounds have changed."""
    members = tuple(node.node_id for node in generation.members)
    reason = f"the job has {policy.job.nodes_min} to {policy.job.nodes_max} nodes now"
    return _Due(Proposal(Kind.BOUNDS, members, reason, _hold(len(members), policy)), view.bounds_since_s)


def _meet(now_s: float, view: View, policy: Policy, generation: Generation) -> Decision | _Due:
    """The same members once more, for the sake of a round that everybody agrees on."""
    asking = _asking(view, generation)
    members = tuple(node.node_id for node in generation.members)
    reason = f"{_named(asking)} {'asks' if len(asking) == 1 else 'ask'} for a round before leaving"
    since_s = min(live.since_s for live in asking.values())
    return _Due(Proposal(Kind.ROUND, members, reason, _hold(len(members), policy)), min(now_s, since_s))


def _grow(now_s: float, view: View, policy: Policy, generation: Generation) -> Decision | _Due:
    newcomers = _newcomers(view, generation)
    room = policy.job.nodes_max - len(generation.members)
    if room <= 0:
        # Nobody is sent away when the bounds shrink; who leaves is not replaced.
        return Decision(Action.KEEP, f"{_count(newcomers)} spare: the job has its {policy.job.nodes_max} nodes")
    behind = [
        node.node_id
        for node in generation.members
        if view.nodes[node.node_id].record.entered < generation.number
    ]
    if behind:
        # One growth at a time: the ranks would otherwise disagree on which one to enter together.
        return Decision(Action.WAIT, f"{_named(behind)} not yet in generation {generation.number}")
    due_s = _settled_s([live.since_s for live in newcomers.values()], policy.join_settle_s)
    if now_s < due_s and len(newcomers) < room:
        return _settling(now_s, due_s, f"{_named(newcomers)} {_is(newcomers)} ready to join")
    chosen = sorted(newcomers, key=natural_key)[:room]
    members = (*(node.node_id for node in generation.members), *chosen)
    reason, hold = f"{_named(chosen)} joined", _hold(len(members), policy)
    return _Due(Proposal(Kind.JOIN, members, reason, hold), min(now_s, due_s))


def _restart(now_s: float, view: View, policy: Policy, generation: Generation) -> Decision | _Due:
    """A generation of those who came back to the rendezvous, once everybody alive did."""
    losses, newcomers = _losses(view), _newcomers(view, generation)
    is_full = len(generation.members) - len(losses) >= policy.job.nodes_max
    if not losses and (not newcomers or is_full):
        spare = f", {_count(newcomers)} spare" if newcomers else ""
        return Decision(Action.KEEP, f"generation {generation.number} has all its members{spare}")
    times_s = [*(loss.since_s for loss in losses.values()), *(live.since_s for live in newcomers.values())]
    running = [node.node_id for node in generation.members if node.node_id not in losses]
    stop_by_s = min(times_s) + policy.stop_s
    if running and now_s < stop_by_s:
        reason = f"{_named(running)} still {'runs' if len(running) == 1 else 'run'} the generation before"
        return Decision(Action.WAIT, reason, again_s=stop_by_s)
    due_s = _losses_settled_s(losses, policy)
    if now_s < due_s:
        return _settling(now_s, due_s, f"{_named(losses)} {_is(losses)} lost")
    coming = [node_id for node_id, live in view.nodes.items() if live.record.state is NodeState.JOINING]
    coming_by_s = min(times_s) + policy.start_wait_s
    if coming and now_s < coming_by_s and len(newcomers) < policy.job.nodes_max:
        reason = f"{_named(coming)} {_is(coming)} alive and not ready yet"
        return Decision(Action.WAIT, reason, again_s=coming_by_s)
    if len(newcomers) < policy.job.nodes_min:
        return Decision(Action.WAIT, _too_few(len(newcomers), policy))
    chosen = tuple(sorted(newcomers, key=natural_key)[: policy.job.nodes_max])
    gone = {node_id: loss for node_id, loss in losses.items() if node_id not in newcomers}
    reason = _loss_reason(gone) if gone else f"{_named(chosen)} {_is(chosen)} ready"
    return _Due(Proposal(Kind.RESTART, chosen, reason), max([*times_s, due_s]))


def _in_turn(now_s: float, due: _Due, view: View, policy: Policy) -> Decision:
    """Let the first in the row of writers write; who comes later steps in if it does not."""
    row = list(_writers(view))
    if view.me.node_id not in row:
        return Decision(Action.WAIT, f"{due.proposal.reason}; {_named(row)} may write the next generation")
    turn = min(row.index(view.me.node_id), TURNS_MAX)
    my_turn_s = due.since_s + turn * policy.turn_s
    if now_s < my_turn_s:
        return Decision(Action.WAIT, f"{due.proposal.reason}; the turn of {row[0]}", again_s=my_turn_s)
    return Decision(Action.REPLAN, due.proposal.reason, proposal=due.proposal)


def _writers(view: View) -> Iterator[str]:
    """Members first, in rank order, then the others who are ready; who leaves has other things to do."""
    losses = _losses(view)
    members = [node.node_id for node in view.generation.members] if view.generation else []
    yield from (node_id for node_id in members if node_id not in losses)
    others = [node_id for node_id, live in view.nodes.items() if is_usable(live)]
    yield from sorted({*others} - ({*members} - losses.keys()), key=natural_key)


def _bound_pause(now_s: float, decision: Decision, view: View, policy: Policy) -> Decision:
    """End a job that could not run for too long."""
    stop_s = view.paused_since_s + policy.pause_s
    if now_s >= stop_s:
        return Decision(
            Action.STOP, f"the job could not run for {policy.pause_s:.0f} s (join_timeout): {decision.reason}"
        )
    return Decision(decision.action, decision.reason, min(decision.again_s, stop_s))


def _losses(view: View) -> Mapping[str, Loss]:
    return view.lost or {}


def _newcomers(view: View, generation: Generation) -> dict[str, Live]:
    """Nodes that are ready and not in the generation: new, spare, or started anew."""
    return {
        node_id: live
        for node_id, live in view.nodes.items()
        if is_usable(live) and not generation.lists(live.record.node)
    }


def _asking(view: View, generation: Generation) -> dict[str, Live]:
    """Members that ask for a round and have not been given a generation for it yet."""
    return {
        node_id: live
        for node_id, live in view.nodes.items()
        if live.record.asked >= generation.number and generation.lists(live.record.node)
    }


def _is_settled(now_s: float, loss: Loss, policy: Policy) -> bool:
    return loss.is_on_purpose or now_s >= loss.since_s + policy.loss_settle_s


def _losses_settled_s(losses: Mapping[str, Loss], policy: Policy) -> float:
    """Leaving on purpose needs no settling: whoever leaves has said so itself."""
    times_s = [loss.since_s for loss in losses.values() if not loss.is_on_purpose]
    return _settled_s(times_s, policy.loss_settle_s)


def _settled_s(times_s: Sequence[float], settle_s: float) -> float:
    """When the last has waited for others long enough. The first never waits more than a few times as long."""
    if not times_s:
        return -math.inf
    return min(max(times_s) + settle_s, min(times_s) + SETTLE_TIMES_MAX * settle_s)


def _settling(now_s: float, due_s: float, what: str) -> Decision:
    return Decision(Action.WAIT, f"{what}; settling for {due_s - now_s:.1f} s more", again_s=due_s)


def _too_few(count: int, policy: Policy) -> str:
    return f"{count}{_OF_AT_LEAST}{policy.job.nodes_min} nodes"


def _hold(count: int, policy: Policy) -> str:
    """Why so many nodes hold, or nothing; a plan that does not fit is another reason."""
    return _too_few(count, policy) if count < policy.job.nodes_min else ""


def _is_other_hold(generation: Generation, policy: Policy) -> bool:
    """Whether it runs and must not any more, or holds for want of nodes and need not any more."""
    count = len(generation.members)
    if count < policy.job.nodes_min:
        return not generation.hold
    return generation.hold.startswith(f"{count}{_OF_AT_LEAST}")


def _loss_reason(losses: Mapping[str, Loss]) -> str:
    shown = [f"{node_id}: {loss.why}" for node_id, loss in list(losses.items())[:NODES_NAMED_MAX]]
    hidden = len(losses) - len(shown)
    return f"lost {'; '.join(shown)}{f' and {hidden} more' if hidden > 0 else ''}"


def _named(node_ids: Iterable[str]) -> str:
    ordered = list(node_ids)
    shown = ", ".join(ordered[:NODES_NAMED_MAX])
    hidden = len(ordered) - NODES_NAMED_MAX
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def _is(nodes: Sequence[object] | Mapping[str, object]) -> str:
    return "is" if len(nodes) == 1 else "are"


def _count(nodes: Sequence[object] | Mapping[str, object]) -> str:
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"


def _policy_problems(policy: Policy) -> Iterator[Problem]:
    for each in fields(policy):
        value = getattr(policy, each.name)
        if each.name.endswith("_s") and not 0 <= value < math.inf:
            yield Problem(f"{each.name} is {value!r}", "give a number of seconds, 0 or more")
    if policy.turn_s >= policy.pause_s:
        yield Problem(
            f"turn_s is {policy.turn_s} and pause_s {policy.pause_s}: the job would end before anybody's turn",
            "give pause_s at least some seconds",
        )
