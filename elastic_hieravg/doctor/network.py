"""Whether names lead to the right interface, and where others would look for this node. Pure.

A node whose address is that of the wrong interface works, and is slow; one with a loopback address is found
by nobody. Both are seen here before the job is.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from elastic_hieravg.doctor.children import Lookup
from elastic_hieravg.doctor.findings import Finding, absent, note, ok, problem, warning
from elastic_hieravg.doctor.machine import Interface, Machine

SLOW_S = 1.0
# An interface that is so much faster is worth a word.
FASTER = 2.0
EPHEMERAL_MIN = 4096


def is_loopback(address: str) -> bool:
    """Whether an address leads nowhere but to this machine.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("h1")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_names(
    machine: Machine,
    *,
    own: Lookup,
    reverse: Lookup | None,
    endpoints: Sequence[Lookup],
    address: str,
    nodes_max: int,
    gloo_interface: str,
) -> Iterator[Finding]:
    """`own`: this host's name. `reverse`: the name of `address`, which others are told; may be empty."""
    yield _own_name(machine, own, nodes_max=nodes_max, gloo_interface=gloo_interface)
    yield _address(machine, address, nodes_max=nodes_max)
    yield _interface(machine, address)
    yield _gloo_interface(machine, gloo_interface, address=address)
    yield absent("reverse lookup", "no address") if reverse is None else _reverse(reverse)
    for each in endpoints:
        yield _endpoint(each)


def _own_name(machine: Machine, own: Lookup, *, nodes_max: int, gloo_interface: str) -> Finding:
    check = "own name"
    advice = "set GLOO_SOCKET_IFNAME for process groups that your script makes, or correct /etc/hosts"
    # Our groups listen at the address that others are told; torch's own ask for this name.
    is_needed = nodes_max > 1 and not gloo_interface
    judge = warning if is_needed else note
    if not own.found:
        return judge(check, f"{own.name} has no address: {own.why or 'unknown'}", advice)
    found = f"{own.name} is {', '.join(own.found)}"
    if own.seconds > SLOW_S:
        return warning(check, f"{found}, after {own.seconds:.1f} s", f"write {own.name} into /etc/hosts")
    if all(is_loopback(each) for each in own.found):
        return judge(check, f"{found}: others that are told this name do not find it", advice)
    strange = [each for each in own.found if not is_loopback(each) and each not in machine.addresses]
    if strange:
        return judge(check, f"{found}, and {', '.join(strange)} is none of this machine's addresses", advice)
    return ok(check, found)


def _address(machine: Machine, address: str, *, nodes_max: int) -> Finding:
    check = "address for others"
    if not address:
        return absent(check, "not known")
    if is_loopback(address):
        if nodes_max == 1:
            return ok(check, f"{address}, for a job of one node")
        advice = "give --local-addr, or another endpoint than the loopback, unless all nodes are here"
        return warning(check, f"{address}: only this machine finds it", advice)
    if machine.interfaces and machine.interface_of(address) is None:
        advice = "give --local-addr one of this machine's addresses: agents listen there"
        return problem(check, f"{address} is on no interface of this machine", advice)
    return ok(check, address)


def _interface(machine: Machine, address: str) -> Finding:
    check = "interface"
    chosen = machine.interface_of(address)
    if chosen is None or is_loopback(address):
        return absent(check, "none chosen")
    others = [
        each
        for each in machine.interfaces
        if each is not chosen and not all(map(is_loopback, each.addresses)) and each.speed_mbits is not None
    ]
    fastest = max(others, key=lambda each: each.speed_mbits or 0, default=None)
    found = f"{chosen.name}{_speed_text(chosen)}"
    if fastest is not None and (fastest.speed_mbits or 0) >= FASTER * (chosen.speed_mbits or 0) > 0:
        return warning(
            check,
            f"{found}, while {fastest.name} has{_speed_text(fastest)}",
            f"if the other nodes are on that network, give --local-addr {fastest.addresses[0]}",
        )
    return ok(check, found)


def _speed_text(interface: Interface) -> str:
    return "" if interface.speed_mbits is None else f" {interface.speed_mbits} Mbit/s"


def _gloo_interface(machine: Machine, name: str, *, address: str) -> Finding:
    check = "GLOO_SOCKET_IFNAME"
    if not name:
        return absent(check, "not set")
    # Several may stand there, with commas.
    chosen = [each for each in machine.interfaces if each.name in name.split(",")]
    known = ", ".join(each.name for each in machine.interfaces)
    if not chosen:
        return problem(check, f"{name} is no interface with an address", f"there are {known}")
    if address and not is_loopback(address) and address not in {a for each in chosen for a in each.addresses}:
        advice = "let both be the same network: set it, or --local-addr, anew"
        return warning(check, f"{name}, while others are told {address}", advice)
    return ok(check, name)


def _reverse(lookup: Lookup) -> Finding:
    found = f"{lookup.name} is {', '.join(lookup.found) or 'nameless'}, after {lookup.seconds:.2g} s"
    if lookup.seconds > SLOW_S:
        advice = (
            f"write {lookup.name} with a name into /etc/hosts: torch's stores ask for it at each connection"
        )
        return warning("reverse lookup", found, advice)
    return ok("reverse lookup", found)


def _endpoint(lookup: Lookup) -> Finding:
    check = f"name {lookup.name}"
    if not lookup.found:
        advice = "correct the name in --rdzv-endpoint, or in DNS"
        return problem(check, f"no address after {lookup.seconds:.2g} s: {lookup.why or 'unknown'}", advice)
    found = f"{', '.join(lookup.found)}, after {lookup.seconds:.2g} s"
    if lookup.seconds > SLOW_S:
        return warning(check, found, f"write {lookup.name} into /etc/hosts, or give its address")
    return ok(check, found)


def check_ephemeral_ports(machine: Machine, *, ports: Mapping[str, int]) -> Finding:
    """`ports`: what listens there, and where."""
    check = "ephemeral ports"
    if machine.ephemeral_ports is None:
        return absent(check, "not known")
    first, last = machine.ephemeral_ports
    found = f"{first} to {last}"
    if last - first + 1 < EPHEMERAL_MIN:
        advice = "widen net.ipv4.ip_local_port_range: every connection takes one"
        return warning(check, f"{found}, {last - first + 1} in all", advice)
    inside = [f"{name} ({port})" for name, port in ports.items() if first <= port <= last]
    if inside:
        advice = "add them to net.ipv4.ip_local_reserved_ports: a connection may hold one when it is wanted"
        return note(check, f"{found}, {', '.join(inside)} among them", advice)
    return ok(check, found)
