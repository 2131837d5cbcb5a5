"""Every metric there is: name, kind, labels, help and buckets. The registry, the README's table, the dashboards
and the tests are checked against it.

Base units; labels from small fixed sets. The job and the node are no labels here: they come with the scrape, as
`training_job` and `node`. Invariant: nothing is exported that is not declared here.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Cause(StrEnum):
    """What a worker's time went into that was no training."""

    START = "start"  # the process was not there yet, or loaded its model
    RENDEZVOUS = "rendezvous"  # it was ready, and waited to be taken in
    RECOVERY = "recovery"  # it waited at a boundary for the next generation, or was started anew
    AVERAGING = "averaging"  # it was in a round
    STRAGGLER = "straggler"  # it was in a round, and waited for somebody who came later
    QUIET = "quiet"  # it had said so: evaluation, checkpoints; or its loop had ended


class Link(StrEnum):
    """The widest link that a round's bytes crossed."""

    SHM = "shm"
    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"
    INTER_ZONE = "inter_zone"


class Phase(StrEnum):
    """The way from a loss back to work."""

    DETECT = "detect"  # from the last sign of life to the evidence that it was the last
    REPLAN = "replan"  # to the generation without the lost node
    REGROUP = "regroup"  # to the workers' entry into it
    FIRST_ROUND = "first_round"  # to its first committed round of all


class NodeShown(StrEnum):
    """How a node is shown to people: its state in the job, seen from outside."""

    TRAINING = "training"  # in the newest generation
    JOINING = "joining"  # its agent lives, its workers are not ready yet
    SPARE = "spare"  # ready, above nodes_max
    LEAVING = "leaving"
    LOST = "lost"  # was in a generation, and is not any more
    LEFT = "left"  # the same, on purpose: for people only, no metric counts it


class RestartReason(StrEnum):
    """Why a node's workers were started anew."""

    RAISED = "raised"  # the script ended with an exception, or an exit code
    KILLED = "killed"  # by a signal
    HUNG = "hung"  # by the watchdog
    MEMBERSHIP = "membership"  # --membership restart: all start anew with every change


@dataclass(frozen=True, slots=True)
class Metric:
    """`is_of_worker`: it is told by workers, and its samples vanish or stay as its kind says: gauges of a dead
    worker vanish, counters stay.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    is_of_worker: bool = False


# Upper bounds, in seconds. A step is from a millisecond to minutes; a round may be far below that.
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ROUND_BUCKETS = (
    0.0001,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
)
RECOVERY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

STEPS = "hieravg_steps_total"
SAMPLES = "hieravg_samples_total"
STEP_SECONDS = "hieravg_step_seconds"
ROUNDS = "hieravg_rounds_total"
ROUND_SECONDS = "hieravg_round_seconds"
EXPOSED_SECONDS = "hieravg_round_exposed_seconds_total"
COMM_BYTES = "hieravg_comm_bytes_total"
DIVERGENCE = "hieravg_replica_divergence_ratio"
NONFINITE = "hieravg_nonfinite_contributions_total"
STRAGGLER_SECONDS = "hieravg_straggler_wait_seconds_total"
LOCAL_GRADIENTS = "hieravg_local_gradients_total"
USER_VALUE = "hieravg_user_value"
PRODUCTIVE_SECONDS = "hieravg_productive_seconds_total"
BADPUT_SECONDS = "hieravg_badput_seconds_total"
GOODPUT = "hieravg_goodput_ratio"
REPORTS_DROPPED = "hieravg_reports_dropped_total"
GENERATION = "hieravg_generation"
GENERATIONS = "hieravg_generations_total"
NODES = "hieravg_nodes"
NODES_LIMIT = "hieravg_nodes_limit"
WORLD_RANKS = "hieravg_world_ranks"
RECOVERY_SECONDS = "hieravg_recovery_seconds"
WORKER_RESTARTS = "hieravg_worker_restarts_total"
PLAN_NOTES = "hieravg_plan_notes"
STORE_UP = "hieravg_store_up"
BUILD_INFO = "hieravg_build_info"

_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

CATALOGUE = (
    Metric(STEPS, _COUNTER, "Optimizer steps made.", ("local_rank",), is_of_worker=True),
    Metric(
        SAMPLES,
        _COUNTER,
        "Samples the steps were made over, as the script counts.",
        ("local_rank",),
        is_of_worker=True,
    ),
    Metric(
        STEP_SECONDS,
        _HISTOGRAM,
        "Seconds of a step of the training loop, without rounds and quiet times.",
        ("local_rank",),
        STEP_BUCKETS,
        is_of_worker=True,
    ),
    Metric(
        ROUNDS,
        _COUNTER,
        "Rounds that this node's workers took part in, each worker counted: committed; failed, and tried again "
        "in the next generation; skipped.",
        ("level", "outcome"),
        is_of_worker=True,
    ),
    Metric(
        ROUND_SECONDS,
        _HISTOGRAM,
        "Seconds of a committed round, waiting for others included.",
        ("level",),
        ROUND_BUCKETS,
        is_of_worker=True,
    ),
    Metric(
        EXPOSED_SECONDS,
        _COUNTER,
        "Seconds in which training stood still for rounds.",
        ("level",),
        is_of_worker=True,
    ),
    Metric(
        COMM_BYTES,
        _COUNTER,
        "Bytes sent in rounds, by the widest link they cross.",
        ("level", "link"),
        is_of_worker=True,
    ),
    Metric(
        DIVERGENCE,
        _GAUGE,
        "How far apart replicas were before the last round: root mean square difference from it, over its own.",
        ("level",),
        is_of_worker=True,
    ),
    Metric(
        NONFINITE,
        _COUNTER,
        "Contributions to rounds that had NaN or Inf in them and were left out.",
        is_of_worker=True,
    ),
    Metric(
        STRAGGLER_SECONDS,
        _COUNTER,
        "Seconds in which workers waited in rounds for somebody who came later.",
        ("level",),
        is_of_worker=True,
    ),
    Metric(
        LOCAL_GRADIENTS,
        _COUNTER,
        "Backward passes that used a worker's own gradients because a peer was lost.",
        is_of_worker=True,
    ),
    Metric(
        USER_VALUE,
        _GAUGE,
        "The newest number that the script reported under a name.",
        ("name", "local_rank"),
        is_of_worker=True,
    ),
    Metric(PRODUCTIVE_SECONDS, _COUNTER, "Worker seconds that went into steps.", is_of_worker=True),
    Metric(
        BADPUT_SECONDS,
        _COUNTER,
        "Worker seconds that did not go into steps, by what they went into.",
        ("cause",),
        is_of_worker=True,
    ),
    Metric(
        GOODPUT,
        _GAUGE,
        "Part of this node's worker time since it began that went into steps, restarts included.",
    ),
    Metric(
        REPORTS_DROPPED,
        _COUNTER,
        "Reports of workers that were dropped because the agent was slow; the next one tells the same.",
        is_of_worker=True,
    ),
    Metric(GENERATION, _GAUGE, "The newest generation this node has adopted; 0 before the first."),
    Metric(GENERATIONS, _COUNTER, "Generations adopted, by why they were made.", ("reason",)),
    Metric(NODES, _GAUGE, "Nodes of the job by state, as this node sees them.", ("state",)),
    Metric(NODES_LIMIT, _GAUGE, "How few and how many nodes the job may have.", ("bound",)),
    Metric(WORLD_RANKS, _GAUGE, "Ranks in the newest generation."),
    Metric(
        RECOVERY_SECONDS,
        _HISTOGRAM,
        "Seconds from a loss back to work, by phase.",
        ("phase",),
        RECOVERY_BUCKETS,
    ),
    Metric(WORKER_RESTARTS, _COUNTER, "Restarts of this node's workers, by reason.", ("reason",)),
    Metric(PLAN_NOTES, _GAUGE, "What the plan of the newest generation had to repair, by kind.", ("kind",)),
    Metric(STORE_UP, _GAUGE, "1 while the membership's store answers."),
    Metric(BUILD_INFO, Kind.INFO, "Versions this node runs.", ("version", "torch", "python")),
)

BY_NAME = {metric.name: metric for metric in CATALOGUE}
assert len(BY_NAME) == len(CATALOGUE), "every name is declared once"
