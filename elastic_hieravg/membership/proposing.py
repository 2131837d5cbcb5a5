"""From a decision to the write that carries it out: the next generation's number, plan, groups and guards.

Pure. Invariant: the write is refused if anybody wrote a generation or other bounds since, if its writer is out,
or if a suspect it drops has spoken up.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from elastic_hieravg.errors import TopologyError
from elastic_hieravg.membership.decisions import Proposal
from elastic_hieravg.membership.kv import Put, Write
from elastic_hieravg.membership.mirror import Mirror
from elastic_hieravg.membership.records import Generation, Job, Kind, NodeRecord, Refusal
from elastic_hieravg.membership.succession import term_of
from elastic_hieravg.plan import Misfit, Node, Plan, Topology, difference, first_keys, fit

# etcd takes up to 128 operations at once, and each suspect needs two.
SUSPECTS_PER_WRITE_MAX = 32
BROKEN_PER_WRITE_MAX = 32
# More than a host that is about to be lost can have written without enough others knowing.
NUMBERS_SKIPPED = 5

PlanGeneration = Callable[[Job, int, tuple[Node, ...]], tuple[Plan, str]]


def plan_generation(job: Job, number: int, nodes: tuple[Node, ...]) -> tuple[Plan, str]:
    """The plan for a generation's nodes, and why the job holds in it, or nothing."""
    topology = Topology(nodes)
    steps = job.warmup_steps
    plan = fit(job.hierarchy, topology, generation=number, warmup_steps=steps, on_misfit=job.on_misfit)
    if isinstance(plan, Misfit):
        repaired = fit(job.hierarchy, topology, generation=number, warmup_steps=steps)
        return repaired, f"{plan.reason}; {plan.hint}"
    return plan, ""


def next_number(mirror: Mirror) -> int:
    """One more than any generation that anybody alive has followed, whatever the store remembers.

    After a new host took over the store, some more: the lost one may have told somebody of generations that
    nobody else knows.
    """
    seen = (record.seen for record in mirror.nodes.values())
    last = max(chain(seen, [mirror.generation.number if mirror.generation else 0]))
    is_taken_over = term_of(mirror.revision) > term_of(mirror.revision_of(mirror.keys.generation))
    return last + 1 + (NUMBERS_SKIPPED if mirror.generation and is_taken_over else 0)


def guards_of(mirror: Mirror, *keys: str) -> dict[str, int]:
    """Guards that hold as long as these keys are what this agent has seen of them."""
    return {key: mirror.revision_of(key) for key in keys}


def generation_write(
    mirror: Mirror, proposal: Proposal, *, writer: Node, job: Job, plan_for: PlanGeneration
) -> Write:
    keys = mirror.keys
    # What the decision was made on, beside the nodes.
    decided_on = keys.generation, keys.bounds, keys.node(writer.node_id)
    suspects = _suspects(mirror)
    dropped = suspects[:SUSPECTS_PER_WRITE_MAX]
    wanted = (*proposal.node_ids, *(node.node_id for node in suspects[SUSPECTS_PER_WRITE_MAX:]))
    number = next_number(mirror)
    staying, refusals = _fitting(mirror, job, number, [mirror.nodes[node_id] for node_id in wanted], plan_for)
    refused = [
        Put(keys.refusal(node.node_id), Refusal(node.incarnation, reason).to_json(), mirror.lease_of(keys.job))
        for node, reason in refusals
    ]
    if refused and (not staying or (proposal.kind is Kind.JOIN and _is_same(mirror.generation, staying))):
        # Nobody is left to join, or to begin with: say why, and leave the generation as it is.
        return Write(guards_of(mirror, *decided_on), tuple(refused))
    plan, misfit = plan_for(job, number, tuple(record.node for record in staying))
    generation = Generation(
        number=number,
        kind=proposal.kind,
        reason=proposal.reason,
        members=plan.topology.nodes,
        addresses={record.node.node_id: record.address for record in staying},
        digest=plan.digest,
        built=_built(mirror, plan, job, plan_for),
        hold=proposal.hold or misfit,
        writer=writer.incarnation,
    )
    accused = [keys.suspicion(node.node_id) for node in dropped]
    broken = [keys.broken(name) for name in sorted(mirror.broken)[:BROKEN_PER_WRITE_MAX]]
    return Write(
        guards_of(mirror, *decided_on, *accused),
        (Put(keys.generation, generation.to_json(), mirror.lease_of(keys.job)), *refused),
        (*(keys.node(node.node_id) for node in dropped), *accused, *broken),
    )


def _suspects(mirror: Mirror) -> list[Node]:
    """Members that are accused and have not spoken up; the write that drops them ends their records."""
    members = mirror.generation.members if mirror.generation else ()
    return [
        member
        for member in members
        if mirror.suspicion_of(member) is not None
        and (record := mirror.nodes.get(member.node_id)) is not None
        and record.node.incarnation == member.incarnation
    ]


def _fitting(
    mirror: Mirror, job: Job, number: int, wanted: list[NodeRecord], plan_for: PlanGeneration
) -> tuple[list[NodeRecord], list[tuple[Node, str]]]:
    """Those of the wanted nodes whose labels go together, members first, and why the others' do not."""
    try:
        plan_for(job, number, _nodes(wanted))
    except TopologyError:
        staying: list[NodeRecord] = []
        refusals: list[tuple[Node, str]] = []
        generation = mirror.generation
        members_first = sorted(wanted, key=lambda record: not (generation and generation.lists(record.node)))
        for record in members_first:
            try:
                plan_for(job, number, _nodes([*staying, record]))
                staying.append(record)
            except TopologyError as exc:
                refusals.append((record.node, str(exc)))
        return staying, refusals
    return wanted, []


def _built(mirror: Mirror, plan: Plan, job: Job, plan_for: PlanGeneration) -> tuple[int, ...]:
    """For each group of the plan the generation that built it: an earlier one if it lives on unbroken."""
    previous = mirror.generation
    new = first_keys(plan)
    if previous is None:
        return tuple(key.generation for key in new)
    before, _ = plan_for(job, previous.number, previous.members)
    keys_before = previous.keys(before)
    broken = [key for key in keys_before if key.name in mirror.broken]
    change = difference(before, plan, keys=keys_before, broken=broken)
    built = {key.members: key.generation for key in change.keys}
    return tuple(built[key.members] for key in new)


def _nodes(records: Iterable[NodeRecord]) -> tuple[Node, ...]:
    return tuple(record.node for record in records)


def _is_same(generation: Generation | None, staying: Sequence[NodeRecord]) -> bool:
    return generation is not None and len(generation.members) == len(staying)
