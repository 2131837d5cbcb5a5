"""From what `hieravg run` was told to a running agent, and its exit code."""

from contextlib import ExitStack, closing
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from elastic_hieravg.agent.bounds_file import BoundsFile
from elastic_hieravg.agent.elastic_agent import InPlaceAgent, NoRendezvous, starting_warm
from elastic_hieravg.agent.logs import Facts
from elastic_hieravg.agent.node import InPlaceNode
from elastic_hieravg.agent.restarting import (
    report_variables,
    reports_channel,
    run_restarting,
    why_not_ready,
    worker_variables,
)
from elastic_hieravg.agent.settings import Embedded, RunSettings
from elastic_hieravg.agent.stores import open_store
from elastic_hieravg.agent.telemetry import HEALTH_S, Telemetry
from elastic_hieravg.agent.termination import leave_message
from elastic_hieravg.agent.warm_pool import OWN_MODULES, WarmPool
from elastic_hieravg.config import export
from elastic_hieravg.membership.kv import KeyValue
from elastic_hieravg.membership.messages import Candidate
from elastic_hieravg.membership.records import Mode
from elastic_hieravg.rendezvous.handler import MembershipRendezvousHandler

# An agent that looks rarely is healthy as long as it does not miss more looks than these.
LOOKS_MISSED_MAX = 3


def launch(
    settings: RunSettings, config: LaunchConfig, entrypoint: Any, arguments: list[str], *, facts: Facts
) -> int:
    """Run this node's workers until the job is over or the node leaves; the exit code.

    `facts`: what every line of the log carries, to be kept up to date.
    """
    telemetry = Telemetry(
        run_id=settings.run_id,
        node_id=settings.candidate.node_id,
        backend=config.rdzv_backend,
        job=settings.policy.job,
        slots=settings.candidate.slots,
        lease_ttl_s=settings.lease_ttl_s,
        facts=facts,
        health_s=max(HEALTH_S, LOOKS_MISSED_MAX * config.monitor_interval),
    )
    with ExitStack() as stack:
        if settings.warm:
            pool = stack.enter_context(closing(WarmPool((*settings.warm, *OWN_MODULES))))
            stack.enter_context(starting_warm(pool))
        store = open_store(settings.store, settings.candidate, run_id=settings.run_id)
        kv, candidate = stack.enter_context(store)
        run = _restart if settings.policy.job.mode is Mode.RESTART else _run_in_place
        command = (entrypoint, tuple(arguments))
        return run(stack, settings, config, command=command, kv=kv, candidate=candidate, telemetry=telemetry)


def _restart(
    stack: ExitStack,
    settings: RunSettings,
    config: LaunchConfig,
    *,
    command: tuple[Any, tuple[str, ...]],
    kv: KeyValue,
    candidate: Candidate,
    telemetry: Telemetry,
) -> int:
    handler = MembershipRendezvousHandler(
        kv,
        candidate,
        backend=config.rdzv_backend,
        run_id=settings.run_id,
        policy=settings.policy,
        lease_ttl_s=settings.lease_ttl_s,
        observe=telemetry.noticed,
        on_view=telemetry.viewed,
    )
    channel = stack.enter_context(closing(reports_channel(telemetry)))
    stack.callback(telemetry.close)
    telemetry.serve(
        settings.metrics,
        why_not_ready=lambda: why_not_ready(handler.status, telemetry),
        membership=lambda: handler.status,
        has_group_store=False,
    )
    export(worker_variables(settings.policy.job, candidate) | report_variables(channel))
    return run_restarting(_worker_spec(config, *command, handler), config, telemetry)


def _run_in_place(
    stack: ExitStack,
    settings: RunSettings,
    config: LaunchConfig,
    *,
    command: tuple[Any, tuple[str, ...]],
    kv: KeyValue,
    candidate: Candidate,
    telemetry: Telemetry,
) -> int:
    node = InPlaceNode(
        kv,
        candidate,
        run_id=settings.run_id,
        policy=settings.policy,
        lease_ttl_s=settings.lease_ttl_s,
        telemetry=telemetry,
        hang_timeout_s=settings.hang_timeout_s,
    )
    stack.callback(node.close)
    stack.callback(telemetry.close)
    if settings.nnodes_file is not None:
        bounds, path = settings.policy.job.bounds, settings.nnodes_file
        file = BoundsFile(path, first=bounds, change=node.change_bounds, status=lambda: node.status)
        stack.enter_context(closing(file))
    telemetry.serve(
        settings.metrics,
        why_not_ready=node.why_not_ready,
        membership=lambda: node.status,
        has_group_store=True,
    )
    export(node.variables)
    no_handler = NoRendezvous(settings.run_id, config.rdzv_backend)
    assert config.logs_specs is not None
    agent = InPlaceAgent(
        node,
        spec=_worker_spec(config, *command, no_handler),
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        grace_s=settings.grace_s,
        # A store that only this machine's loopback has is found by no other node.
        is_alone=isinstance(settings.store, Embedded) and not settings.store.port,
    )
    agent.run()
    leave_message(agent.reason)
    return agent.exit_code


def _worker_spec(
    config: LaunchConfig, entrypoint: Any, arguments: tuple[str, ...], handler: RendezvousHandler
) -> WorkerSpec:
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=arguments,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
