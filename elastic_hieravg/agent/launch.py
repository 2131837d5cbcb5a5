"""From what `hieravg run` was told to a running agent, and its exit code."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from elastic_hieravg.agent.elastic_agent import InPlaceAgent, NoRendezvous
from elastic_hieravg.agent.node import InPlaceNode
from elastic_hieravg.agent.restarting import run_restarting, worker_variables
from elastic_hieravg.agent.settings import Embedded, RunSettings
from elastic_hieravg.config import export
from elastic_hieravg.errors import StoreAwayError
from elastic_hieravg.membership.embedded import EmbeddedKeyValue, EmbeddedServer
from elastic_hieravg.membership.etcd import EtcdKeyValue
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.kv import KeyValue
from elastic_hieravg.membership.records import Mode
from elastic_hieravg.rendezvous.handler import MembershipRendezvousHandler

# How long the first agent may take to serve the store.
SERVE_WAIT_S = 60.0
RETRY_S = 0.2


def launch(settings: RunSettings, config: LaunchConfig, entrypoint: Any, arguments: list[str]) -> int:
    """Run this node's workers until the job is over or the node leaves; the exit code."""
    with ExitStack() as stack:
        kv = stack.enter_context(_open_store(settings.store, run_id=settings.run_id))
        if settings.policy.job.mode is Mode.RESTART:
            handler = MembershipRendezvousHandler(
                kv,
                settings.candidate,
                backend=config.rdzv_backend,
                run_id=settings.run_id,
                policy=settings.policy,
                lease_ttl_s=settings.lease_ttl_s,
            )
            export(worker_variables(settings.policy.job, settings.candidate))
            return run_restarting(_worker_spec(config, entrypoint, arguments, handler), config)
        node = InPlaceNode(
            kv,
            settings.candidate,
            run_id=settings.run_id,
            policy=settings.policy,
            lease_ttl_s=settings.lease_ttl_s,
            hang_timeout_s=settings.hang_timeout_s,
        )
        stack.callback(node.close)
        export(node.variables)
        no_handler = NoRendezvous(settings.run_id, config.rdzv_backend)
        spec = _worker_spec(config, entrypoint, arguments, no_handler)
        assert config.logs_specs is not None
        agent = InPlaceAgent(
            node,
            spec=spec,
            logs_specs=config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            grace_s=settings.grace_s,
        )
        agent.run()
        return agent.exit_code


def _worker_spec(
    config: LaunchConfig, entrypoint: Any, arguments: list[str], handler: RendezvousHandler
) -> WorkerSpec:
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


@contextmanager
def _open_store(store: Embedded | EtcdSettings, *, run_id: str) -> Iterator[KeyValue]:
    with ExitStack() as stack:
        if isinstance(store, EtcdSettings):
            kv: KeyValue = EtcdKeyValue(store)
        else:
            kv = _open_embedded(store, stack, run_id=run_id)
        stack.callback(kv.close)
        yield kv


def _open_embedded(store: Embedded, stack: ExitStack, *, run_id: str) -> KeyValue:
    """The store of the first agent: served here if nobody serves it yet and the address is this machine's."""
    deadline_s = time.monotonic() + SERVE_WAIT_S
    while True:
        # Another node's address, or another agent of this machine was first: then it is theirs.
        with suppress(OSError):
            server = EmbeddedServer(store.host, store.port, run_id=run_id)
            stack.callback(server.close)
            return EmbeddedKeyValue(store.host, server.port, run_id=run_id)
        kv = EmbeddedKeyValue(store.host, store.port, run_id=run_id)
        try:
            kv.get("/")
        except StoreAwayError:
            kv.close()
            if time.monotonic() > deadline_s:
                raise
            time.sleep(RETRY_S)
        else:
            return kv
