"""`hieravg plan`: show the plan for given nodes, before and after a change.

It starts nothing, connects to nothing and never imports torch.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic_hieravg.config import (
    NODE_FORM,
    NODES_FILE_FORM,
    read_nodes,
    read_nodes_file,
    read_params,
    read_steps,
)
from elastic_hieravg.errors import Problem, UsageError
from elastic_hieravg.plan import (
    Change,
    Hierarchy,
    Misfit,
    Node,
    Plan,
    PlannedGroup,
    Topology,
    Traffic,
    change_text,
    cost,
    cost_text,
    difference,
    first_keys,
    fit,
    plan_text,
)
from elastic_hieravg.plan.fitting import ON_MISFIT

# Sums travel in float32 whatever the model's own type.
BYTES_PER_PARAM = 4

EPILOG = """\
example:
  hieravg plan --hierarchy node=4,zone=16,global=64 \\
      --node a:4:zone=z1 --node b:4:zone=z1 --node c:2:zone=z2 --lose b --params 125M

A hierarchy is written level=period_steps, innermost first. A level is `node`, `global` (the last one),
a label of the nodes such as `zone`, or `size-8` for groups of 8 ranks.
A loss and a join are two changes, in this order, as they are in a running job.
"""


@dataclass(frozen=True, slots=True)
class Story:
    """Plans one after the other, and what changed in between: one change fewer than plans."""

    plans: tuple[Plan, ...]
    changes: tuple[Change, ...]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="show which ranks average together, when, and what a change does",
        description="Show the plan for a hierarchy and a set of nodes. Nothing is started.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--hierarchy", required=True, metavar="LEVELS", help="node=4,zone=16,global=64")
    parser.add_argument("--node", action="append", default=[], metavar="NODE", help=f"{NODE_FORM}; repeatable")
    parser.add_argument("--nodes-file", type=Path, metavar="FILE", help=f"JSON: {NODES_FILE_FORM}")
    parser.add_argument("--warmup-steps", default="0", metavar="STEPS", help="synchronous steps first")
    parser.add_argument("--on-misfit", choices=ON_MISFIT, default="repair", help="if group sizes do not fit")
    parser.add_argument("--lose", action="append", default=[], metavar="NAME", help="then lose it; repeatable")
    parser.add_argument("--join", action="append", default=[], metavar="NODE", help="then add it; repeatable")
    parser.add_argument("--params", metavar="NUMBER", help="show bytes moved for a model, for example 125M")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    model_bytes = read_params(flags.params) * BYTES_PER_PARAM if flags.params is not None else None
    told = tell(flags)
    if isinstance(told, Misfit):
        print(f"hieravg: the job would pause: {told.reason}\n\nhint: {told.hint}", file=sys.stderr)
        return 1
    if flags.json:
        print(json.dumps(document(told, model_bytes=model_bytes), indent=2))
    else:
        print("\n".join(paragraphs(told, model_bytes=model_bytes)))
    return 0


def tell(flags: argparse.Namespace) -> Story | Misfit:
    """Fit the plan, and once more after the losses and after the joins."""
    hierarchy = Hierarchy.parse(flags.hierarchy)
    warmup_steps = read_steps(flags.warmup_steps, flag="--warmup-steps")
    nodes = read_nodes(flags.node)
    if flags.nodes_file is not None:
        nodes += read_nodes_file(flags.nodes_file)
    if not nodes:
        raise UsageError(
            Problem("there are no nodes", f"give --node {NODE_FORM}, or a --nodes-file with nodes in it")
        )
    joining = read_nodes(flags.join)
    plans: list[Plan] = []
    changes: list[Change] = []
    for topology in _topologies(Topology(nodes), losing=flags.lose, joining=joining):
        plan = fit(
            hierarchy,
            topology,
            generation=len(plans) + 1,
            warmup_steps=warmup_steps,
            on_misfit=flags.on_misfit,
        )
        if isinstance(plan, Misfit):
            return plan
        if plans:
            keys = changes[-1].keys if changes else first_keys(plans[-1])
            changes.append(difference(plans[-1], plan, keys=keys))
        plans.append(plan)
    return Story(tuple(plans), tuple(changes))


def _topologies(first: Topology, *, losing: list[str], joining: list[Node]) -> Iterator[Topology]:
    # A generation either only shrinks or only grows, so a loss and a join make two.
    yield first
    left = first.lose(*losing) if losing else first
    if losing:
        yield left
    if joining:
        yield left.join(*joining)


def paragraphs(story: Story, *, model_bytes: int | None) -> Iterator[str]:
    """The story as text: each plan, and before each but the first what changed."""
    for index, plan in enumerate(story.plans):
        if index:
            yield "\n" + change_text(story.changes[index - 1]) + "\n"
        yield plan_text(plan)
        if model_bytes is not None:
            yield "\n" + cost_text(cost(plan, model_bytes=model_bytes))


def document(story: Story, *, model_bytes: int | None) -> dict[str, object]:
    """The last plan and, if something changed, how it came about."""
    plan = story.plans[-1]
    found: dict[str, object] = {
        "generation": plan.generation,
        "world_size": plan.world_size,
        "digest": plan.digest,
        "warmup_steps": plan.warmup_steps,
        "ranks": [
            {"rank": seat.rank, "node_id": seat.node_id, "local_rank": seat.local_rank}
            for seat in plan.topology.seats()
        ],
        "levels": [
            {
                "name": level.name,
                "period_steps": level.period_steps,
                "groups": level.groups,
            }
            for level in plan.levels
        ],
        "next_due_steps": {level.name: plan.next_due_step(level, after_step=0) for level in plan.levels},
        "notes": [{"level": note.level, "reason": note.reason} for note in plan.notes],
    }
    if model_bytes is not None:
        found["cost"] = _cost_document(plan, model_bytes=model_bytes)
    if story.changes:
        found["changes"] = [_change_document(change) for change in story.changes]
    return found


def _change_document(change: Change) -> dict[str, object]:
    return {
        "generation": change.generation,
        "lost": change.lost,
        "joined": change.joined,
        "restarted": change.restarted,
        "moves": [
            {
                "node_id": move.node_id,
                "local_rank": move.local_rank,
                "rank_before": move.rank_before,
                "rank": move.rank,
            }
            for move in change.moves
        ],
        "kept": [_group_document(group) for group in change.kept],
        "new": [_group_document(group) for group in change.new],
        # These have no ranks any more.
        "gone": [_group_document(group, ranks="ranks_before") for group in change.gone],
    }


def _group_document(group: PlannedGroup, *, ranks: str = "ranks") -> dict[str, object]:
    return {ranks: group.ranks, "levels": group.levels, "built_in_generation": group.key.generation}


def _cost_document(plan: Plan, *, model_bytes: int) -> dict[str, object]:
    costs = cost(plan, model_bytes=model_bytes)
    return {
        "model_bytes": costs.model_bytes,
        "levels": [
            {
                "name": level.name,
                "rounds_per_step": level.rounds_per_step,
                "per_round": _traffic_document(level.per_round),
                "per_step": _traffic_document(level.per_step),
            }
            for level in costs.levels
        ],
        "per_step": _traffic_document(costs.per_step),
        "synchronous_per_step": _traffic_document(costs.synchronous),
    }


def _traffic_document(traffic: Traffic) -> dict[str, float]:
    return {
        "inside_nodes_bytes": traffic.inside_nodes_bytes,
        "between_nodes_bytes": traffic.between_nodes_bytes,
        "between_zones_bytes": traffic.between_zones_bytes,
    }
