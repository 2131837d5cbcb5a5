"""What benchmarks have left behind, read as values: the frame of a document, and its figures by type.

Pure: text in, values out. Invariant: what is not as expected is an error that says where, what was found and
what to do; what is whole but lacks a figure that a table shows is `IncompleteError`, and no error of anybody.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from elastic_hieravg.errors import DocumentError, Problem
from elastic_hieravg.plan.document import parse_json
from report.running import VERSION

T = TypeVar("T")

NAMES = ("plan", "averaging", "rendezvous", "recovery", "metrics", "training")


class IncompleteError(Exception):
    """There are not the figures for a table, and the message says which are missing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`torchft`, `etcd`: None if not installed. Loads are of one minute."""

    python: str
    torch: str
    torchft: str | None
    etcd: str | None
    processor: str
    cores: int
    load_start: float
    load_end: float


@dataclass(frozen=True, slots=True)
class Frame:
    """What every document has."""

    version: int
    benchmark: str
    is_quick: bool
    seconds: float
    machine: Machine
    missed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    frame: Frame
    values: Mapping[str, object]

    @property
    def machine(self) -> Machine:
        return self.frame.machine


def parse(text: str, *, benchmark: str) -> Document:
    """The document of this benchmark. `DocumentError` if it is another's, of another version, or garbage."""
    where = f"{benchmark}.json"
    found = parse_json(text, where=where)
    version = found.get("version") if isinstance(found, dict) else None
    if not isinstance(found, dict) or version != VERSION:
        shown = f"the version {version!r}" if isinstance(found, dict) else f"{found!r:.60}"
        raise refusal(f"{where} has {shown}, and tables are made of version {VERSION}", benchmark=benchmark)
    frame = read(found, Frame, where=where, benchmark=benchmark)
    if frame.benchmark != benchmark:
        raise refusal(f"{where} holds the figures of {frame.benchmark!r}", benchmark=benchmark)
    return Document(frame, found)


def value(document: Document, key: str, kind: type[T]) -> T:
    """What stands under this key, checked to be of this type."""
    benchmark = document.frame.benchmark
    where = f"{benchmark}.json, {key}"
    if key not in document.values:
        raise refusal(f"{where} is missing", benchmark=benchmark)
    return read(document.values[key], kind, where=where, benchmark=benchmark)


def rows(document: Document, key: str, kind: type[T]) -> tuple[T, ...]:
    """A list of records under this key."""
    found: tuple[T, ...] = value(document, key, tuple[kind, ...])  # type: ignore[valid-type]
    return found


def refusal(text: str, *, benchmark: str) -> DocumentError:
    return DocumentError(Problem(text, f"run benchmarks/{benchmark}.py again, or remove the file"))


# --- inside ---------------------------------------------------------------------------------------------------


def read(value: object, kind: type[T], *, where: str, benchmark: str) -> T:
    """The value as this type; more keys than a record has are left aside, because tables do not show all."""

    def refuse() -> DocumentError:
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        return refusal(f"{where} is {value!r:.60}, which is no {name}", benchmark=benchmark)

    def inner(each: object, kind: Any, name: object) -> Any:
        return read(each, kind, where=f"{where}[{name!r}]", benchmark=benchmark)

    origin, arguments = get_origin(kind), get_args(kind)
    found: object = value
    if is_dataclass(kind):
        found = read_record(value, kind, where=where, benchmark=benchmark)
    elif origin is UnionType:
        (other,) = (each for each in arguments if each is not NoneType)
        found = None if value is None else read(value, other, where=where, benchmark=benchmark)
    elif origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(value):
            raise refuse()
        found = tuple(
            inner(each, kind, index) for index, (each, kind) in enumerate(zip(value, kinds, strict=True))
        )
    elif origin is dict and isinstance(value, dict):
        found = {key: inner(each, arguments[1], key) for key, each in value.items()}
    elif kind is float and type(value) is int:
        found = float(value)
    elif type(value) is not kind:
        raise refuse()
    return cast("T", found)


def read_record(value: object, kind: Any, *, where: str, benchmark: str) -> object:
    if not isinstance(value, dict):
        raise refusal(f"{where} is {value!r:.60}, which is no record", benchmark=benchmark)
    missing = [field.name for field in fields(kind) if field.name not in value]
    if missing:
        raise refusal(f"{where} has no {', '.join(missing)}", benchmark=benchmark)
    hints = get_type_hints(kind)
    return kind(
        **{
            field.name: read(
                value[field.name], hints[field.name], where=f"{where}.{field.name}", benchmark=benchmark
            )
            for field in fields(kind)
        }
    )
