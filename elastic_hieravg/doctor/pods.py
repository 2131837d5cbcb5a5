"""What people get wrong in pods: services that are not headless, signals, grace, labels, volumes. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from elastic_hieravg.config import (
    LABELS_FILE_VARIABLE,
    POD_VARIABLE,
    TERMINATION_FILE_VARIABLE,
    MetricsPlace,
)
from elastic_hieravg.doctor.children import Lookup
from elastic_hieravg.doctor.findings import Finding, absent, note, ok, problem, warning
from elastic_hieravg.doctor.machine import Machine
from elastic_hieravg.doctor.network import is_loopback
from elastic_hieravg.doctor.resources import RUNTIME_SHARED_BYTES, bytes_text

# If nobody says otherwise.
TERMINATION_GRACE_S = 30.0
# Between the agent's last word and the end of its container.
MARGIN_S = 3.0
INITS = ("tini", "dumb-init", "catatonit", "docker-init")
SHELLS = ("sh", "bash", "dash", "ash", "busybox")
ZONE = "zone"


def check_pod(
    machine: Machine,
    *,
    environment: Mapping[str, str],
    endpoints: Sequence[Lookup],
    address: str,
    labels: Mapping[str, str],
    grace_s: float,
    metrics: MetricsPlace | None,
    is_reached: bool | None,
    is_etcd: bool,
) -> Iterator[Finding]:
    """`endpoints`: the hosts of the rendezvous. `labels`: of this node, as the agent has them.

    `is_reached`: an agent that runs here answers at the pod's address; None if none runs.
    """
    if not environment.get(POD_VARIABLE):
        yield absent("pod", "none")
        return
    clusters = {value for name, value in environment.items() if name.endswith("_SERVICE_HOST")}
    for each in endpoints if not is_etcd else ():
        yield _service(each, host_name=machine.host_name, address=address, clusters=clusters)
    yield _first_process(machine.root_process)
    yield _grace(grace_s)
    yield _labels(labels, environment)
    yield _metrics(metrics, is_reached=is_reached)
    yield _folders(machine)
    yield _shared_memory(machine)
    if not environment.get(TERMINATION_FILE_VARIABLE):
        advice = (
            f"set {TERMINATION_FILE_VARIABLE}=/dev/termination-log: `kubectl describe` then shows why it ended"
        )
        yield note("termination message", "not asked for", advice)


def _service(lookup: Lookup, *, host_name: str, address: str, clusters: set[str]) -> Finding:
    check = f"service {lookup.name}"
    if not lookup.found:
        advice = (
            "give the pods a headless Service (clusterIP: None, publishNotReadyAddresses: true) and its name "
            "as subdomain; without publishNotReadyAddresses they find each other only once they are ready"
        )
        return problem(check, f"no address: {lookup.why or 'unknown'}", advice)
    found = ", ".join(lookup.found)
    if set(lookup.found) & clusters:
        advice = "make the Service headless, clusterIP: None: every call may go to another pod"
        return problem(check, f"{found} is the address of a Service, not of a pod", advice)
    is_own = lookup.name.partition(".")[0] == host_name
    if is_own and address and not is_loopback(address) and address not in lookup.found:
        advice = "give PET_LOCAL_ADDR the pod's address (status.podIP), and make the Service headless"
        return problem(check, f"{found}, while this pod is {address}", advice)
    return ok(check, found)


def _first_process(command: Sequence[str]) -> Finding:
    check = "process 1"
    if not command:
        return absent(check, "not visible")
    names = [PurePath(part).name for part in command]
    found = " ".join(names[:4])
    if "hieravg" in names[:2] or names[0] in INITS:
        return ok(check, found)
    if names[0] in SHELLS:
        advice = (
            "start with command: [hieravg, run], or `exec hieravg run` in the script: SIGTERM ends at the shell"
        )
        return warning(check, f"{found}: a shell passes no signals on", advice)
    return note(check, found, "it has to pass SIGTERM on to hieravg, and collect processes that end")


def _grace(grace_s: float) -> Finding:
    found = f"--grace-s is {grace_s:g}; Kubernetes kills after {TERMINATION_GRACE_S:g} s unless told otherwise"
    if grace_s + MARGIN_S > TERMINATION_GRACE_S:
        advice = f"let terminationGracePeriodSeconds be {grace_s + 15:.0f} or more"
        return warning("grace", found, advice)
    return ok("grace", found)


def _labels(labels: Mapping[str, str], environment: Mapping[str, str]) -> Finding:
    told = ", ".join(f"{key}={value}" for key, value in sorted(labels.items()) if "/" not in key)
    if ZONE in labels:
        return ok("labels", told)
    advice = "the component node-topology writes the node's zone into the pod's labels"
    if not environment.get(LABELS_FILE_VARIABLE):
        advice = f"set {LABELS_FILE_VARIABLE} to a downward API volume with metadata.labels; {advice}"
    return note("labels", f"no zone among {told or 'none'}", advice)


def _metrics(place: MetricsPlace | None, *, is_reached: bool | None) -> Finding:
    check = "metrics in the pod"
    if place is None:
        return note(check, "off: probes of /healthz and /readyz fail", "give --metrics-port 9400")
    if is_loopback(place.host) or place.host == "localhost":
        advice = "set HIERAVG_METRICS_HOST=0.0.0.0: Prometheus and the kubelet's probes come from outside"
        return warning(check, f"served at {place.host}, which only this pod reaches", advice)
    if place.port == 0:
        return warning(check, "at a free port that nobody knows", "give --metrics-port 9400, as the probes do")
    if is_reached is False:
        advice = "serve them at 0.0.0.0, and let network policies pass that port"
        return warning(
            check, f"an agent runs, and does not answer at the pod's address, port {place.port}", advice
        )
    return ok(check, f"{place.host}:{place.port}{', and an agent answers there' if is_reached else ''}")


def _folders(machine: Machine) -> Finding:
    if machine.unwritable:
        advice = "mount an emptyDir there: logs, sockets and snapshots are written"
        return problem("folders", f"not writable: {'; '.join(machine.unwritable)}", advice)
    if machine.is_root_writable:
        return note("folders", "the root takes files too", "readOnlyRootFilesystem: true is enough")
    return ok("folders", "only those that have to be are writable")


def _shared_memory(machine: Machine) -> Finding:
    check = "shared memory"
    mount = machine.shared_memory
    advice = "mount an emptyDir with medium: Memory and a sizeLimit at /dev/shm; it counts as the pod's memory"
    if mount is None or mount.kind != "tmpfs":
        return warning(check, "not in memory", advice)
    if mount.size_bytes <= RUNTIME_SHARED_BYTES:
        return warning(check, f"{bytes_text(mount.size_bytes)}: the runtime's, not a volume", advice)
    return ok(check, f"tmpfs of {bytes_text(mount.size_bytes)}")
