"""What one node exports: its workers' reports added up, and what its agent counts itself.

A worker tells numbers since its own start. The registry keeps what it saw last of each worker and adds the
difference, so that counters go on when a worker is started anew. Invariant: counters and distributions never go
back, the gauges of a worker that is gone are gone with it, and HELP and TYPE of every metric are always there.
"""

import math
import platform
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.catalogue import BY_NAME, CATALOGUE, Kind, Metric
from elastic_hieravg.metrics.samples import Key, Samples

PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# Names that scripts report under, on this node in all.
USER_NAMES_MAX = 50
# Series of this node, whatever its workers come to tell over time.
SERIES_MAX = 10_000

Worker = tuple[int, int]


class Registry(Collector):
    """Any thread may call any of these. `refresh` is called before each collection, to set what is of now."""

    def __init__(self, *, refresh: Callable[[], None] = lambda: None) -> None:
        self._refresh = refresh
        self._lock = threading.Lock()
        self._counters: defaultdict[Key, float] = defaultdict(float)
        self._totals: dict[Key, float] = {}
        self._gauges: dict[str, dict[tuple[str, ...], float]] = {}
        self._distributions: dict[Key, _Counts] = {}
        self._workers: dict[Worker, Samples] = {}
        self._collectors = CollectorRegistry(auto_describe=False)
        self._collectors.register(self)

    # --- what the agent counts itself -------------------------------------------------------------------------

    def count(self, name: str, *labels: str, amount: float = 1.0) -> None:
        with self._lock:
            self._counters[_declared(name, labels, Kind.COUNTER)] += amount

    def set_total(self, name: str, *labels: str, value: float) -> None:
        """What the agent itself adds to a counter, in all so far; beside what its workers tell."""
        key = _declared(name, labels, Kind.COUNTER)
        with self._lock:
            self._totals[key] = max(value, self._totals.get(key, 0.0))

    def expect(self, name: str, *labels: str) -> None:
        """A distribution with nothing in it yet is told too."""
        key = _declared(name, labels, Kind.HISTOGRAM)
        with self._lock:
            self._distributions.setdefault(key, _Counts(name))

    def observe(self, name: str, *labels: str, value: float) -> None:
        key = _declared(name, labels, Kind.HISTOGRAM)
        with self._lock:
            counts = self._distributions.setdefault(key, _Counts(name))
            counts.counts[bisect_left(BY_NAME[name].buckets, value)] += 1
            counts.total += value

    def set_gauge(self, name: str, *labels: str, value: float) -> None:
        _declared(name, labels, Kind.GAUGE)
        with self._lock:
            self._gauges.setdefault(name, {})[labels] = value

    def set_gauges(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        """These and no others: what is not among them is gone."""
        for labels in values:
            _declared(name, labels, Kind.GAUGE)
        with self._lock:
            self._gauges[name] = dict(values)

    def set_info(self, name: str, *labels: str) -> None:
        _declared(name, labels, Kind.INFO)
        with self._lock:
            self._gauges[name] = {labels: 1.0}

    def set_build_info(self) -> None:
        """The versions that run here."""
        versions = [metadata.version(package) for package in ("elastic_hieravg", "torch")]
        self.set_info(names.BUILD_INFO, *versions, platform.python_version())

    # --- what workers tell ------------------------------------------------------------------------------------

    def take(self, samples: Samples, *, local_rank: int, process_id: int) -> None:
        """A worker's report: add what is new in it."""
        worker = local_rank, process_id
        with self._lock:
            before = self._workers.get(worker, Samples())
            for key, value in samples.counters.items():
                grown = value - before.counters.get(key, 0.0)
                full = _with_rank(key, local_rank)
                if full in self._counters or len(self._counters) < SERIES_MAX:
                    self._counters[full] += max(0.0, grown)
            for key, distribution in samples.distributions.items():
                full = _with_rank(key, local_rank)
                if full not in self._distributions and len(self._distributions) >= SERIES_MAX:
                    continue
                known = before.distributions.get(key)
                counts = self._distributions.setdefault(full, _Counts(key[0]))
                counts.add(distribution.counts, known.counts if known else ())
                counts.total += max(0.0, distribution.total - (known.total if known else 0.0))
            self._workers[worker] = samples

    def drop(self, *, local_rank: int, process_id: int) -> None:
        """A worker is gone. Another with the same number begins from nothing."""
        with self._lock:
            self._workers.pop((local_rank, process_id), None)

    # --- for whoever scrapes ----------------------------------------------------------------------------------

    def text(self) -> bytes:
        """Everything, in Prometheus' own text format."""
        self._refresh()
        return generate_latest(self._collectors)

    def openmetrics_text(self) -> bytes:
        self._refresh()
        text: bytes = openmetrics.generate_latest(self._collectors)  # type: ignore[no-untyped-call]
        return text

    def value(self, name: str, *labels: str) -> float | None:
        """One number as it is exported; None if there is none."""
        self._refresh()
        wanted = dict(zip(BY_NAME[name].labels, labels, strict=True))
        return self._collectors.get_sample_value(name, wanted)

    def collect(self) -> Iterator[Family]:
        with self._lock:
            families = [self._family(metric) for metric in CATALOGUE]
        yield from families

    def _family(self, metric: Metric) -> Family:
        match metric.kind:
            case Kind.COUNTER:
                counters = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in sorted(self._counts_of(metric.name).items()):
                    counters.add_metric(labels, value)
                return counters
            case Kind.HISTOGRAM:
                histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
                for (name, labels), counts in sorted(self._distributions.items()):
                    if name == metric.name:
                        histogram.add_metric(labels, counts.cumulative(), counts.total)
                return histogram
            case Kind.GAUGE:
                gauges = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in sorted(self._gauges_of(metric).items()):
                    gauges.add_metric(labels, value)
                return gauges
            case Kind.INFO:
                info = InfoMetricFamily(metric.name.removesuffix("_info"), metric.help)
                for labels in self._gauges.get(metric.name, {}):
                    info.add_metric([], dict(zip(metric.labels, labels, strict=True)))
                return info

    def _counts_of(self, wanted: str) -> dict[tuple[str, ...], float]:
        found: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for source in (self._counters, self._totals):
            for (name, labels), value in source.items():
                if name == wanted:
                    found[labels] += value
        return found

    def _gauges_of(self, metric: Metric) -> dict[tuple[str, ...], float]:
        found = dict(self._gauges.get(metric.name, {}))
        if not metric.is_of_worker:
            return found
        for (local_rank, _), samples in sorted(self._workers.items()):
            for key, value in samples.gauges.items():
                if key[0] != metric.name:
                    continue
                _, labels = _with_rank(key, local_rank)
                # Where workers share a series, the farthest apart is told.
                found[labels] = _larger(found.get(labels), value)
        return _bounded(found) if metric.name == names.USER_VALUE else found


class _Counts:
    """A distribution that grows. `counts`: of each bucket by itself."""

    def __init__(self, name: str) -> None:
        self._bounds = BY_NAME[name].buckets
        self.counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def add(self, counts: Sequence[int], known: Sequence[int]) -> None:
        known = known or [0] * len(counts)
        for index, (new, old) in enumerate(zip(counts, known, strict=True)):
            self.counts[index] += max(0, new - old)

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus writes it: each bucket with all below it."""
        found, so_far = [], 0
        for bound, count in zip((*self._bounds, math.inf), self.counts, strict=True):
            so_far += count
            found.append((floatToGoString(bound), float(so_far)))  # type: ignore[no-untyped-call]
        return found


def _declared(name: str, labels: tuple[str, ...], kind: Kind) -> Key:
    metric = BY_NAME[name]
    assert metric.kind is kind, f"{name} is a {metric.kind}"
    assert len(labels) == len(metric.labels), f"{name} has the labels {metric.labels}"
    return name, labels


def _with_rank(key: Key, local_rank: int) -> Key:
    """A worker's key with its local rank where the catalogue has it."""
    name, told = key
    wanted = BY_NAME[name].labels
    if "local_rank" not in wanted:
        return key
    index = wanted.index("local_rank")
    return name, (*told[:index], str(local_rank), *told[index:])


def _larger(before: float | None, value: float) -> float:
    # What is no number is larger than any: it is what somebody has to see.
    return value if before is None or math.isnan(value) or value > before else before


def _bounded(values: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """No more than so many names, the first in the order of the alphabet."""
    kept = sorted({labels[0] for labels in values})[:USER_NAMES_MAX]
    return {labels: value for labels, value in values.items() if labels[0] in kept}
