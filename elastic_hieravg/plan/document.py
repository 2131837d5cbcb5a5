"""Read JSON strictly.

A document from a file or a store is checked key by key: a key that is missing, unknown or written twice
and a value of another type are errors that say where. Nothing is guessed and nothing is dropped.
"""

import json
from collections.abc import Iterator
from typing import TypeVar

from elastic_hieravg.errors import DocumentError, Problem

T = TypeVar("T")

_TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def canonical_json(value: object) -> str:
    """The one spelling of a value, the same on every machine: what digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def parse_json(text: str, *, where: str) -> object:
    def reject_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {twice!r} is written twice in one object")
        return found

    def reject_constant(name: str) -> object:
        raise ValueError(f"{name} is not a number JSON knows")

    try:
        return json.loads(text, object_pairs_hook=reject_twice, parse_constant=reject_constant)
    except (ValueError, RecursionError) as exc:
        problem = Problem(f"{where} is not JSON: {exc}", "check that the file is whole and not of another kind")
        raise DocumentError(problem) from exc


class Fields:
    """One JSON object, taken apart key by key; `close` rejects what nobody asked for."""

    def __init__(self, value: object, *, where: str) -> None:
        if not isinstance(value, dict):
            raise wrong_type(value, where=where, expected=dict)
        self._values: dict[str, object] = dict(value)
        self._where = where

    def text(self, key: str, *, default: str | None = None) -> str:
        return self._take(key, str, default)

    def number(self, key: str) -> int:
        return self._take(key, int, None)

    def value(self, key: str) -> tuple[str, object]:
        """Whatever a key holds, with where it stands."""
        return f"{self._where}, {key}", self._take(key, dict, None)

    def items(self, key: str) -> Iterator[tuple[str, object]]:
        """Each entry of a list, with where it stands."""
        for index, value in enumerate(self._take(key, list, None)):
            yield f"{self._where}, {key}[{index}]", value

    def texts(self, key: str) -> dict[str, str]:
        """An object of texts; an empty one if the key is missing."""
        found = self._take(key, dict, {})
        for name, value in found.items():
            if not isinstance(value, str):
                raise wrong_type(value, where=f"{self._where}, {key}.{name}", expected=str)
        return found

    def close(self) -> None:
        if self._values:
            raise DocumentError(
                Problem(
                    f"{self._where} has {', '.join(map(repr, self._values))}, which is not known here",
                    "correct the spelling, or use the version that wrote it",
                )
            )

    def _take(self, key: str, kind: type[T], default: T | None) -> T:
        if key not in self._values:
            if default is None:
                hint = f"add {key!r}, {_TYPE_NAMES[kind]}"
                raise DocumentError(Problem(f"{self._where} has no {key!r}", hint))
            return default
        value = self._values.pop(key)
        # Not isinstance: true is an int to Python.
        if type(value) is not kind:
            raise wrong_type(value, where=f"{self._where}, {key}", expected=kind)
        return value


def wrong_type(value: object, *, where: str, expected: type) -> DocumentError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
    return DocumentError(
        Problem(
            f"{where} is {shown}, {_TYPE_NAMES[type(value)]}, not {_TYPE_NAMES[expected]}",
            f"write {_TYPE_NAMES[expected]} there",
        )
    )
