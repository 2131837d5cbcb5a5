"""The dashboard of a job's membership: who is in it, what changed and why, and how long recovery took."""

from dashboards.panels import (
    GREEN,
    NONE_WANTED,
    RED,
    WINDOW,
    YELLOW,
    Bounds,
    Panel,
    Query,
    bars,
    build_dashboard,
    increase,
    lines,
    number,
    of,
    of_job,
    total,
)
from elastic_hieravg.metrics import catalogue as names

UID = "hieravg-membership"


def build() -> str:
    return build_dashboard(
        uid=UID,
        title="hieravg: membership",
        description="Who is in a job, what changed and why, and how long it took to get back to work.",
        rows=[
            ("Now", _now()),
            ("Nodes and generations", _nodes()),
            ("Recovery", _recovery()),
            ("Workers, plan and store", _workers()),
        ],
    )


def _state(state: names.NodeShown) -> str:
    """Nodes see the same job at slightly different times: the one that sees most is taken."""
    return f"max({of_job(names.NODES, _is('state', state))})"


def _is(label: str, value: str) -> str:
    return f'{label}="{value}"'


def _now() -> list[Panel]:
    generation = of_job(names.GENERATION)
    return [
        number(
            "Nodes training",
            "Nodes in the newest generation.",
            Query(_state(names.NodeShown.TRAINING), "training", is_instant=True),
            unit="none",
            bounds=Bounds(RED, ((1, GREEN),)),
        ),
        number(
            "Above the minimum",
            "How many nodes can be lost before the job pauses. 0: the next loss stops training until a node "
            "comes.",
            Query(
                f"{_state(names.NodeShown.TRAINING)} - min({of_job(names.NODES_LIMIT, _is('bound', 'min'))})",
                "to lose",
                is_instant=True,
            ),
            unit="none",
            bounds=Bounds(RED, ((0, YELLOW), (1, GREEN))),
        ),
        number(
            "Spares",
            "Nodes that are ready and wait because the job has its maximum.",
            Query(_state(names.NodeShown.SPARE), "spare", is_instant=True),
            unit="none",
        ),
        number(
            "Lost",
            "Nodes that were in a generation and did not come back.",
            Query(_state(names.NodeShown.LOST), "lost", is_instant=True),
            unit="none",
            bounds=NONE_WANTED,
        ),
        number(
            "Generation",
            "The newest generation that a node has adopted.",
            Query(f"max({generation})", "generation", is_instant=True),
            unit="none",
        ),
        number(
            "Generations apart",
            "Newest generation less the oldest that a node is in. Above 0 for long: a node does not follow.",
            Query(f"max({generation}) - min({generation})", "apart", is_instant=True),
            unit="none",
            bounds=Bounds(GREEN, ((1, YELLOW),)),
        ),
        number(
            "Changes, 1 h",
            "Generations of the last hour.",
            Query(
                f"ceil(max(sum by (node) (increase({of_job(names.GENERATIONS)}[1h]))))",
                "changes",
                is_instant=True,
            ),
            unit="none",
            bounds=Bounds(GREEN, ((10, YELLOW), (20, RED))),
        ),
        number(
            "Store",
            "Whether the store of the membership answers. Without it training goes on, and nobody can join or "
            "be taken out.",
            Query(f"min({of_job(names.STORE_UP)})", "store", is_instant=True),
            unit="none",
            bounds=Bounds(RED, ((1, GREEN),)),
            words={"0": ("away", RED), "1": ("up", GREEN)},
        ),
    ]


def _nodes() -> list[Panel]:
    generations = f"increase({of_job(names.GENERATIONS)}[{WINDOW}])"
    return [
        lines(
            "Nodes by state",
            "Nodes by state, and between how few and how many the job trains.",
            Query(f"max by (state) ({of_job(names.NODES)})", "{{state}}"),
            Query(f"max by (bound) ({of_job(names.NODES_LIMIT)})", "limit: {{bound}}"),
            unit="short",
            is_stepped=True,
            span=12,
        ),
        lines(
            "Ranks",
            "Ranks in the newest generation, as each node sees it.",
            Query(of(names.WORLD_RANKS), "{{node}}"),
            unit="short",
            is_stepped=True,
            span=12,
        ),
        lines(
            "Generation by node",
            "The newest generation that each node has adopted. A line that falls to 0 is an agent that was "
            "started anew; one that stays behind does not follow.",
            Query(of(names.GENERATION), "{{node}}"),
            unit="short",
            is_stepped=True,
        ),
        lines(
            "Generations by reason",
            "How many were made and why: loss, join, start; rebuild: a group failed and nobody was lost; "
            "round: one more global round before somebody leaves; bounds: the limits changed.",
            Query(f"max by (reason) ({generations})", "{{reason}}"),
            unit="short",
            is_rare=True,
        ),
        lines(
            "Agents started anew by node",
            "How often a node's agent was started anew within an hour: its counters began from 0, or it has a "
            "new address. It flaps if this goes on.",
            Query(
                f"sum by (node) (resets({of(names.PRODUCTIVE_SECONDS)}[1h]) and {of(names.STORE_UP)}) "
                f"+ count by (node) (present_over_time({of(names.STORE_UP)}[1h])) - 1",
                "{{node}}",
            ),
            unit="short",
            bounds=Bounds(GREEN, ((4, RED),)),
            is_stepped=True,
        ),
    ]


def _recovery() -> list[Panel]:
    def mean(window: str) -> str:
        seconds = f"increase({of_job(f'{names.RECOVERY_SECONDS}_sum')}[{window}])"
        count = f"increase({of_job(f'{names.RECOVERY_SECONDS}_count')}[{window}])"
        return f"{total(seconds, 'phase')} / {total(count, 'phase')}"

    def share(quantile: float) -> str:
        buckets = f"increase({of_job(f'{names.RECOVERY_SECONDS}_bucket')}[$__range])"
        return f"histogram_quantile({quantile}, {total(buckets, 'phase', 'le')})"

    return [
        lines(
            "Recovery time by phase",
            "Mean seconds from a loss back to work. detect: until the loss was evident; replan: until the next "
            "generation; regroup: until workers were in it; first_round: until its first global round.",
            Query(mean(WINDOW), "{{phase}}"),
            unit="s",
            is_rare=True,
            span=12,
        ),
        bars(
            "Recovery time by phase, whole range",
            "Of all recoveries in the time shown: the median and the slowest of a hundred.",
            Query(share(0.5), "{{phase}} p50", is_instant=True),
            Query(share(0.99), "{{phase}} p99", is_instant=True),
            unit="s",
            span=12,
        ),
    ]


def _workers() -> list[Panel]:
    return [
        lines(
            "Restarts by reason",
            "Restarts of workers. raised: the script; killed: by a signal, mostly for memory; hung: by the "
            "watchdog; membership: `--membership restart`.",
            Query(total(increase(names.WORKER_RESTARTS), "node", "reason"), "{{node}} {{reason}}"),
            unit="short",
            is_rare=True,
        ),
        lines(
            "Plan notes by kind",
            "What the newest plan had to repair: levels dropped, merged or resized. `hieravg status` tells "
            "the reasons.",
            Query(f"max by (kind) ({of_job(names.PLAN_NOTES)})", "{{kind}}"),
            unit="short",
            is_stepped=True,
        ),
        lines(
            "Store by node",
            "1 while the store answers this node. One node at 0: its network; all at 0: the store.",
            Query(of(names.STORE_UP), "{{node}}"),
            unit="short",
            bounds=Bounds(RED, ((1, GREEN),)),
            is_stepped=True,
            high=1,
        ),
        bars(
            "Nodes by version",
            "How many nodes run which versions. More than one bar: a rollout that is not finished.",
            Query(
                f"count by (version, torch, python) ({of_job(names.BUILD_INFO)})",
                "hieravg {{version}}, torch {{torch}}, Python {{python}}",
                is_instant=True,
            ),
            unit="short",
            span=12,
        ),
        lines(
            "Reports dropped",
            "Reports of workers that an agent did not get in time. The next one tells the same and more: "
            "numbers are late, not lost.",
            Query(total(increase(names.REPORTS_DROPPED), "node"), "{{node}}"),
            unit="short",
            is_rare=True,
            span=12,
        ),
    ]
