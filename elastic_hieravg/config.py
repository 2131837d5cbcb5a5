"""What people write, turned into values: flags, files and, later, the environment.

Every reader here either returns a value or raises a `UsageError` that says what was found; none of them
acts on what it read.
"""

import re
from pathlib import Path

from elastic_hieravg.errors import DocumentError, InputError, Problem, TopologyError, UsageError, raise_if_any
from elastic_hieravg.plan.document import parse_json
from elastic_hieravg.plan.topology import Node

NODE_FORM = "NAME:SLOTS[:key=value[,key=value...]]"
NODES_FILE_FORM = '[{"node_id": "a", "slots": 4, "labels": {"zone": "z1"}}]'
NODES_FILE_BYTES_MAX = 64 * 1024 * 1024

_SLOTS = re.compile(r"-?[0-9]{1,9}")
_STEPS = re.compile(r"[0-9]{1,18}")
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
                Problem(f"{of!r} has the label {key} twice: {labels[key]} and {value}", "write it once")
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
    try:
        # Opened, not stat'ed first: a pipe has no size, and a file may change in between.
        with path.open("rb") as file:
            content = file.read(NODES_FILE_BYTES_MAX + 1)
        text = content.decode()
    except OSError as exc:
        raise UsageError(
            Problem(f"{path} cannot be read: {exc.strerror}", "give the path of a JSON file of nodes")
        ) from exc
    except UnicodeDecodeError as exc:
        raise UsageError(Problem(f"{path} is not text: {exc}", f"write {NODES_FILE_FORM} in UTF-8")) from exc
    if len(content) > NODES_FILE_BYTES_MAX:
        raise UsageError(
            Problem(f"{path} is larger than {NODES_FILE_BYTES_MAX} bytes", "is it the right file?")
        )
    try:
        return parse_json(text, where=str(path))
    except DocumentError as exc:
        raise UsageError(*exc.problems) from exc


def read_steps(text: str, *, flag: str) -> int:
    """Read a number of steps, 0 or more."""
    if not _STEPS.fullmatch(text):
        raise UsageError(Problem(f"{flag} is {text!r}", "give a whole number of steps, 0 or more"))
    return int(text)


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
                f"{text!r} is not a number of parameters",
                "write a number from 1 to 1000T with K, M, B or T after it, for example 125M or 1.3B",
            )
        )
    return number
