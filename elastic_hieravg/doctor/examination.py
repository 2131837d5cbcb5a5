"""One examination: what a node would be told, the machine it would run on, and all that was found.

It starts nothing that stays and changes nothing but one key in etcd, which goes with its lease.
"""

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from elastic_hieravg.agent.settings import ETCD, Embedded, RunSettings, read_run_settings
from elastic_hieravg.config import (
    POD_VARIABLE,
    MetricsPlace,
    read_conf,
    read_metrics_place,
    read_nnodes,
    read_node_labels,
    read_params,
)
from elastic_hieravg.doctor import children, etcd, link, network, pods, ports, resources, software, timeouts
from elastic_hieravg.doctor.children import Lookup, Question
from elastic_hieravg.doctor.findings import Finding, Section, absent, ok, told
from elastic_hieravg.doctor.machine import Machine, read_machine
from elastic_hieravg.errors import HierAvgError, InputError, Problem, UsageError
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.records import Mode

DIGITS_MAX = 6
PROBE_S = 90.0
LOOKUP_S = 10.0
PROBE = "elastic_hieravg.doctor.software_probe"
# Settings that cannot be used have no address; agents would not get as far.
PLACEHOLDER = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Probes:
    """How the outside is asked; tests ask something else."""

    software: Callable[[], software.Software]
    machine: Callable[[], Machine]
    look_up: Callable[[Collection[Question]], Mapping[Question, Lookup]]


def real_probes() -> Probes:
    return Probes(
        software=lambda: software.read_software(children.ask_module(PROBE, timeout_s=PROBE_S)),
        machine=read_machine,
        look_up=lambda questions: children.look_up(tuple(questions), timeout_s=LOOKUP_S),
    )


@dataclass(frozen=True, slots=True)
class Patient:
    """What is known of the node before it is examined. `settings`: None if they cannot be used."""

    flags: Namespace
    environment: Mapping[str, str]
    installed: software.Software
    machine: Machine
    nodes_min: int
    nodes_max: int
    slots: int
    hosts: Mapping[str, Lookup]
    own: Lookup
    reverse: Lookup | None
    address: str
    settings: RunSettings | None
    wrong: tuple[Problem, ...]
    params: int | None

    @property
    def endpoints(self) -> list[Lookup]:
        return list(self.hosts.values())

    @property
    def is_in_pod(self) -> bool:
        """Where the embedded store is found by the names of pods."""
        return bool(self.environment.get(POD_VARIABLE)) and not self.is_etcd

    @property
    def is_etcd(self) -> bool:
        return bool(self.flags.rdzv_backend == ETCD)


def examine(
    flags: Namespace,
    *,
    environment: Mapping[str, str],
    known_flags: Collection[str],
    probes: Probes,
) -> list[Section]:
    """`known_flags`: the names of the HIERAVG_ and PET_ variables that are read, PET_'s own beside torch's.

    `UsageError` for flags that are the doctor's own, or that no number can be read from.
    """
    peer = None if flags.peer is None else link.read_peer(flags.peer)
    patient = _receive(flags, environment, probes)
    place = _metrics_place(flags, environment)
    sections = {
        "software": software.check_software(patient.installed, needs_etcd=patient.is_etcd),
        "machine": _machine(patient),
        "names": _names(patient),
        "ports": _ports(patient, place),
        "settings": _settings(patient, place, known_flags),
        "store": _store(patient),
        "pod": _pod(patient, place),
        "peer": link.check_peer(peer, params=patient.params) if peer else [absent("peer", "not asked")],
    }
    return [Section(name, tuple(found)) for name, found in sections.items()]


def _receive(flags: Namespace, environment: Mapping[str, str], probes: Probes) -> Patient:
    params = read_params(flags.params) if flags.params else None
    conf = read_conf(flags.rdzv_conf)
    nodes_min, nodes_max = read_nnodes(flags.nnodes)
    # What cannot be read is told before anything slow is done.
    read_slots(flags.nproc_per_node, installed=software.Software(), cores=1.0)
    machine, installed = probes.machine(), probes.software()
    slots = read_slots(flags.nproc_per_node, installed=installed, cores=machine.cores)
    names = [host for host, _ in endpoints_of(flags.rdzv_endpoint, is_etcd=flags.rdzv_backend == ETCD)]
    own, endpoints = Question(machine.host_name), {name: Question(name) for name in names}
    found = probes.look_up([own, *endpoints.values()])
    hosts = {name: found[question] for name, question in endpoints.items()}
    # A name that has no address, or takes for ever, is told as such; the agent would fail there.
    first = next(iter(hosts.values()), None)
    has_way = first is None or (first.found and first.seconds < LOOKUP_S)
    given = Namespace(**vars(flags))
    given.local_addr = flags.local_addr or (None if has_way else PLACEHOLDER)
    given.rdzv_id = flags.rdzv_id or "doctor"
    settings, wrong = _read(given, nodes_min=nodes_min, nodes_max=nodes_max, slots=slots, conf=conf)
    address = settings.candidate.address if settings and (has_way or flags.local_addr) else ""
    back = Question(address, is_reverse=True)
    return Patient(
        flags=flags,
        environment=environment,
        installed=installed,
        machine=machine,
        nodes_min=settings.policy.job.nodes_min if settings else nodes_min,
        nodes_max=settings.policy.job.nodes_max if settings else nodes_max,
        slots=slots,
        hosts=hosts,
        own=found[own],
        reverse=probes.look_up([back])[back] if address else None,
        address=address,
        settings=settings,
        wrong=wrong,
        params=params,
    )


def _read(
    flags: Namespace, *, nodes_min: int, nodes_max: int, slots: int, conf: Mapping[str, str]
) -> tuple[RunSettings | None, tuple[Problem, ...]]:
    """The settings as the agent reads them, or everything that is wrong with them."""
    try:
        return read_run_settings(flags, nodes_min=nodes_min, nodes_max=nodes_max, slots=slots, conf=conf), ()
    except InputError as exc:
        return None, exc.problems


def read_slots(text: str, *, installed: software.Software, cores: float) -> int:
    """Read --nproc-per-node: a number, or what torch makes one of.

    >>> read_slots("auto", installed=software.Software(), cores=2.0)
    2
    """
    if text in ("auto", "gpu", "cpu", "xpu"):
        return (text != "cpu" and installed.num_accelerators) or max(1, int(cores))
    if not text.isascii() or not text.isdecimal() or len(text) > DIGITS_MAX or not int(text):
        raise UsageError(
            Problem(f"--nproc-per-node is {text!r}", "give a number of workers, 1 or more, or auto, gpu or cpu")
        )
    return int(text)


def endpoints_of(text: str, *, is_etcd: bool) -> list[tuple[str, int]]:
    """Hosts and ports, as far as they can be read; what cannot be is told with the settings.

    >>> endpoints_of("h1:29400,[fd00::1]", is_etcd=False)
    [('h1', 29400), ('fd00::1', 29400)]
    """
    found = []
    for part in (each.strip() for each in text.split(",")):
        host, colon, port = part.rpartition(":")
        if not colon or part.endswith("]"):
            host, port = part, "2379" if is_etcd else "29400"
        if host.strip("[]") and port.isascii() and port.isdecimal() and len(port) < 6:
            found.append((host.strip("[]"), int(port)))
    return found


def _machine(patient: Patient) -> Iterator[Finding]:
    yield from resources.check_resources(
        patient.machine,
        slots=patient.slots,
        num_ranks=patient.slots * patient.nodes_max,
        params=patient.params,
        is_restarting=patient.flags.membership == Mode.RESTART,
        has_accelerator=bool(patient.installed.accelerator),
        threads=patient.environment.get("OMP_NUM_THREADS", ""),
    )


def _names(patient: Patient) -> Iterator[Finding]:
    yield from network.check_names(
        patient.machine,
        own=patient.own,
        reverse=patient.reverse,
        # In a pod a name without an address is told there, with what it needs there.
        endpoints=[each for each in patient.endpoints if each.found or not patient.is_in_pod],
        address=patient.address,
        nodes_max=patient.nodes_max,
        gloo_interface=patient.environment.get("GLOO_SOCKET_IFNAME", ""),
    )


def _metrics_place(flags: Namespace, environment: Mapping[str, str]) -> MetricsPlace | None:
    try:
        return read_metrics_place(flags.metrics_port, flags.metrics_host, environment=environment)
    except InputError:
        # Told with the settings.
        return None


def _ports(patient: Patient, place: MetricsPlace | None) -> Iterator[Finding]:
    yield ports.check_metrics_port(place)
    yield ports.check_listening(patient.address)
    wanted = {} if place is None or place.port == 0 else {"metrics": place.port}
    if not patient.is_etcd:
        for host, port in endpoints_of(patient.flags.rdzv_endpoint, is_etcd=False):
            wanted[f"endpoint {host}"] = port
            lookup = patient.hosts[host]
            if lookup.found:
                is_here = bool({*lookup.found} & patient.machine.addresses) or network.is_loopback(
                    lookup.found[0]
                )
                yield ports.check_endpoint(host, port, is_here=is_here)
    yield network.check_ephemeral_ports(patient.machine, ports=wanted)


def _settings(patient: Patient, place: MetricsPlace | None, known_flags: Collection[str]) -> Iterator[Finding]:
    yield from told("flags", patient.wrong)
    known = {*known_flags, *(f"PET_{each.upper()}" for each in patient.installed.flags)}
    # Without torch nobody knows its flags, and nothing is said about them.
    mine = {
        name: value
        for name, value in patient.environment.items()
        if patient.installed.flags or not name.startswith("PET_")
    }
    yield from timeouts.check_variables(mine, known=known)
    settings = patient.settings
    if settings is None:
        return
    # That this node has its labels was looked at with the flags.
    yield ok("hierarchy", f"{settings.policy.job.hierarchy}")
    is_embedded = isinstance(settings.store, Embedded)
    yield timeouts.check_bounds(
        nodes_min=patient.nodes_min,
        nodes_max=patient.nodes_max,
        num_endpoints=len(patient.hosts) if is_embedded else None,
    )
    agent = ports.ask_agent(place) if place is not None and place.port else None
    step_s = patient.flags.step_s or (agent.step_s if agent else None)
    yield from timeouts.check_timeouts(
        lease_ttl_s=settings.lease_ttl_s,
        grace_s=settings.grace_s,
        hang_timeout_s=settings.hang_timeout_s,
        join_timeout_s=settings.policy.pause_s,
        step_s=step_s,
    )


def _store(patient: Patient) -> Iterator[Finding]:
    settings = patient.settings
    if not patient.is_etcd:
        yield absent("etcd", "not used")
    elif settings is None:
        yield absent("etcd", "not asked with such settings")
    else:
        assert isinstance(settings.store, EtcdSettings)
        try:
            yield from etcd.check_etcd(settings.store, lease_ttl_s=settings.lease_ttl_s)
        except HierAvgError as exc:
            yield from told("etcd", exc.problems)


def _pod(patient: Patient, place: MetricsPlace | None) -> Iterator[Finding]:
    try:
        labels = read_node_labels(patient.flags.label, environment=patient.environment)
    except InputError:
        # Told with the settings.
        labels = {}
    yield from pods.check_pod(
        patient.machine,
        environment=patient.environment,
        endpoints=patient.endpoints,
        address=patient.address,
        labels=labels,
        grace_s=patient.settings.grace_s if patient.settings else 0.0,
        metrics=place,
        is_reached=_is_reached(place, patient.address),
        is_etcd=patient.is_etcd,
    )


def _is_reached(place: MetricsPlace | None, address: str) -> bool | None:
    """Whether an agent that runs here answers at the address that others have; None if none runs."""
    if place is None or not place.port or not address or ports.ask_agent(place) is None:
        return None
    return ports.ask_agent(MetricsPlace(address, place.port)) is not None
