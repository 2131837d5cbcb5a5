"""What agents write into the store, as values and as JSON.

A record is read strictly: another version, an unknown field or a wrong type is a `DocumentError`.
Invariant: what one agent wrote, every agent of the same version reads as the same value.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

from elastic_hieravg.errors import DocumentError, HierAvgError, InputError, Problem, raise_if_any
from elastic_hieravg.plan import GroupKey, Hierarchy, Node, OnMisfit, Plan, first_keys
from elastic_hieravg.plan.document import Fields, canonical_json, parse_json, wrong_type
from elastic_hieravg.plan.fitting import ON_MISFIT

VERSION = 1
# A store holds a few records for each node; the same texts are read again with every snapshot. Of those that
# grow with the number of nodes there are few at a time.
RECORDS_REMEMBERED = 4096
LONG_RECORDS_REMEMBERED = 16

T = TypeVar("T")


class Mode(StrEnum):
    IN_PLACE = "in-place"  # survivors keep their processes; groups change under them
    RESTART = "restart"  # every change restarts all workers, the TorchElastic way


class NodeState(StrEnum):
    JOINING = "joining"  # its agent lives, its workers do not run yet
    READY = "ready"  # its workers run and can be connected to
    LEAVING = "leaving"  # it goes on purpose, as soon as a generation without it is written


class Kind(StrEnum):
    """Why a generation was made. It only shrinks or only grows."""

    START = "start"
    LOSS = "loss"
    JOIN = "join"
    REBUILD = "rebuild"  # nobody was lost, but a group failed
    ROUND = "round"  # the same members meet for one more global round: somebody is about to leave
    RESTART = "restart"
    BOUNDS = "bounds"  # the same members; it is another question now whether they are enough


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many nodes a job has at least and at most from now on, whatever it began with."""

    nodes_min: int
    nodes_max: int

    def __post_init__(self) -> None:
        raise_if_any(InputError, list(_bounds_problems(self.nodes_min, self.nodes_max)))

    def to_json(self) -> str:
        return _to_json("bounds", {"nodes_min": self.nodes_min, "nodes_max": self.nodes_max})


@dataclass(frozen=True, slots=True)
class Job:
    """What every node of a job has to ask for alike. The bounds may change while it runs: see `Bounds`."""

    nodes_min: int
    nodes_max: int
    hierarchy: Hierarchy
    mode: Mode = Mode.IN_PLACE
    warmup_steps: int = 0
    on_misfit: OnMisfit = "repair"

    def __post_init__(self) -> None:
        raise_if_any(InputError, list(_job_problems(self)))

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.nodes_min, self.nodes_max)

    def within(self, bounds: Bounds) -> "Job":
        """The same job with other bounds."""
        return replace(self, nodes_min=bounds.nodes_min, nodes_max=bounds.nodes_max)

    def document(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"hierarchy": str(self.hierarchy), "mode": self.mode.value}

    def to_json(self) -> str:
        return _to_json("job", self.document())


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node while its lease lives: what it is, and where its agent is reached.

    `seen`: the highest generation it had followed when it wrote this. `entered`: the generation its ranks
    work in. `asked`: it asks for a round in a later generation than this one; 0 if it does not. `standby`: the
    port at which its agent would serve the store; 0 if it would not.
    """

    node: Node
    state: NodeState
    address: str
    port: int
    seen: int = 0
    entered: int = 0
    asked: int = 0
    standby: int = 0

    def to_json(self) -> str:
        where = {"address": self.address, "port": self.port, "standby": self.standby}
        numbers = {"seen": self.seen, "entered": self.entered, "asked": self.asked}
        return _to_json("node", {"node": self.node.document(), "state": self.state, **where, **numbers})


@dataclass(frozen=True, slots=True)
class Generation:
    """One adopted membership. `members` stand in rank order.

    `built`: for each group of the plan, in the plan's order, the generation that built it. `hold`: why
    training pauses in it, or nothing. `writer`: the incarnation of the node that wrote it.
    """

    number: int
    kind: Kind
    reason: str
    members: tuple[Node, ...]
    addresses: Mapping[str, str] = field(hash=False)
    digest: str
    built: tuple[int, ...]
    hold: str
    writer: str
    _by_id: Mapping[str, Node] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", {member.node_id: member for member in self.members})

    def member(self, node_id: str) -> Node | None:
        return self._by_id.get(node_id)

    def lists(self, node: Node) -> bool:
        """Whether it holds this very incarnation of the node."""
        member = self._by_id.get(node.node_id)
        return member is not None and member.incarnation == node.incarnation

    def keys(self, plan: Plan) -> tuple[GroupKey, ...]:
        """The keys of this generation's groups, in the order of its plan."""
        new = first_keys(plan)
        assert len(new) == len(self.built), "a generation says of every group which generation built it"
        return tuple(GroupKey(key.members, built) for key, built in zip(new, self.built, strict=True))

    def to_json(self) -> str:
        content = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        content |= {"members": [node.document() for node in self.members], "addresses": dict(self.addresses)}
        return _to_json("generation", content)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Somebody has evidence that an incarnation is dead. It stands unless the accused takes it away."""

    incarnation: str
    by: str
    why: str

    def to_json(self) -> str:
        return _to_json("suspicion", {"incarnation": self.incarnation, "by": self.by, "why": self.why})


@dataclass(frozen=True, slots=True)
class Refusal:
    """An incarnation that cannot be in the job: its labels contradict the others'."""

    incarnation: str
    reason: str

    def to_json(self) -> str:
        return _to_json("refusal", {"incarnation": self.incarnation, "reason": self.reason})


@dataclass(frozen=True, slots=True)
class StoreOffer:
    """Where the ranks of a generation find the store through which they connect to each other."""

    generation: int
    address: str
    port: int

    def to_json(self) -> str:
        where = {"address": self.address, "port": self.port}
        return _to_json("store", {"generation": self.generation, **where})


@dataclass(frozen=True, slots=True)
class Closing:
    """The end of a job. A node that comes later does not start. `is_hopeless`: trying again would not help."""

    is_success: bool
    reason: str
    is_hopeless: bool = False

    def to_json(self) -> str:
        outcome = _HOPELESS if self.is_hopeless else _OUTCOMES[self.is_success]
        return _to_json("closing", {"outcome": outcome, "reason": self.reason})


_OUTCOMES = {True: "succeeded", False: "failed"}
_HOPELESS = "failed for good"


def _reader(
    kind: str, *, num_remembered: int = RECORDS_REMEMBERED
) -> Callable[[Callable[[Fields], T]], Callable[[str], T]]:
    """Make a function that reads a text out of one that takes the record's fields."""

    def reader(take: Callable[[Fields], T]) -> Callable[[str], T]:
        @lru_cache(num_remembered)
        def read(text: str) -> T:
            record = _open(kind, text)
            try:
                value = take(record)
            except DocumentError:
                raise
            except HierAvgError as exc:
                # What the value itself refuses is an error of the record.
                raise DocumentError(*exc.problems) from exc
            record.close()
            return value

        return read

    return reader


@_reader("job")
def read_job(record: Fields) -> Job:
    hierarchy = Hierarchy.parse(record.text("hierarchy"))
    wanted = record.text("on_misfit")
    on_misfit = next((each for each in ON_MISFIT if each == wanted), None)
    if on_misfit is None:
        raise DocumentError(_unreadable("the job's record has another on_misfit than this version knows"))
    return Job(
        nodes_min=record.number("nodes_min"),
        nodes_max=record.number("nodes_max"),
        hierarchy=hierarchy,
        mode=_one_of(Mode, record.text("mode")),
        warmup_steps=record.number("warmup_steps"),
        on_misfit=on_misfit,
    )


@_reader("bounds")
def read_bounds(record: Fields) -> Bounds:
    return Bounds(record.number("nodes_min"), record.number("nodes_max"))


@_reader("node")
def read_node(record: Fields) -> NodeRecord:
    where, node = record.value("node")
    return NodeRecord(
        Node.read(node, where=where),
        _one_of(NodeState, record.text("state")),
        record.text("address"),
        record.number("port"),
        seen=record.number("seen"),
        entered=record.number("entered"),
        asked=record.number("asked"),
        standby=record.number("standby"),
    )


@_reader("generation", num_remembered=LONG_RECORDS_REMEMBERED)
def read_generation(record: Fields) -> Generation:
    members = tuple(Node.read(value, where=where) for where, value in record.items("members"))
    addresses = record.texts("addresses")
    if addresses.keys() != {member.node_id for member in members}:
        raise DocumentError(_unreadable("the generation's record has not one address for each member"))
    return Generation(
        number=record.number("number"),
        kind=_one_of(Kind, record.text("kind")),
        reason=record.text("reason"),
        members=members,
        addresses=addresses,
        digest=record.text("digest"),
        built=tuple(_number(value, where=where) for where, value in record.items("built")),
        hold=record.text("hold"),
        writer=record.text("writer"),
    )


@_reader("suspicion")
def read_suspicion(record: Fields) -> Suspicion:
    return Suspicion(record.text("incarnation"), record.text("by"), record.text("why"))


@_reader("refusal")
def read_refusal(record: Fields) -> Refusal:
    return Refusal(record.text("incarnation"), record.text("reason"))


@_reader("store")
def read_offer(record: Fields) -> StoreOffer:
    return StoreOffer(record.number("generation"), record.text("address"), record.number("port"))


@_reader("closing")
def read_closing(record: Fields) -> Closing:
    outcome = record.text("outcome")
    if outcome not in (*_OUTCOMES.values(), _HOPELESS):
        raise DocumentError(_unreadable(f"the closing's record has the outcome {outcome!r}"))
    return Closing(outcome == _OUTCOMES[True], record.text("reason"), is_hopeless=outcome == _HOPELESS)


def _bounds_problems(nodes_min: int, nodes_max: int) -> Iterator[Problem]:
    for name, number in (("minimum", nodes_min), ("maximum", nodes_max)):
        if type(number) is not int or number < 1:
            yield Problem(f"the {name} of nodes is {number!r}", "give a whole number of nodes, 1 or more")
            return
    if nodes_min > nodes_max:
        yield Problem(
            f"the minimum of nodes is {nodes_min}, more than the maximum of {nodes_max}",
            f"write the smaller number first: {nodes_max}:{nodes_min}",
        )


def _job_problems(job: Job) -> Iterator[Problem]:
    yield from _bounds_problems(job.nodes_min, job.nodes_max)
    if type(job.warmup_steps) is not int or job.warmup_steps < 0:
        hint = "give a whole number of steps, 0 or more"
        yield Problem(f"there are {job.warmup_steps!r} warm-up steps", hint)


def _to_json(kind: str, content: Mapping[str, object]) -> str:
    return canonical_json({"format": f"elastic_hieravg/{kind}", "version": VERSION, **content})


def _open(kind: str, text: str) -> Fields:
    where = f"the {kind}'s record"
    record = Fields(parse_json(text, where=where), where=where)
    found = record.text("format"), record.number("version")
    if found != (f"elastic_hieravg/{kind}", VERSION):
        raise DocumentError(
            _unreadable(
                f"{where} has the format {found[0]} version {found[1]}; "
                f"this version reads elastic_hieravg/{kind} version {VERSION}"
            )
        )
    return record


def _unreadable(message: str) -> Problem:
    return Problem(message, "run the same version of elastic_hieravg on every node")


E = TypeVar("E", bound=StrEnum)


def _one_of(kind: type[E], text: str) -> E:
    try:
        return kind(text)
    except ValueError as exc:
        raise DocumentError(_unreadable(f"a record has the {kind.__name__} {text!r}")) from exc


def _number(value: object, *, where: str) -> int:
    if type(value) is not int:
        raise wrong_type(value, where=where, expected=int)
    return value
