"""Where the embedded store's host is, and what agents say to each other about it, as values and as messages."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic_hieravg.membership.frames import FrameError
from elastic_hieravg.membership.succession import Brought, Registration
from elastic_hieravg.membership.wire import read_snapshot, snapshot_message

Where = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Host:
    """A server that serves, or served, a term. `incarnation`: what its agent is in the job, if anything yet."""

    address: str
    port: int
    server_id: str
    term: int
    incarnation: str = ""

    @property
    def where(self) -> Where:
        return self.address, self.port


def host_message(host: Host | None) -> dict[str, Any] | None:
    return None if host is None else asdict(host)


def read_host(value: Any) -> Host | None:
    if value is None:
        return None
    return Host(
        str(value["address"]),
        int(value["port"]),
        str(value["server_id"]),
        int(value["term"]),
        str(value["incarnation"]),
    )


def registration_message(registration: Registration) -> dict[str, Any]:
    return asdict(registration)


def read_registration(value: Mapping[str, Any]) -> Registration:
    return Registration(
        str(value["incarnation"]),
        int(value["revision"]),
        int(value["promised"]),
        str(value["host"]),
        has_ended=value["has_ended"] is True,
        held_lease=value["held_lease"] is True,
    )


def brought_message(brought: Brought) -> dict[str, Any]:
    ttls_s = {str(lease_id): ttl_s for lease_id, ttl_s in brought.ttls_s.items()}
    return {**snapshot_message(brought.known), "ttls_s": ttls_s}


def read_brought(value: Mapping[str, Any]) -> Brought:
    ttls_s = {int(lease_id): float(ttl_s) for lease_id, ttl_s in value["ttls_s"].items()}
    if not all(ttl_s > 0 for ttl_s in ttls_s.values()):
        raise FrameError("a lease lives for some time")
    return Brought(read_snapshot(value), ttls_s)
