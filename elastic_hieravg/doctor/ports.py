"""Whether ports can be listened at, and who answers at others: tried with sockets, each within a bound."""

import errno
import json
import socket
import time
from dataclasses import dataclass

from elastic_hieravg.config import MetricsPlace
from elastic_hieravg.doctor.findings import Finding, absent, note, ok, problem, warning

CONNECT_S = 2.0
STATUS_BYTES_MAX = 8 * 1024 * 1024
CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class AgentSeen:
    """An agent that runs here already. `step_s`: how long its steps take, None if it does not say."""

    run_id: str
    step_s: float | None


def check_metrics_port(place: MetricsPlace | None) -> Finding:
    check = "metrics port"
    if place is None:
        return absent(check, "off")
    if place.port == 0:
        return ok(check, "a free one is taken")
    why = why_not_listening(place.host, place.port)
    if why is None:
        return ok(check, f"{place.host}:{place.port} is free")
    if why.errno != errno.EADDRINUSE:
        advice = "give another --metrics-host or --metrics-port"
        return warning(check, f"{place.host}:{place.port}: {why.strerror}", advice)
    agent = ask_agent(place)
    if agent is not None:
        found = f"an agent of the job {agent.run_id} serves {place.host}:{place.port}"
        return note(check, found, "another one here takes a free port and says which")
    advice = "give another --metrics-port; else a free one is taken, and Prometheus does not know it"
    return warning(check, f"{place.host}:{place.port} is taken", advice)


def check_listening(address: str) -> Finding:
    """Agents and workers listen at this address, at free ports, and others connect to them."""
    check = "listening"
    if not address:
        return absent(check, "no address")
    try:
        with socket.create_server((address, 0), family=_family(address)) as server:
            server.settimeout(CONNECT_S)
            where = server.getsockname()[:2]
            with socket.create_connection(where, timeout=CONNECT_S):
                server.accept()[0].close()
    except OSError as exc:
        advice = "allow this user to listen there, and let the firewall pass connections between the nodes"
        return problem(check, f"at {address}: {exc.strerror or exc}", advice)
    return ok(check, f"at {address}, and reached from here")


def check_endpoint(host: str, port: int, *, is_here: bool) -> Finding:
    """The place of the embedded store. `is_here`: this machine has the address."""
    check = f"endpoint {host}:{port}"
    began_s = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        if not is_here:
            return note(
                check, "nobody listens there yet", "its node has to be started, before or after this one"
            )
        why = why_not_listening(host, port)
        if why is None:
            return ok(check, "free, and on this machine: its agent will serve the store there")
        return problem(
            check, f"cannot be listened at: {why.strerror}", "take a port that this user may listen at"
        )
    except OSError as exc:
        advice = "does its node run, and does a firewall drop what goes there? Any node must reach this port"
        return warning(check, f"no answer: {exc.strerror or exc}", advice)
    took = f"answers after {(time.monotonic() - began_s) * 1000:.1f} ms"
    if is_here:
        return note(
            check, f"{took}, on this machine", "an agent of the job, or somebody else: then take another port"
        )
    return ok(check, took)


def why_not_listening(host: str, port: int) -> OSError | None:
    """None if it can be listened at."""
    try:
        socket.create_server((host, port), family=_family(host)).close()
    except OSError as exc:
        return exc
    return None


def ask_agent(place: MetricsPlace) -> AgentSeen | None:
    """The agent that serves its metrics there, if it is one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(place.host, place.host)  # noqa: S104 - not bound
    try:
        with socket.create_connection((host, place.port), timeout=CONNECT_S) as sock:
            _, content = ask_http(sock, "/status", host=host, timeout_s=CONNECT_S)
        document = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("run_id"), str):
        return None
    return AgentSeen(document["run_id"], _step_s(document.get("nodes")))


def ask_http(sock: socket.socket, path: str, *, host: str, timeout_s: float) -> tuple[str, bytes]:
    """The head and the content of an answer; all of it within the time, however slowly it comes."""
    deadline_s = time.monotonic() + timeout_s
    sock.settimeout(timeout_s)
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    told = bytearray()
    while len(told) < STATUS_BYTES_MAX:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        data = sock.recv(CHUNK_BYTES)
        if not data:
            break
        told += data
    head, _, content = bytes(told).partition(b"\r\n\r\n")
    return head.decode("latin-1"), content


def _step_s(nodes: object) -> float | None:
    """The slowest node's newest mean."""
    found = [
        each["step_seconds"][-1]
        for each in (nodes if isinstance(nodes, list) else [])
        if isinstance(each, dict) and isinstance(each.get("step_seconds"), list) and each["step_seconds"]
    ]
    return max((float(each) for each in found if isinstance(each, int | float)), default=None)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
