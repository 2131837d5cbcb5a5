"""What a member asks of its store, what it is answered, and what it tells its owner. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from elastic_hieravg.errors import HierAvgError
from elastic_hieravg.membership.kv import Write
from elastic_hieravg.membership.records import Closing, Generation
from elastic_hieravg.plan import GroupKey, Plan


class Lease(StrEnum):
    """What a lease is for: its keys end with the node, with the job, or some time after the end."""

    NODE = "node"
    JOB = "job"
    CLOSING = "closing"


# --- what a member asks of the store, and what it can be answered -------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    purpose: Lease
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Refresh:
    """Have the watch begin again with everything: it may be behind."""


@dataclass(frozen=True, slots=True)
class Granted:
    lease_id: int


@dataclass(frozen=True, slots=True)
class Applied:
    revision: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A guard did not hold: the write changed nothing."""


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """A lease the write named is over: it changed nothing."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The watch begins again; what it tells comes by the watch itself."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The store did not answer in time; a write may have been applied."""


Request = Grant | Write | Refresh
Answer = Granted | Applied | Refused | LeaseOver | Refreshed | Unknown


# --- what a member tells its owner --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adopted:
    """A generation that holds this node, with its plan and the keys of its groups."""

    generation: Generation
    plan: Plan
    keys: tuple[GroupKey, ...]


@dataclass(frozen=True, slots=True)
class Fenced:
    """This incarnation is out while its process lives; it comes back as another one."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over for everybody."""

    closing: Closing


@dataclass(frozen=True, slots=True)
class Failed:
    """This node cannot be in the job."""

    error: HierAvgError


@dataclass(frozen=True, slots=True)
class Warned:
    text: str


Notice = Adopted | Fenced | Ended | Failed | Warned


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as it asks to be in the job. `may_rename`: another name does, if this one is taken.

    `standby`: the port at which its agent would serve the store, 0 if it would not.
    """

    node_id: str
    slots: int
    labels: Mapping[str, str]
    address: str
    port: int
    may_rename: bool = False
    standby: int = 0
