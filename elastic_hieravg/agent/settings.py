"""What `hieravg run` was told, read into values. Everything wrong with it is told at once, at the start."""

import secrets
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_hieravg.config import (
    LABELS_FILE_VARIABLE,
    LABELS_VARIABLE,
    MetricsPlace,
    host_name,
    read_metrics_place,
    read_modules,
    read_nnodes_file,
    read_node_labels,
    read_steps,
)
from elastic_hieravg.errors import Problem, UsageError, raise_if_any
from elastic_hieravg.membership.decisions import Policy
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.messages import Candidate
from elastic_hieravg.membership.records import Job, Mode
from elastic_hieravg.plan import Hierarchy, Node
from elastic_hieravg.plan.fitting import ON_MISFIT
from elastic_hieravg.rendezvous.settings import (
    IGNORED,
    JOIN_TIMEOUT_S,
    LAST_CALL_TIMEOUT_S,
    LEASE_TTL_MIN_S,
    address_towards,
    etcd_settings,
    gather,
    key_problems,
    seconds_of,
)

EMBEDDED, ETCD = "c10d", "etcd3"
# The port that torch's own c10d backend takes too.
DEFAULT_PORT = 29400
HANG_TIMEOUT_MIN_S = 1.0
LABELS_SHOWN_MAX = 8
# What is said with flags of its own, not with --rdzv-conf.
FLAGS = {"lease_ttl_s": "--lease-ttl-s", "node_id": "--node-id"}


@dataclass(frozen=True, slots=True)
class Embedded:
    """The store that the first agent serves at its endpoint. `others`: where it can be asked for, too."""

    host: str
    port: int
    others: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """`hang_timeout_s` is None if it follows the worker's own steps. `warm`: modules, none if not wanted.

    `metrics`: where this node's metrics are served, None if nowhere. `nnodes_file`: where bounds are read that
    change while the job runs, None if they do not.
    """

    run_id: str
    store: Embedded | EtcdSettings
    policy: Policy
    candidate: Candidate
    lease_ttl_s: float
    grace_s: float
    hang_timeout_s: float | None
    warm: tuple[str, ...] = ()
    metrics: MetricsPlace | None = None
    nnodes_file: Path | None = None


def read_run_settings(
    flags: Namespace, *, nodes_min: int, nodes_max: int, slots: int, conf: Mapping[str, object]
) -> RunSettings:
    """`flags` are those of `hieravg run`, as its parser gives them."""
    # torch adds a rank for its static backend, which is refused below.
    ignored = (*IGNORED, "rank") if flags.rdzv_backend == "static" else IGNORED
    texts = {key: str(value) for key, value in conf.items() if key not in ignored}
    problems: list[Problem] = [
        Problem(f"--rdzv-conf has {key}, which is a flag of its own", f"give {FLAGS[key]} instead")
        for key in texts
        if key in FLAGS
    ]
    texts = {key: value for key, value in texts.items() if key not in FLAGS}
    problems += key_problems(texts)
    given = {name: getattr(flags, name) for name in ("lease_ttl_s", "grace_s", "hang_timeout_s")}
    numbers = texts | {name: str(value) for name, value in given.items() if value is not None}
    read = {
        "lease_ttl_s": seconds_of(numbers, "lease_ttl_s", 0.0, at_least=LEASE_TTL_MIN_S, shown="--lease-ttl-s"),
        "grace_s": seconds_of(numbers, "grace_s", 0.0, at_least=0.0, shown="--grace-s"),
        "hang_timeout_s": seconds_of(
            numbers, "hang_timeout_s", 0.0, at_least=HANG_TIMEOUT_MIN_S, shown="--hang-timeout-s"
        ),
        "join_timeout": seconds_of(numbers, "join_timeout", JOIN_TIMEOUT_S, at_least=1.0),
        "last_call_timeout": seconds_of(numbers, "last_call_timeout", LAST_CALL_TIMEOUT_S, at_least=0.0),
    }
    problems += [each for each in read.values() if isinstance(each, Problem)]
    seconds = {name: each for name, each in read.items() if isinstance(each, float)}
    if flags.rdzv_backend == ETCD and not _has_run_id(flags):
        problems.append(Problem("there is no run id", "give every job its own: --rdzv-id=job7"))
    nnodes_file = Path(flags.nnodes_file) if flags.nnodes_file else None
    if nnodes_file is not None:
        read_bounds = gather(lambda: read_nnodes_file(nnodes_file), problems)
        nodes_min, nodes_max = read_bounds or (nodes_min, nodes_max)
    store = gather(lambda: _store(flags, texts, nodes_max=nodes_max), problems)
    job = gather(lambda: _job(flags, nodes_min=nodes_min, nodes_max=nodes_max), problems)
    warm = gather(lambda: read_modules(flags.warm, flag="--warm") if flags.warm else (), problems)
    metrics = gather(lambda: read_metrics_place(flags.metrics_port, flags.metrics_host), problems)
    # A node that cannot be is refused here, before anything is started.
    node = gather(lambda: Node(flags.node_id or host_name(), slots, read_node_labels(flags.label)), problems)
    if job is not None and node is not None:
        problems += label_problems(job.hierarchy, node)
    address = None if store is None else gather(lambda: flags.local_addr or _address(store), problems)
    raise_if_any(UsageError, problems)
    assert store is not None
    assert job is not None
    assert node is not None
    assert address is not None
    # As with torchrun, a job at an endpoint of its own needs no name; one without an endpoint gets one.
    run_id = secrets.token_hex(4) if flags.standalone else flags.rdzv_id or "none"
    return RunSettings(
        run_id,
        store,
        Policy(
            job,
            join_settle_s=seconds["last_call_timeout"],
            pause_s=seconds["join_timeout"],
            follows_bounds=nnodes_file is not None,
        ),
        Candidate(node.node_id, node.slots, node.labels, address, 0, may_rename=not flags.node_id),
        seconds["lease_ttl_s"],
        seconds["grace_s"],
        None if given["hang_timeout_s"] is None else seconds["hang_timeout_s"],
        warm or (),
        metrics,
        nnodes_file,
    )


def label_problems(hierarchy: Hierarchy, node: Node) -> Iterator[Problem]:
    """Every level that is a label has to be one of this very node: no generation could hold it otherwise."""
    found = ", ".join(f"{key}={value}" for key, value in list(node.labels.items())[:LABELS_SHOWN_MAX])
    name = node.node_id
    for key in hierarchy.labels():
        if key not in node.labels:
            ways = f"--label {key}=..., {LABELS_VARIABLE}={key}=... or a file named by {LABELS_FILE_VARIABLE}"
            yield Problem(
                f"level {key} of --hierarchy {hierarchy} needs a label {key}, and node {name} has none; "
                f"its labels: {found or 'none'}",
                f"give it one with {ways}, or leave the level {key} out",
            )


def _has_run_id(flags: Namespace) -> bool:
    return bool(flags.rdzv_id) and flags.rdzv_id != "none"


def _store(flags: Namespace, texts: Mapping[str, str], *, nodes_max: int) -> Embedded | EtcdSettings:
    if flags.rdzv_backend == ETCD:
        return etcd_settings(flags.rdzv_endpoint, texts)
    if flags.rdzv_backend != EMBEDDED:
        raise UsageError(
            Problem(
                f"--rdzv-backend is {flags.rdzv_backend}",
                f"take {EMBEDDED}, where the first node serves the store, or {ETCD}",
            )
        )
    if flags.standalone or (not flags.rdzv_endpoint and nodes_max == 1):
        return Embedded("127.0.0.1", 0)
    first, *others = (_endpoint(text, flags.rdzv_endpoint) for text in flags.rdzv_endpoint.split(","))
    return Embedded(*first, tuple(others))


def _endpoint(text: str, flag: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        host, port = port, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            Problem(
                f"--rdzv-endpoint is {flag!r}",
                "give host:port of the first node, the same on every node, or --standalone for one node alone",
            )
        )
    return host.strip("[]"), int(port)


def _job(flags: Namespace, *, nodes_min: int, nodes_max: int) -> Job:
    problems: list[Problem] = []
    on_misfit = next((each for each in ON_MISFIT if each == flags.on_misfit), None)
    if on_misfit is None:
        problems.append(Problem(f"--on-misfit is {flags.on_misfit}", f"take {' or '.join(ON_MISFIT)}"))
    mode = next((each for each in Mode if each == flags.membership), None)
    if mode is None:
        problems.append(Problem(f"--membership is {flags.membership}", f"take {' or '.join(Mode)}"))
    if mode is Mode.RESTART and flags.nnodes_file:
        hint = "give --nnodes instead; with restart it cannot change while the job runs"
        problems.append(Problem("--nnodes-file cannot be used with --membership restart", hint))
    warmup_steps = gather(lambda: read_steps(str(flags.warmup_steps), flag="--warmup-steps"), problems)
    hierarchy = gather(lambda: Hierarchy.parse(flags.hierarchy), problems)
    raise_if_any(UsageError, problems)
    assert on_misfit is not None
    assert mode is not None
    assert warmup_steps is not None
    assert hierarchy is not None
    return Job(nodes_min, nodes_max, hierarchy, mode, warmup_steps, on_misfit)


def _address(store: Embedded | EtcdSettings) -> str:
    if isinstance(store, EtcdSettings):
        return address_towards(store.endpoints[0])
    return address_towards(f"{store.host}:{store.port or DEFAULT_PORT}")
