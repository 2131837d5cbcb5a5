"""Metrics of a worker that has no agent of ours to tell them: it serves them itself, at a port of its own."""

import logging
import os
from collections.abc import Callable

from elastic_hieravg.config import MetricsPlace
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.endpoint import Answer, Endpoint, listen, metrics_route
from elastic_hieravg.metrics.registry import Registry
from elastic_hieravg.metrics.samples import Samples

_log = logging.getLogger(__name__)


class WorkerEndpoint:
    """`place`: where the first worker of a node serves; the others do at the ports behind it."""

    def __init__(
        self,
        place: MetricsPlace,
        *,
        local_rank: int,
        samples: Callable[[], Samples],
        world_size: Callable[[], int],
    ) -> None:
        self._local_rank = local_rank
        self._samples = samples
        self._world_size = world_size
        self._registry = Registry(refresh=self._refresh)
        self._registry.set_build_info()
        self._endpoint: Endpoint | None = None
        listener = listen(place.host, place.port + local_rank if place.port else 0)
        if listener is None:
            _log.warning(
                "no metrics of this worker: HIERAVG_METRICS_HOST %s is not an address of this machine",
                place.host,
            )
            return
        if listener.warning:
            _log.warning("%s", listener.warning)
        routes = {"/metrics": metrics_route(self._registry), "/healthz": lambda _: Answer(b"alive\n")}
        self._endpoint = Endpoint(listener, routes, report=lambda why: _log.warning("%s", why))
        _log.info("metrics at http://%s:%s/metrics", self._endpoint.host, self._endpoint.port)

    @property
    def port(self) -> int | None:
        return self._endpoint.port if self._endpoint else None

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()

    def _refresh(self) -> None:
        samples, registry = self._samples(), self._registry
        registry.take(samples, local_rank=self._local_rank, process_id=os.getpid())
        registry.set_gauge(names.GENERATION, value=samples.generation)
        registry.set_gauge(names.WORLD_RANKS, value=self._world_size())
        productive_s = samples.counters.get((names.PRODUCTIVE_SECONDS, ()), 0.0)
        badput_s = sum(value for (name, _), value in samples.counters.items() if name == names.BADPUT_SECONDS)
        if productive_s + badput_s > 0:
            # Of this process alone: nobody here knows the attempts before it.
            registry.set_gauge(names.GOODPUT, value=productive_s / (productive_s + badput_s))
