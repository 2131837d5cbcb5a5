"""An optimizer's state as JSON with its tensors beside it: nothing is pickled. Pure, but for the tensors' type.

Lists, tuples, dictionaries, numbers, texts and tensors, in any depth, come back as what they were. Anything
else is a `ParametersError` that says where it stands.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from elastic_hieravg.errors import DocumentError, ParametersError, Problem

DEPTH_MAX = 32


def encode_tree(value: object, tensors: list[Tensor], *, where: str) -> object:
    """What JSON can hold of a value; its tensors are added to `tensors`, and stand there by their place."""
    return _encode(value, tensors, where=where, depth=0)


def decode_tree(document: object, tensors: Sequence[Tensor]) -> Any:
    """The value that `encode_tree` was given, with these tensors in it."""
    return _decode(document, tensors, depth=0)


def _encode(value: object, tensors: list[Tensor], *, where: str, depth: int) -> object:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    # Exactly these types: a subclass would come back as something else.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if depth < DEPTH_MAX and type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        entries = [
            _encode(entry, tensors, where=f"{where}[{index}]", depth=depth + 1)
            for index, entry in enumerate(value)
        ]
        return {type(value).__name__: entries}
    if depth < DEPTH_MAX and isinstance(value, dict) and all(type(key) in (int, str) for key in value):
        pairs = [
            [key, _encode(entry, tensors, where=f"{where}[{key!r}]", depth=depth + 1)]
            for key, entry in value.items()
        ]
        return {"dict": pairs}
    raise ParametersError(
        Problem(
            f"{where} is a {type(value).__name__}, which cannot be kept as plain data",
            "use an optimizer whose state holds tensors, numbers, texts, lists and dictionaries only",
        )
    )


def _decode(document: object, tensors: Sequence[Tensor], *, depth: int) -> Any:
    if not isinstance(document, dict):
        return document
    match document:
        case {"tensor": int(index)} if 0 <= index < len(tensors):
            return tensors[index]
        case {"float": str(text)}:
            return float(text)
        case {"list": list(entries)} if depth < DEPTH_MAX:
            return [_decode(entry, tensors, depth=depth + 1) for entry in entries]
        case {"tuple": list(entries)} if depth < DEPTH_MAX:
            return tuple(_decode(entry, tensors, depth=depth + 1) for entry in entries)
        case {"dict": list(pairs)} if depth < DEPTH_MAX:
            return {key: _decode(entry, tensors, depth=depth + 1) for key, entry in pairs}
    raise DocumentError(
        Problem(
            f"{str(document)[:80]} is no part of a state", "run the version of elastic_hieravg that wrote it"
        )
    )
