"""The dashboard of a job's training: how much of its time it trains, how fast, and what its rounds cost.

Read from the top: is it well, where does the time go, which node, which level, which link.
"""

from dashboards.panels import (
    GOODPUT_BOUNDS,
    GREEN,
    LEVEL,
    NONE_WANTED,
    RED,
    YELLOW,
    Bounds,
    Panel,
    Query,
    bars,
    build_dashboard,
    goodput,
    increase,
    lines,
    number,
    of,
    of_job,
    quantile,
    rate,
    total,
    worker_seconds,
)
from elastic_hieravg.metrics import catalogue as names

UID = "hieravg-training"
# What the alert calls above budget.
EXPOSED_BUDGET = 0.1
THE_LOSS = 'name="loss"'
LOSSES = 'name=~"loss.*"'
OTHERS = 'name!~"loss.*"'


def build() -> str:
    return build_dashboard(
        uid=UID,
        title="hieravg: training",
        description="How much of its time a job trains, how fast, and what its rounds cost.",
        rows=[
            ("Now", _now()),
            ("Where the time goes", _time()),
            ("Steps", _steps()),
            ("Rounds", _rounds()),
            ("What rounds cost", _costs()),
            ("What replicas look like", _replicas()),
        ],
    )


def _share(metric: str, *matchers: str, by: str) -> str:
    """Of all worker time, whatever it went into."""
    return f"{total(rate(metric, *matchers), by)} / ignoring ({by}) group_left () {worker_seconds()}"


def _now() -> list[Panel]:
    return [
        number(
            "Goodput now",
            "Part of the worker time of the last 5 minutes that went into steps.",
            Query(goodput(window="5m"), "goodput", is_instant=True),
            unit="percentunit",
            bounds=GOODPUT_BOUNDS,
            decimals=1,
        ),
        number(
            "Goodput, 24 h",
            "The same over 24 hours, or since the first sample. A node that was away counts nothing here: see "
            "the nodes of the other dashboard.",
            Query(goodput(window="24h"), "goodput", is_instant=True),
            unit="percentunit",
            bounds=GOODPUT_BOUNDS,
            decimals=1,
        ),
        number(
            "Goodput since it began",
            "Mean of what the nodes tell of themselves since each of them began, restarts of workers included.",
            Query(f"avg({of(names.GOODPUT)})", "goodput", is_instant=True),
            unit="percentunit",
            bounds=GOODPUT_BOUNDS,
            decimals=1,
        ),
        number(
            "Steps per second",
            "Steps of one worker, the mean of all. 0: nobody trains.",
            Query(f"avg({rate(names.STEPS)})", "steps", is_instant=True),
            unit="suffix: steps/s",
            bounds=Bounds(RED, ((1e-9, GREEN),)),
            decimals=2,
        ),
        number(
            "Samples per second",
            "Samples of all workers together, as the script counts them.",
            Query(total(rate(names.SAMPLES)), "samples", is_instant=True),
            unit="si: samples/s",
        ),
        number(
            "Loss",
            "Newest loss that the script reported with `job.report(loss=...)`, the mean over workers.",
            Query(f"avg({of(names.USER_VALUE, THE_LOSS)})", "loss", is_instant=True),
            unit="none",
            decimals=4,
            no_value="not reported",
        ),
        number(
            "Ranks",
            "Ranks in the newest generation.",
            Query(f"max({of_job(names.WORLD_RANKS)})", "ranks", is_instant=True),
            unit="none",
            bounds=Bounds(RED, ((1, GREEN),)),
        ),
        number(
            "Not finite, 24 h",
            "Contributions with NaN or infinity in them that rounds left out. The replicas were healed.",
            Query(f"ceil({total(increase(names.NONFINITE, window='24h'))})", "contributions", is_instant=True),
            unit="none",
            bounds=NONE_WANTED,
        ),
    ]


def _time() -> list[Panel]:
    return [
        lines(
            "Goodput by node",
            "Part of a node's worker time that went into steps. One node below the others: look at its badput, "
            "restarts and step time.",
            Query(goodput("node"), "{{node}}"),
            unit="percentunit",
            bounds=GOODPUT_BOUNDS,
            high=1,
        ),
        lines(
            "Badput by cause",
            "Part of all worker time that did not go into steps, by what it went into.",
            Query(_share(names.BADPUT_SECONDS, by="cause"), "{{cause}}"),
            unit="percentunit",
            is_stacked=True,
        ),
        bars(
            "Badput by cause, 24 h",
            "Worker time of the last 24 hours that did not go into steps. Two workers that wait a minute are "
            "two minutes.",
            Query(total(increase(names.BADPUT_SECONDS, window="24h"), "cause"), "{{cause}}", is_instant=True),
            unit="s",
        ),
    ]


def _steps() -> list[Panel]:
    median_by_node = quantile(0.5, names.STEP_SECONDS, by=["node"])
    return [
        lines(
            "Steps per second by node",
            "Steps of one worker, the mean of each node's workers. A node at 0 is away, joins, or hangs.",
            Query(f"avg by (node) ({rate(names.STEPS)})", "{{node}}"),
            unit="suffix: steps/s",
        ),
        lines(
            "Step time",
            "Seconds of a step without its rounds: the median and the slowest of a hundred. Far apart: some "
            "steps are much slower, mostly for data or a noisy neighbour.",
            Query(quantile(0.5, names.STEP_SECONDS), "p50"),
            Query(quantile(0.99, names.STEP_SECONDS), "p99"),
            unit="s",
        ),
        lines(
            "Step time by node, p50",
            "The median step of each node. One above the others is the straggler that they wait for in rounds.",
            Query(median_by_node, "{{node}}"),
            unit="s",
        ),
        lines(
            "Step time, slowest node over fastest",
            "1: all nodes are equally fast. The alert for a straggler begins at 1.5.",
            Query(f"max({median_by_node}) / min({median_by_node})", "slowest / fastest"),
            unit="none",
            bounds=Bounds(GREEN, ((1.5, RED),)),
            low=1,
        ),
        lines(
            "Samples per second by node",
            "What each node contributes; rounds weigh replicas by it.",
            Query(total(rate(names.SAMPLES), "node"), "{{node}}"),
            unit="si: samples/s",
        ),
        lines(
            "Loss",
            "What scripts report under names that begin with loss: mean, lowest and highest worker. They come "
            "together with every global round.",
            Query(f"avg by (name) ({of(names.USER_VALUE, LOSSES)})", "{{name}}, mean"),
            Query(f"min by (name) ({of(names.USER_VALUE, LOSSES)})", "{{name}}, lowest"),
            Query(f"max by (name) ({of(names.USER_VALUE, LOSSES)})", "{{name}}, highest"),
            unit="none",
            low=None,
        ),
        lines(
            "Other reported values",
            "What scripts report with `job.report(...)` under any other name, the mean over workers.",
            Query(f"avg by (name) ({of(names.USER_VALUE, OTHERS)})", "{{name}}"),
            unit="none",
            low=None,
            span=24,
        ),
    ]


def _rounds() -> list[Panel]:
    return [
        lines(
            "Rounds by level and outcome",
            "Rounds per second that a worker takes part in, all workers added. Failed ones are tried once "
            "more in the next generation.",
            Query(total(rate(names.ROUNDS, LEVEL), "level", "outcome"), "{{level}} {{outcome}}"),
            unit="suffix: rounds/s",
        ),
        lines(
            "Rounds not committed",
            "Rounds that failed or were skipped, each worker counted. A few with every lost node are normal.",
            Query(
                total(increase(names.ROUNDS, LEVEL, 'outcome!="committed"'), "level", "outcome"),
                "{{level}} {{outcome}}",
            ),
            unit="short",
            is_rare=True,
        ),
        lines(
            "Round duration by level",
            "Seconds of a committed round, waiting for others included: the median and the slowest of a "
            "hundred.",
            Query(quantile(0.5, names.ROUND_SECONDS, LEVEL, by=["level"]), "{{level}} p50"),
            Query(quantile(0.99, names.ROUND_SECONDS, LEVEL, by=["level"]), "{{level}} p99"),
            unit="s",
        ),
    ]


def _costs() -> list[Panel]:
    return [
        lines(
            "Exposed seconds by level",
            "Part of worker time in which training stood still for rounds. The line is the budget of the "
            "alert, for all levels together.",
            Query(_share(names.EXPOSED_SECONDS, LEVEL, by="level"), "{{level}}"),
            unit="percentunit",
            bounds=Bounds(GREEN, ((EXPOSED_BUDGET, RED),)),
            is_stacked=True,
        ),
        lines(
            "Straggler wait by level",
            "The part of it in which workers waited for somebody who came later.",
            Query(_share(names.STRAGGLER_SECONDS, LEVEL, by="level"), "{{level}}"),
            unit="percentunit",
            bounds=Bounds(GREEN, ((0.05, YELLOW),)),
            is_stacked=True,
        ),
        lines(
            "Straggler wait by node",
            "Worker seconds per second that a node waits for others. The node that waits least is the one "
            "they wait for.",
            Query(total(rate(names.STRAGGLER_SECONDS, LEVEL), "node"), "{{node}}"),
            unit="s",
        ),
        lines(
            "Bytes by link",
            "Bytes per second that rounds send, by the widest link they cross: memory of a node, sockets "
            "inside it, between nodes, between zones.",
            Query(total(rate(names.COMM_BYTES, LEVEL), "link"), "{{link}}"),
            unit="Bps",
            is_stacked=True,
        ),
        lines(
            "Bytes by level",
            "The same by level and link: a level over a wider link than expected means a wrong topology label.",
            Query(total(rate(names.COMM_BYTES, LEVEL), "level", "link"), "{{level}} over {{link}}"),
            unit="Bps",
        ),
        lines(
            "Bytes by node",
            "Bytes per second that each node sends to others; memory of the node is not counted.",
            Query(total(rate(names.COMM_BYTES, LEVEL, 'link!="shm"'), "node"), "{{node}}"),
            unit="Bps",
        ),
    ]


def _replicas() -> list[Panel]:
    return [
        lines(
            "Divergence by level",
            "How far apart replicas were before the last round: 0.01 is one percent of the parameters' size. "
            "If it grows for long, periods are too long or the learning rate is too high.",
            Query(f"max by (level) ({of(names.DIVERGENCE, LEVEL)})", "{{level}}"),
            unit="percentunit",
        ),
        lines(
            "Contributions that are not finite",
            "Replicas with NaN or infinity, left out of rounds and healed by them. Counted by each rank that "
            "saw it.",
            Query(total(increase(names.NONFINITE), "node"), "{{node}}"),
            unit="short",
            bounds=NONE_WANTED,
            is_rare=True,
        ),
        lines(
            "Local gradients",
            "Backward passes that used a worker's own gradients because a peer was lost.",
            Query(total(increase(names.LOCAL_GRADIENTS), "node"), "{{node}}"),
            unit="short",
            is_rare=True,
        ),
    ]
