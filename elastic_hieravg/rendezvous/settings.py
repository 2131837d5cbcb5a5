"""torchrun's rendezvous flags, read into values. Everything wrong with them is told at once, at the start."""

import math
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from elastic_hieravg.config import host_name, read_node_labels, read_secret
from elastic_hieravg.errors import InputError, Problem, UsageError, raise_if_any
from elastic_hieravg.membership.decisions import Policy
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.messages import Candidate
from elastic_hieravg.membership.records import Job, Mode
from elastic_hieravg.membership.service import LEASE_TTL_S
from elastic_hieravg.plan import Hierarchy, Node

DEFAULT_PORT = 2379
# Below this a busy machine may miss its beats, and etcd makes shorter leases longer anyway.
LEASE_TTL_MIN_S = 2.0
JOIN_TIMEOUT_S = 600.0
LAST_CALL_TIMEOUT_S = 1.0
# The plug-in orders nodes; what their ranks do is the training script's affair.
HIERARCHY = Hierarchy.parse("global=1")

KEYS = (
    "cacert",
    "cert",
    "join_timeout",
    "key",
    "last_call_timeout",
    "lease_ttl_s",
    "node_id",
    "password_file",
    "user",
)
# torchrun adds this one itself, and no backend of torch's reads it either.
IGNORED = ("timeout",)
# Of torch's own backends; each would be a promise here that nothing keeps.
REPLACED = {
    "close_timeout": "leave it out: closing is one write",
    "heartbeat_timeout": "use lease_ttl_s: a node that is silent for so many seconds is lost",
    "is_host": "leave it out: etcd is the host",
    "keep_alive_interval": "use lease_ttl_s: a node that is silent for so many seconds is lost",
    "keep_alive_max_attempt": "use lease_ttl_s: a node that is silent for so many seconds is lost",
    "password": "use password_file: torchrun writes its flags to the log",
    "protocol": "give cacert for TLS",
    "read_timeout": "leave it out: every call has a deadline",
    "ssl_cert": "use cert",
    "ssl_cert_key": "use key",
    "ca_cert": "use cacert",
    "store_type": "leave it out: every round has a store of its own",
}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    run_id: str
    etcd: EtcdSettings
    policy: Policy
    lease_ttl_s: float
    candidate: Candidate


def read_settings(
    *,
    run_id: str,
    endpoint: str,
    nodes_min: int,
    nodes_max: int,
    local_address: str | None,
    conf: Mapping[str, object],
) -> Settings:
    """What torchrun was told; a `UsageError` with everything that is wrong."""
    texts = {key: str(value) for key, value in conf.items() if key not in IGNORED}
    problems = [*key_problems(texts)]
    if not run_id or run_id == "none":
        problems.append(Problem(f"the run id is {run_id!r}", "give every job its own: --rdzv-id=job7"))
    numbers = {
        "lease_ttl_s": seconds_of(texts, "lease_ttl_s", LEASE_TTL_S, at_least=LEASE_TTL_MIN_S),
        "join_timeout": seconds_of(texts, "join_timeout", JOIN_TIMEOUT_S, at_least=1.0),
        "last_call_timeout": seconds_of(texts, "last_call_timeout", LAST_CALL_TIMEOUT_S, at_least=0.0),
    }
    problems += [number for number in numbers.values() if isinstance(number, Problem)]
    etcd = gather(lambda: etcd_settings(endpoint, texts), problems)
    node_id = texts.get("node_id", host_name())
    node = gather(lambda: Node(node_id, 1, read_node_labels()), problems)
    job = gather(lambda: Job(nodes_min, nodes_max, HIERARCHY, Mode.RESTART), problems)
    raise_if_any(UsageError, problems)
    assert etcd is not None
    assert node is not None
    assert job is not None
    seconds = {name: number for name, number in numbers.items() if isinstance(number, float)}
    address = local_address or address_towards(etcd.endpoints[0])
    return Settings(
        run_id,
        etcd,
        Policy(job, join_settle_s=seconds["last_call_timeout"], pause_s=seconds["join_timeout"]),
        seconds["lease_ttl_s"],
        Candidate(node_id, node.slots, node.labels, address, 0, may_rename="node_id" not in texts),
    )


def address_towards(endpoint: str) -> str:
    """This machine's address on the network that leads to the store: where the others are, too."""
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = found[0]
        # Nothing is sent: connecting a datagram socket only chooses the way.
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(where)
            return str(sock.getsockname()[0])
    except OSError as exc:
        raise UsageError(
            Problem(
                f"--rdzv-endpoint {endpoint} cannot be found from this machine: {exc}",
                "check its name; if only this machine does not know it, give its own address with --local-addr",
            )
        ) from exc


def etcd_settings(endpoint: str, texts: Mapping[str, str]) -> EtcdSettings:
    endpoints = [each.strip() for each in endpoint.split(",") if each.strip()]
    password_file = texts.get("password_file")
    paths = {key: Path(texts[key]) for key in ("cacert", "cert", "key") if key in texts}
    return EtcdSettings(
        tuple(f"{each}:{DEFAULT_PORT}" if _has_no_port(each) else each for each in endpoints),
        **paths,
        user=texts.get("user"),
        password=read_secret(Path(password_file)) if password_file else None,
    )


def _has_no_port(endpoint: str) -> bool:
    return ":" not in endpoint or (endpoint.startswith("[") and endpoint.endswith("]"))


def gather(make: Callable[[], T], problems: list[Problem]) -> T | None:
    """What is made, or None and one more thing that is wrong."""
    try:
        return make()
    except InputError as exc:
        problems += exc.problems
        return None


def key_problems(texts: Mapping[str, str]) -> Iterator[Problem]:
    for key in texts:
        if key in REPLACED:
            yield Problem(f"--rdzv-conf has {key}, which the backend etcd3 does not have", REPLACED[key])
        elif key not in KEYS:
            yield Problem(f"--rdzv-conf has {key}, which is unknown", f"use one of {', '.join(KEYS)}")


def seconds_of(
    texts: Mapping[str, str], key: str, default: float, *, at_least: float, shown: str = ""
) -> float | Problem:
    """`shown`: the flag that says it, if that is not --rdzv-conf."""
    text = texts.get(key)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not at_least <= number < math.inf:
        name = shown or f"{key} in --rdzv-conf"
        return Problem(f"{name} is {text!r}", f"give a number of seconds, {at_least:g} or more")
    return number
