"""torch's elastic agent, with workers that keep running while the membership changes.

All overrides of torch's private methods are in this file; torch is called with keyword arguments. The tests fail
loudly when what is overridden changes. Checked against torch 2.13.
"""

import logging
import signal
import time
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from elastic_hieravg.agent.node import InPlaceNode

# How long a worker has to end by itself when its node starts anew.
STOP_TIMEOUT_S = 3
# A worker that exits with this says that starting it again is of no use.
EXIT_DO_NOT_RETRY = 78
LOOPBACK = "127.0.0.1"

_log = logging.getLogger(__name__)


class NoRendezvous(RendezvousHandler):
    """torch's agent wants one; ours meets the others through the membership."""

    def __init__(self, run_id: str, backend: str) -> None:
        self._run_id = run_id
        self._backend = backend

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        raise AssertionError("workers start without a rendezvous")

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class InPlaceAgent(LocalElasticAgent):
    def __init__(
        self,
        node: InPlaceNode,
        *,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str,
        log_line_prefix_template: str | None,
        shutdown_timeout: int,
    ) -> None:
        super().__init__(
            spec=spec,
            logs_specs=logs_specs,
            start_method=start_method,
            log_line_prefix_template=log_line_prefix_template,
            shutdown_timeout=shutdown_timeout,
        )
        self._node = node
        self._has_started = False
        self.exit_code = 0

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Workers start with a world of their own node; the job's ranks reach them with each generation."""
        spec = worker_group.spec
        size = spec.local_world_size
        worker_group.workers = [
            Worker(local_rank=rank, global_rank=rank, role_rank=rank, world_size=size, role_world_size=size)
            for rank in range(size)
        ]
        worker_group.store = HashStore()
        worker_group.group_rank = 0
        worker_group.group_world_size = 1
        worker_group.master_addr = LOOPBACK
        worker_group.master_port = _free_port()
        self._node.workers_start(is_first=not self._has_started)
        self._has_started = True

    def _stop_workers(self, worker_group: WorkerGroup, *arguments: Any, **others: Any) -> None:
        self._shutdown(death_sig=signal.SIGTERM, timeout=STOP_TIMEOUT_S)

    def _invoke_run(self, role: str = "default") -> RunResult:
        group, spec = self._worker_group, self._worker_group.spec
        self._initialize_workers(group)
        while True:
            time.sleep(spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state is WorkerState.SUCCEEDED:
                self._node.finish(is_success=True, reason="training is done")
                return result
            status = self._node.status
            if status.error is not None:
                self._stop_workers(group)
                raise status.error
            if status.ended is not None:
                self._stop_workers(group)
                self.exit_code = 0 if status.ended.is_success else 1
                return RunResult(state=WorkerState.SUCCEEDED)
            if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
                if self._remaining_restarts <= 0:
                    self._stop_workers(group)
                    group.state = WorkerState.FAILED
                    return result
                self._remaining_restarts -= 1
                _log.warning("workers start anew; %s more times", self._remaining_restarts)
                self._restart_workers(group)


def _free_port() -> int:
    import socket

    with socket.create_server((LOOPBACK, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
