"""What people write, turned into values: flags, files and the environment.

Every reader here either returns a value or raises a `UsageError` that says what was found; none of them
acts on what it read.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic_hieravg.errors import DocumentError, InputError, Problem, TopologyError, UsageError, raise_if_any
from elastic_hieravg.plan.document import parse_json
from elastic_hieravg.plan.fitting import ON_MISFIT, OnMisfit
from elastic_hieravg.plan.topology import Node

NODE_FORM = "NAME:SLOTS[:key=value[,key=value...]]"
NODES_FILE_FORM = '[{"node_id": "a", "slots": 4, "labels": {"zone": "z1"}}]'
NODES_FILE_BYTES_MAX = 64 * 1024 * 1024

# Where labels come from, beside flags. The file has the form of Kubernetes' downward API: key="value" lines.
LABELS_VARIABLE = "HIERAVG_LABELS"
# The flag --label in capitals: whoever goes by the rule for all flags finds it too.
LABEL_VARIABLE = "HIERAVG_LABEL"
LABELS_FILE_VARIABLE = "HIERAVG_LABELS_FILE"
LABELS_FILE_BYTES_MAX = 1024 * 1024
# What Kubernetes calls the labels that everybody has.
KUBERNETES_LABELS = {"topology.kubernetes.io/zone": "zone", "topology.kubernetes.io/region": "region"}
HOST_LABEL = "host"
# Where an agent leaves a sentence about why it ended; in pods, where Kubernetes looks for it.
TERMINATION_FILE_VARIABLE = "HIERAVG_TERMINATION_FILE"
NNODES_FILE_BYTES_MAX = 4096
# Where a worker finds its agent: the name of a socket, and a word that only this agent's workers know.
AGENT_SOCKET_VARIABLE = "HIERAVG_AGENT_SOCKET"
AGENT_TOKEN_VARIABLE = "HIERAVG_AGENT_TOKEN"  # noqa: S105 - the name of it
# The same for workers that start anew with every change, and only report what they measure.
METRICS_SOCKET_VARIABLE = "HIERAVG_METRICS_SOCKET"
METRICS_TOKEN_VARIABLE = "HIERAVG_METRICS_TOKEN"  # noqa: S105 - the name of it
# Where metrics are served; flags of `hieravg run` too.
METRICS_PORT_VARIABLE = "HIERAVG_METRICS_PORT"
METRICS_HOST_VARIABLE = "HIERAVG_METRICS_HOST"
DEFAULT_METRICS_PORT = 9400
# Kubernetes sets it in every container.
POD_VARIABLE = "KUBERNETES_SERVICE_HOST"
SECRET_BYTES_MAX = 64 * 1024
# Set by torchrun in all its workers, whatever its version and backend.
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
# What workers that torchrun starts have to know of their node and of the job; flags of `hieravg run` too.
NODE_ID_VARIABLE = "HIERAVG_NODE_ID"
HIERARCHY_VARIABLE = "HIERAVG_HIERARCHY"
WARMUP_STEPS_VARIABLE = "HIERAVG_WARMUP_STEPS"
ON_MISFIT_VARIABLE = "HIERAVG_ON_MISFIT"
OWNER_VARIABLE = "HIERAVG_SNAPSHOT_OWNER"
DEFAULT_HIERARCHY = "node=8,global=64"

_SLOTS = re.compile(r"-?[0-9]{1,9}")
_PORT = re.compile(r"[0-9]{1,5}")
_STEPS = re.compile(r"[0-9]{1,18}")
_NNODES = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")
_PARAMS = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([KMBT]?)", re.IGNORECASE)
_PARAMS_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_PARAMS_MAX = 10**15


def read_node(text: str) -> Node:
    """Read a node from a flag.

    >>> read_node("c:2:zone=z2,rack=r7").slots
    2
    """
    name, _, rest = text.partition(":")
    slots, has_labels, labels_text = rest.partition(":")
    if not name or not _SLOTS.fullmatch(slots):
        raise UsageError(Problem(f"{text!r} is not a node", f"write {NODE_FORM}, for example c:2:zone=z2"))
    return Node(name, int(slots), read_labels(labels_text, of=text) if has_labels else {})


def read_labels(text: str, *, of: str) -> dict[str, str]:
    """Read `key=value,key=value`; `of` is the whole flag, for the message."""
    labels: dict[str, str] = {}
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not equals or not key or not value:
            raise UsageError(
                Problem(f"{pair!r} in {of!r} is not a label", "write key=value, for example zone=z2")
            )
        if key in labels:
            raise UsageError(
                Problem(
                    f"{of!r} has the label {key} twice: {labels[key]} and {value}", "write every label once"
                )
            )
        labels[key] = value
    return labels


def read_nodes(texts: list[str]) -> list[Node]:
    """Read several nodes and report everything wrong with any of them together."""
    nodes: list[Node] = []
    problems: list[Problem] = []
    for text in texts:
        try:
            nodes.append(read_node(text))
        except InputError as exc:
            problems += exc.problems
    raise_if_any(UsageError, problems)
    return nodes


def read_nodes_file(path: Path) -> list[Node]:
    """Read a JSON list of nodes."""
    document = _read_nodes_document(path)
    if not isinstance(document, list):
        raise UsageError(Problem(f"{path} does not hold a list of nodes", f"write {NODES_FILE_FORM}"))
    nodes: list[Node] = []
    problems: list[Problem] = []
    for index, entry in enumerate(document):
        try:
            nodes.append(Node.read(entry, where=f"{path}, node {index + 1}"))
        except (DocumentError, TopologyError) as exc:
            problems += exc.problems
    raise_if_any(UsageError, problems)
    return nodes


def _read_nodes_document(path: Path) -> object:
    text = _read_bounded(path, bytes_max=NODES_FILE_BYTES_MAX, kind="JSON file of nodes in --nodes-file")
    try:
        return parse_json(text, where=str(path))
    except DocumentError as exc:
        raise UsageError(*exc.problems) from exc


def read_node_labels(
    flags: Sequence[str] = (), *, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The labels of this node: flags before `HIERAVG_LABELS`, before the file, before the host's name.

    In the file, Kubernetes' own zone and region count where the file has none of its own.
    """
    variables = os.environ if environment is None else environment
    found = {HOST_LABEL: host_name()}
    path = variables.get(LABELS_FILE_VARIABLE)
    if path:
        found |= _read_labels_file(Path(path))
    for name in (LABEL_VARIABLE, LABELS_VARIABLE):
        if variables.get(name):
            found |= read_labels(variables[name], of=f"{name}={variables[name]}")
    given: dict[str, str] = {}
    for flag in flags:
        for key, value in read_labels(flag, of=flag).items():
            if given.setdefault(key, value) != value:
                message = f"--label gives {key} twice: {given[key]} and {value}"
                raise UsageError(Problem(message, "give every label once"))
    return found | given


def host_name() -> str:
    """The name of this machine, as it names itself."""
    return os.uname().nodename


def _read_labels_file(path: Path) -> dict[str, str]:
    content = _read_bounded(
        path, bytes_max=LABELS_FILE_BYTES_MAX, kind=f"file of labels in {LABELS_FILE_VARIABLE}"
    )
    found: dict[str, str] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        key, equals, quoted = line.strip().partition("=")
        value = _unquoted(quoted)
        if not equals or not key or value is None:
            message = f"line {number} of {path} is {line!r}, not a label"
            raise UsageError(Problem(message, 'write key="value", as Kubernetes\' downward API does'))
        # Kubernetes allows labels without a value; they say nothing here.
        if value:
            found[key] = value
    for theirs, ours in KUBERNETES_LABELS.items():
        if theirs in found:
            found.setdefault(ours, found[theirs])
    return found


def _unquoted(text: str) -> str | None:
    """The value behind the equals sign, in quotes or plain; None if its quotes are not whole."""
    if not text.startswith('"'):
        return text
    is_whole = len(text) >= 2 and text.endswith('"') and "\\" not in text
    return text[1:-1] if is_whole and '"' not in text[1:-1] else None


def _read_bounded(path: Path, *, bytes_max: int, kind: str) -> str:
    """A file's text; `kind` is what somebody should have given, for the message."""
    try:
        # Opened, not stat'ed first: a pipe has no size, and a file may change in between.
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
        text = content.decode()
    except OSError as exc:
        raise UsageError(
            Problem(f"{path} cannot be read: {exc.strerror}", f"give the path of a {kind}")
        ) from exc
    except UnicodeDecodeError as exc:
        raise UsageError(Problem(f"{path} is not text: {exc}", f"give the path of a UTF-8 {kind}")) from exc
    if len(content) > bytes_max:
        raise UsageError(Problem(f"{path} is larger than {bytes_max} bytes", "check that it is the right file"))
    return text


def read_secret(path: Path) -> str:
    """A password out of a file, without the newline that editors leave at the end."""
    kind = "file with a password as password_file in --rdzv-conf"
    secret = _read_bounded(path, bytes_max=SECRET_BYTES_MAX, kind=kind).rstrip("\r\n")
    if not secret:
        raise UsageError(Problem(f"{path}, the password_file, is empty", "write the password into it"))
    return secret


def read_nnodes_file(path: Path) -> tuple[int, int]:
    """The least and the most nodes of a job, written as `--nnodes` is: MIN:MAX, or one number for both."""
    kind = "file with MIN:MAX in --nnodes-file"
    text = _read_bounded(path, bytes_max=NNODES_FILE_BYTES_MAX, kind=kind).strip()
    return _nnodes(text, told=f"{path}, given as --nnodes-file, has")


def read_nnodes(text: str) -> tuple[int, int]:
    """Read --nnodes: MIN:MAX, or one number for both.

    >>> read_nnodes("1:4")
    (1, 4)
    """
    return _nnodes(text, told="--nnodes is")


def _nnodes(text: str, *, told: str) -> tuple[int, int]:
    match = _NNODES.fullmatch(text)
    if match is None:
        hint = "write MIN:MAX, the smallest and the largest number of nodes, for example 2:4"
        raise UsageError(Problem(f"{told} {text[:40]!r}", hint))
    return int(match[1]), int(match[2] or match[1])


def read_conf(text: str) -> dict[str, str]:
    """Read --rdzv-conf, key=value,key=value, as torchrun does.

    >>> read_conf("join_timeout=600, cacert=ca.pem")
    {'join_timeout': '600', 'cacert': 'ca.pem'}
    """
    found = {}
    for pair in text.split(",") if text.strip() else []:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not key or not equals:
            hint = "write key=value, with commas between several, for example join_timeout=600"
            raise UsageError(Problem(f"--rdzv-conf has {pair!r}", hint))
        found[key] = value
    return found


def termination_file() -> str:
    """Where to say why this process ended, or nothing."""
    return os.environ.get(TERMINATION_FILE_VARIABLE, "")


def read_steps(text: str, *, flag: str) -> int:
    """Read a number of steps, 0 or more."""
    if not _STEPS.fullmatch(text):
        raise UsageError(Problem(f"{flag} is {text!r}", "give a whole number of steps, 0 or more"))
    return int(text)


def read_modules(text: str, *, flag: str) -> tuple[str, ...]:
    """Read names of modules, with commas between them.

    >>> read_modules("torch,my.module", flag="--warm")
    ('torch', 'my.module')
    """
    names = tuple(name.strip() for name in text.split(","))
    wrong = [name for name in names if not all(part.isidentifier() for part in name.split("."))]
    if wrong:
        raise UsageError(
            Problem(
                f"{flag} is {text!r}, and {wrong[0]!r} is not the name of a module",
                "write torch, or torch,my.module",
            )
        )
    return names


def read_params(text: str) -> int:
    """Read a number of parameters.

    >>> read_params("125M")
    125000000
    """
    match = _PARAMS.fullmatch(text)
    number = round(float(match[1]) * _PARAMS_UNITS[match[2].upper()]) if match else 0
    if not 1 <= number <= _PARAMS_MAX:
        raise UsageError(
            Problem(
                f"--params is {text!r}",
                "write how many parameters, 1 to 1000T, with K, M, B or T after it, for example 125M or 1.3B",
            )
        )
    return number


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """Where metrics are served. `port`: 0 for a free one."""

    host: str
    port: int


def read_metrics_place(
    port: str | None = None, host: str | None = None, *, environment: Mapping[str, str] | None = None
) -> MetricsPlace | None:
    """What the flags say, before the environment; None if no metrics are served.

    In a pod everybody is meant to reach them, elsewhere only this machine.

    >>> read_metrics_place("auto", environment={})
    MetricsPlace(host='127.0.0.1', port=0)
    """
    variables = os.environ if environment is None else environment
    wanted = port or variables.get(METRICS_PORT_VARIABLE) or str(DEFAULT_METRICS_PORT)
    where = host or variables.get(METRICS_HOST_VARIABLE)
    if not where:
        where = "0.0.0.0" if variables.get(POD_VARIABLE) else "127.0.0.1"  # noqa: S104 - a pod's own network
    if wanted == "off":
        return None
    if wanted == "auto":
        return MetricsPlace(where, 0)
    if not _PORT.fullmatch(wanted) or not 0 < int(wanted) < 1 << 16:
        raise UsageError(
            Problem(f"--metrics-port is {wanted!r}", "give a port, auto for a free one, or off for none")
        )
    return MetricsPlace(where, int(wanted))


@dataclass(frozen=True, slots=True)
class Asked:
    """What a launcher asks of every worker alike; `hierarchy` as people write it."""

    hierarchy: str
    warmup_steps: int
    on_misfit: OnMisfit


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker process is in its job: how it reaches its agent, None if it has none.

    `hierarchy`: the job's, as people write it; empty if there is no agent that has one. `owner`: how the agent
    calls itself, which removes what its workers leave.
    """

    local_rank: int = 0
    socket: str | None = None
    token: str = ""
    hierarchy: str = ""
    run_id: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class RestartPlace:
    """Where a worker process is in one attempt of torchrun's, and what its launcher asks for.

    `owner`: how the agent calls itself, if it is one that removes what its workers leave; else empty.
    `socket` and `token`: where the agent takes what this worker measures, if it does; else empty.
    """

    run_id: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    restart_count: int
    master_address: str
    node_name: str
    labels: Mapping[str, str]
    asked: Asked
    owner: str = ""
    socket: str = ""
    token: str = ""


def read_worker_place(environment: Mapping[str, str] | None = None) -> WorkerPlace | RestartPlace:
    """What an agent left in a worker's environment: `hieravg run`'s, or torchrun's; or nobody did."""
    variables = os.environ if environment is None else environment
    socket = variables.get(AGENT_SOCKET_VARIABLE)
    if socket is not None:
        return WorkerPlace(
            int(variables["LOCAL_RANK"]),
            socket,
            variables[AGENT_TOKEN_VARIABLE],
            hierarchy=variables.get(HIERARCHY_VARIABLE, ""),
            run_id=variables.get(TORCHRUN_VARIABLE, ""),
            owner=variables.get(OWNER_VARIABLE, ""),
        )
    if TORCHRUN_VARIABLE not in variables:
        return WorkerPlace()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    wrong = [name for name in names if not _STEPS.fullmatch(variables.get(name, ""))]
    if wrong or not variables.get("MASTER_ADDR"):
        found = {name: variables.get(name) for name in (*wrong, "MASTER_ADDR")}
        raise UsageError(
            Problem(
                f"{TORCHRUN_VARIABLE} is set, as by torchrun, but variables that come with it are not: {found}",
                "start the workers with torchrun or `hieravg run`, or unset that variable",
            )
        )
    rank, world_size, local_rank, local_world_size, group_rank, restart_count = (
        int(variables[name]) for name in names
    )
    return RestartPlace(
        run_id=variables[TORCHRUN_VARIABLE],
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        group_rank=group_rank,
        restart_count=restart_count,
        master_address=variables["MASTER_ADDR"],
        node_name=variables.get(NODE_ID_VARIABLE) or host_name(),
        labels=read_node_labels(environment=variables),
        asked=Asked(
            variables.get(HIERARCHY_VARIABLE, DEFAULT_HIERARCHY),
            read_steps(variables.get(WARMUP_STEPS_VARIABLE, "0"), flag=WARMUP_STEPS_VARIABLE),
            _read_on_misfit(variables.get(ON_MISFIT_VARIABLE, ON_MISFIT[0])),
        ),
        owner=variables.get(OWNER_VARIABLE, ""),
        socket=variables.get(METRICS_SOCKET_VARIABLE, ""),
        token=variables.get(METRICS_TOKEN_VARIABLE, ""),
    )


def _read_on_misfit(text: str) -> OnMisfit:
    on_misfit = next((each for each in ON_MISFIT if each == text), None)
    if on_misfit is None:
        raise UsageError(Problem(f"{ON_MISFIT_VARIABLE} is {text!r}", f"take {' or '.join(ON_MISFIT)}"))
    return on_misfit


def flag_default(name: str, *, prefix: str = "HIERAVG") -> str | None:
    """What the environment says for a flag, if anything: the flag itself beats it."""
    return os.environ.get(f"{prefix}_{name.upper()}")


def environment() -> dict[str, str]:
    """All of it, for somebody who looks for what is wrong with it."""
    return dict(os.environ)


def is_continuous_integration() -> bool:
    """Whether nobody watches, though the output may look like a terminal."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def export(variables: Mapping[str, str]) -> None:
    """Set variables of this process's environment, for the processes it starts."""
    os.environ.update(variables)


def replace_environment(variables: Mapping[str, str]) -> None:
    """Have these variables, and no others."""
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def environment_with(name: str, value: str) -> Iterator[None]:
    """Have a variable in the environment for the time of a block, and what was there before after it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
