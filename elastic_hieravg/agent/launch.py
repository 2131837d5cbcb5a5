"""From what `hieravg run` was told to a running agent, and its exit code."""

import logging
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.launcher.api import LaunchConfig

from elastic_hieravg.agent.elastic_agent import InPlaceAgent, NoRendezvous
from elastic_hieravg.agent.node import InPlaceNode
from elastic_hieravg.config import export
from elastic_hieravg.errors import Problem, StoreAwayError, UsageError
from elastic_hieravg.membership.decisions import Policy
from elastic_hieravg.membership.embedded import EmbeddedKeyValue, EmbeddedServer
from elastic_hieravg.membership.kv import KeyValue
from elastic_hieravg.membership.messages import Candidate

SERVE_WAIT_S = 30.0
RETRY_S = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    config: LaunchConfig
    entrypoint: Any
    arguments: tuple[str, ...]
    run_id: str
    endpoint: tuple[str, int]
    policy: Policy
    lease_ttl_s: float
    candidate: Candidate


def launch(request: Launch) -> int:
    with ExitStack() as stack:
        kv = stack.enter_context(open_embedded(*request.endpoint, run_id=request.run_id))
        node = InPlaceNode(
            kv, request.candidate, run_id=request.run_id, policy=request.policy, lease_ttl_s=request.lease_ttl_s
        )
        stack.callback(node.close)
        export(node.variables)
        config = request.config
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=request.entrypoint,
            args=request.arguments,
            rdzv_handler=NoRendezvous(request.run_id, config.rdzv_backend),
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
        )
        agent = InPlaceAgent(
            node,
            spec=spec,
            logs_specs=config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout,
        )
        result = agent.run()
        return 1 if result.is_failed() else agent.exit_code


@contextmanager
def open_embedded(host: str, port: int, *, run_id: str) -> Iterator[KeyValue]:
    """The store of the first agent: served here if nobody serves it yet and the address is this machine's."""
    server = None
    deadline_s = time.monotonic() + SERVE_WAIT_S
    kv = EmbeddedKeyValue(host, port, run_id=run_id)
    while True:
        try:
            kv.get("/")
            break
        except StoreAwayError:
            if server is None:
                try:
                    server = EmbeddedServer(host, port, run_id=run_id)
                    kv = EmbeddedKeyValue(host, server.port, run_id=run_id)
                except OSError:
                    # Another node's address, or another agent of this one was first.
                    pass
            if time.monotonic() > deadline_s:
                raise
            time.sleep(RETRY_S)
    try:
        yield kv
    finally:
        kv.close()
        if server is not None:
            server.close()
