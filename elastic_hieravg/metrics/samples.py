"""What one worker has measured since it started, as values and JSON, on its way to its agent.

Numbers count from the worker's start and only grow, so that a report that is dropped loses nothing: the next
one tells the same and more. Invariant: what is read names metrics of the catalogue, with their labels.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_hieravg.errors import DocumentError, Problem
from elastic_hieravg.metrics.catalogue import BY_NAME, Kind
from elastic_hieravg.plan.document import parse_json

# A metric's name, and the values of its labels without `local_rank`, which the agent knows.
Key = tuple[str, tuple[str, ...]]
# What a worker may tell: a few levels, links and names.
SERIES_MAX = 1000


@dataclass(frozen=True, slots=True)
class Distribution:
    """`counts`: of each bucket by itself, the last one for what is above all bounds."""

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class LastRound:
    """The newest round of a level that this worker saw. `at_s`: seconds since the epoch."""

    step: int
    seconds: float
    sent_bytes: int
    link: str
    outcome: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Samples:
    """`state`: what the worker does at the moment, a word for people."""

    step: int = 0
    rank: int = 0
    generation: int = 0
    state: str = "joining"
    counters: Mapping[Key, float] = field(default_factory=dict)
    gauges: Mapping[Key, float] = field(default_factory=dict)
    distributions: Mapping[Key, Distribution] = field(default_factory=dict)
    rounds: Mapping[str, LastRound] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {
                "step": self.step,
                "rank": self.rank,
                "generation": self.generation,
                "state": self.state,
                "counters": [[name, labels, value] for (name, labels), value in self.counters.items()],
                # JSON has no NaN: a loss that is none is told as nothing.
                "gauges": [
                    [name, labels, value if math.isfinite(value) else str(value)]
                    for (name, labels), value in self.gauges.items()
                ],
                "distributions": [
                    [name, labels, each.counts, each.total]
                    for (name, labels), each in self.distributions.items()
                ],
                "rounds": [
                    [level, each.step, each.seconds, each.sent_bytes, each.link, each.outcome, each.at_s]
                    for level, each in self.rounds.items()
                ],
            },
            allow_nan=False,
        )


def read_samples(text: str) -> Samples:
    """What `to_json` wrote; anything else is a `DocumentError`."""
    document: Any = parse_json(text, where="a report")
    try:
        return Samples(
            step=int(document["step"]),
            rank=int(document["rank"]),
            generation=int(document["generation"]),
            state=str(document["state"]),
            counters={_key(each, Kind.COUNTER): _count(each[2]) for each in _entries(document["counters"])},
            gauges={_key(each, Kind.GAUGE): float(each[2]) for each in _entries(document["gauges"])},
            distributions={
                _key(each, Kind.HISTOGRAM): _distribution(each[0], each[2], each[3])
                for each in _entries(document["distributions"])
            },
            rounds={
                str(each[0]): LastRound(
                    int(each[1]), float(each[2]), int(each[3]), str(each[4]), str(each[5]), float(each[6])
                )
                for each in _entries(document["rounds"])
            },
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as exc:
        problem = Problem(
            f"a worker's report is not one: {exc}",
            "run the same version of elastic_hieravg in agent and workers",
        )
        raise DocumentError(problem) from exc


def _entries(found: list[Any]) -> list[Any]:
    if len(found) > SERIES_MAX:
        raise ValueError(f"it has {len(found)} entries of one kind")
    return found


def _key(entry: Any, kind: Kind) -> Key:
    name, labels = entry[0], tuple(str(label) for label in entry[1])
    metric = BY_NAME.get(name)
    if metric is None or metric.kind is not kind or not metric.is_of_worker:
        raise ValueError(f"{name!r} is no {kind} that a worker tells")
    if len(labels) != len([each for each in metric.labels if each != "local_rank"]):
        raise ValueError(f"{name} has the labels {metric.labels}, not {labels}")
    return name, labels


def _count(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value} counts nothing")
    return number


def _distribution(name: str, counts: Any, total: Any) -> Distribution:
    found = Distribution(tuple(int(count) for count in counts), _count(total))
    if len(found.counts) != len(BY_NAME[name].buckets) + 1 or min(found.counts) < 0:
        raise ValueError(f"{name} has other buckets")
    return found
