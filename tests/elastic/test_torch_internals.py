"""Fails loudly when what the agent overrides or calls of torch's changes under it."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from elastic_hieravg.agent.elastic_agent import InPlaceAgent, NoRendezvous, RestartingAgent


def names(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_rendezvous", ["worker_group"]),
        ("_start_workers", ["worker_group"]),
        ("_stop_workers", ["worker_group"]),
        ("_invoke_run", ["role"]),
        ("_initialize_workers", ["worker_group"]),
        ("_restart_workers", ["worker_group"]),
        ("_monitor_workers", ["worker_group"]),
        ("_shutdown", ["death_sig", "timeout"]),
        ("run", ["role"]),
    ],
)
def test_methods_have_the_parameters_they_had(method: str, parameters: list[str]) -> None:
    function = getattr(LocalElasticAgent, method)
    assert names(inspect.unwrap(function)) == parameters


def test_the_agent_is_made_with_keywords() -> None:
    used = {"spec", "logs_specs", "start_method", "log_line_prefix_template", "shutdown_timeout"}
    assert used <= set(names(LocalElasticAgent.__init__))


def test_overrides_override_something() -> None:
    """A private method that torch renames would silently never be called again."""
    own = {name for name, value in vars(InPlaceAgent).items() if inspect.isfunction(value)}
    inherited = {name for base in (LocalElasticAgent, SimpleElasticAgent) for name in vars(base)}
    assert own & inherited == {"__init__", "_invoke_run", "_rendezvous", "_start_workers", "_stop_workers"}


def test_the_agent_that_restarts_overrides_something() -> None:
    own = {name for name, value in vars(RestartingAgent).items() if inspect.isfunction(value)}
    assert own == {"__init__", "_monitor_workers", "_rendezvous", "_restart_workers"}
    source = inspect.getsource(inspect.unwrap(SimpleElasticAgent._invoke_run))
    for called in ("_monitor_workers", "_restart_workers"):
        assert f"self.{called}(" in source


def test_the_agent_calls_what_is_overridden() -> None:
    for caller, called in [
        ("run", "_invoke_run"),
        ("_initialize_workers", "_rendezvous"),
        ("_initialize_workers", "_start_workers"),
        ("_restart_workers", "_stop_workers"),
        ("_restart_workers", "_initialize_workers"),
    ]:
        source = inspect.getsource(inspect.unwrap(getattr(SimpleElasticAgent, caller)))
        assert f"self.{called}(" in source


def test_attributes_are_there() -> None:
    source = inspect.getsource(SimpleElasticAgent.__init__)
    for name in ("_worker_group", "_remaining_restarts"):
        assert f"self.{name} = " in source
    assert "self._pcontext" in inspect.getsource(LocalElasticAgent)


def test_spec_has_the_fields_that_are_given() -> None:
    fields = {each.name for each in dataclasses.fields(WorkerSpec)}
    assert fields == {
        "args",
        "duplicate_stderr_filters",
        "duplicate_stdout_filters",
        "entrypoint",
        "event_log_handler",
        "fn",
        "local_addr",
        "local_world_size",
        "master_addr",
        "master_port",
        "max_restarts",
        "monitor_interval",
        "numa_options",
        "rdzv_handler",
        "role",
        "virtual_local_rank",
    }


def test_values_are_made_as_they_were() -> None:
    assert names(Worker.__init__)[:5] == [
        "local_rank",
        "global_rank",
        "role_rank",
        "world_size",
        "role_world_size",
    ]
    attributes = {"spec", "workers", "store", "group_rank", "group_world_size", "master_addr", "master_port"}
    assert attributes <= set(WorkerGroup.__slots__)
    assert {each.name for each in dataclasses.fields(RunResult)} == {"state", "return_values", "failures"}
    assert {"SUCCEEDED", "FAILED", "UNHEALTHY", "HEALTHY"} <= set(WorkerState.__members__)


def test_the_rendezvous_is_whole() -> None:
    assert not RendezvousHandler.__abstractmethods__ - vars(NoRendezvous).keys()


def test_the_launcher_reads_torchruns_flags() -> None:
    parser = get_args_parser()
    config, entrypoint, arguments = config_from_args(parser.parse_args(["--nnodes=1:4", "train.py", "--x"]))
    assert isinstance(config, LaunchConfig)
    assert (config.min_nodes, config.max_nodes, arguments[-1]) == (1, 4, "--x")
    assert isinstance(entrypoint, str)
    used = {"rdzv_configs", "logs_specs", "log_line_prefix_template", "start_method", "nproc_per_node", "role"}
    assert used <= {each.name for each in dataclasses.fields(LaunchConfig)}
