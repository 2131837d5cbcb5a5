"""Plans, changes and costs as text for people: the command's output and the agent's log.

Long lists are shortened here and nowhere else; whoever needs all of it takes the JSON.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from elastic_hieravg.plan.changes import Change, PlannedGroup
from elastic_hieravg.plan.costs import Cost, Traffic
from elastic_hieravg.plan.plan import Plan, PlannedLevel

LINES_SHOWN_MAX = 24
GROUPS_SHOWN_MAX = 8
STEPS_SHOWN = 4
DIGEST_SHOWN = 12

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks with ranges compressed.

    >>> ranks_text((0, 1, 2, 5))
    '{0-2,5}'
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"{{{','.join(texts)}}}"


def bytes_text(num_bytes: float) -> str:
    """
    >>> bytes_text(0), bytes_text(1536), bytes_text(5e8)
    ('0 B', '1.54 kB', '500 MB')
    """
    exponent = 0
    while num_bytes >= 999.5 and exponent < len(_UNITS) - 1:
        num_bytes /= 1000
        exponent += 1
    return f"{num_bytes:.3g} {_UNITS[exponent]}"


def plan_text(plan: Plan) -> str:
    """Who has which rank, the levels with their groups, when each runs, and the notes."""
    world = f"{_counted(plan.world_size, 'rank')} on {_counted(len(plan.topology.nodes), 'node')}"
    lines = [f"generation {plan.generation}: {world}, plan {plan.digest[:DIGEST_SHOWN]}"]
    placed = [
        (node.node_id, ranks_text(ranks), " ".join(f"{key}={value}" for key, value in node.labels.items()))
        for node, ranks in plan.topology.placed()
    ]
    lines += ["", "ranks", *_table(placed)]
    levels = [
        (level.name, f"every {_counted(level.period_steps, 'step')}", _groups_text(level))
        for level in plan.levels
    ]
    lines += ["", "levels, innermost first", *(_table(levels) or ["  none: there is nobody to average with"])]
    if plan.levels:
        lines += ["", "schedule: the widest level due runs", *_table(_schedule(plan))]
    notes = [f"  {note.reason}" for note in plan.notes]
    return "\n".join([*lines, "", "notes", *(notes or ["  none"])])


def change_text(change: Change) -> str:
    """Who left and came, which ranks moved, which groups are kept, new and gone."""
    events = [
        f"{word} {_shortened(nodes)}"
        for word, nodes in (("lost", change.lost), ("joined", change.joined), ("restarted", change.restarted))
        if nodes
    ]
    lines = [f"change to generation {change.generation}: {'; '.join(events) or 'the same nodes'}"]
    rows: list[tuple[str, ...]] = []
    moved: dict[str, list[tuple[int, int]]] = {}
    for move in change.moves:
        moved.setdefault(move.node_id, []).append((move.rank_before, move.rank))
    moves = [
        ("moved", node_id, f"{ranks_text(old for old, _ in ranks)} -> {ranks_text(new for _, new in ranks)}")
        for node_id, ranks in moved.items()
    ]
    # Each kind is shortened on its own: many kept groups must not hide the new ones.
    for word, groups in (("kept", change.kept), ("new", change.new), ("gone", change.gone)):
        shown = [_group_row(word, group) for group in groups[:GROUPS_SHOWN_MAX]]
        hidden = len(groups) - len(shown)
        rows += [*shown, (word, f"and {hidden} more", "", "")] if hidden else shown
    return "\n".join([*lines, *_table(moves), *_aligned(rows)])


def cost_text(cost: Cost) -> str:
    """Bytes by level and link, per round and per step, for the whole world."""
    head = ("inside nodes", "between nodes", "between zones")
    total = cost.per_step
    rows = [
        (f"a round, of {bytes_text(cost.model_bytes)} models", *head),
        *((f"  {level.name}", *_traffic_row(level.per_round)) for level in cost.levels),
        ("a step, on average", *head),
        *((f"  {level.name}", *_traffic_row(level.per_step)) for level in cost.levels),
        ("  all levels", *_traffic_row(total)),
        ("  a global round every step", *_traffic_row(cost.synchronous)),
    ]
    lines = ["bytes moved in the whole world", *_table(rows)]
    if total.network_bytes and total.network_bytes < cost.synchronous.network_bytes:
        ratio = cost.synchronous.network_bytes / total.network_bytes
        shown = f"{ratio:.3g}" if ratio < 100 else f"{ratio:,.0f}"
        lines += [f"  between nodes and zones {shown} times less than with a global round every step"]
    return "\n".join(lines)


def _schedule(plan: Plan) -> list[tuple[str, str]]:
    rows = []
    if plan.warmup_steps:
        rows.append(("warm-up", f"synchronous up to step {plan.warmup_steps}"))
    for level in plan.levels:
        # The next wider period is at least twice this one, so at most every second step is taken from it.
        steps = (plan.warmup_steps + level.period_steps * index for index in range(1, 2 * STEPS_SHOWN + 1))
        runs = islice((step for step in steps if plan.due(step) is level), STEPS_SHOWN)
        rows.append((level.name, f"after steps {', '.join(map(str, runs))}, ..."))
    return rows


def _groups_text(level: PlannedLevel) -> str:
    shown = " ".join(ranks_text(group) for group in level.groups[:GROUPS_SHOWN_MAX])
    hidden = len(level.groups) - GROUPS_SHOWN_MAX
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def _group_row(word: str, group: PlannedGroup) -> tuple[str, str, str, str]:
    shown = ranks_text(group.ranks)
    # A group that is gone has no ranks in the new plan.
    ranks = f"was {shown}" if word == "gone" else shown
    return word, ranks, "+".join(group.levels), f"built in generation {group.key.generation}"


def _traffic_row(traffic: Traffic) -> tuple[str, str, str]:
    return (
        bytes_text(traffic.inside_nodes_bytes),
        bytes_text(traffic.between_nodes_bytes),
        bytes_text(traffic.between_zones_bytes),
    )


def _shortened(names: Sequence[str]) -> str:
    hidden = len(names) - GROUPS_SHOWN_MAX
    return ", ".join(names[:GROUPS_SHOWN_MAX]) + (f" and {hidden} more" if hidden > 0 else "")


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligned columns; too many rows are shortened."""
    hidden = len(rows) - LINES_SHOWN_MAX
    lines = _aligned(rows[:LINES_SHOWN_MAX])
    return [*lines, f"  ... and {hidden} more"] if hidden > 0 else lines


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, indented; all rows are shown."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
