"""From what `hieravg run` was told to a running agent, and its exit code."""

from contextlib import ExitStack, closing
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from elastic_hieravg.agent.elastic_agent import InPlaceAgent, NoRendezvous, starting_warm
from elastic_hieravg.agent.node import InPlaceNode
from elastic_hieravg.agent.restarting import run_restarting, worker_variables
from elastic_hieravg.agent.settings import RunSettings
from elastic_hieravg.agent.stores import open_store
from elastic_hieravg.agent.warm_pool import OWN_MODULES, WarmPool
from elastic_hieravg.config import export
from elastic_hieravg.membership.records import Mode
from elastic_hieravg.rendezvous.handler import MembershipRendezvousHandler


def launch(settings: RunSettings, config: LaunchConfig, entrypoint: Any, arguments: list[str]) -> int:
    """Run this node's workers until the job is over or the node leaves; the exit code."""
    with ExitStack() as stack:
        if settings.warm:
            pool = stack.enter_context(closing(WarmPool((*settings.warm, *OWN_MODULES))))
            stack.enter_context(starting_warm(pool))
        store = open_store(settings.store, settings.candidate, run_id=settings.run_id)
        kv, candidate = stack.enter_context(store)
        if settings.policy.job.mode is Mode.RESTART:
            handler = MembershipRendezvousHandler(
                kv,
                candidate,
                backend=config.rdzv_backend,
                run_id=settings.run_id,
                policy=settings.policy,
                lease_ttl_s=settings.lease_ttl_s,
            )
            export(worker_variables(settings.policy.job, candidate))
            return run_restarting(_worker_spec(config, entrypoint, arguments, handler), config)
        node = InPlaceNode(
            kv,
            candidate,
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
