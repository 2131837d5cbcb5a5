"""The parts of a page that benchmarks write: found between markers, and written anew. Pure.

A part begins with the line `<!-- bench: NAME -->` and ends with the line `<!-- end -->`. Invariant: nothing
outside of the markers changes, and to write the same again changes nothing.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from elastic_hieravg.errors import DocumentError, Problem

OPENING = re.compile(r"<!-- bench: (\S+) -->")
CLOSING = "<!-- end -->"
HINT = f"a part is a line <!-- bench: NAME -->, what is written by `make bench`, and a line {CLOSING}"


@dataclass(frozen=True, slots=True)
class Part:
    """The lines between the markers of a name: from index `begin` to before `end`."""

    name: str
    begin: int
    end: int


def find(text: str, *, known: Collection[str]) -> tuple[Part, ...]:
    """All parts of a page. `DocumentError` if markers are no pairs, name nothing known, or one thing twice."""
    parts = tuple(_pairs(text.split("\n")))
    names = [part.name for part in parts]
    for part in parts:
        if part.name not in known:
            raise _refusal(
                f"line {part.begin}: there is no part {part.name!r}, only {', '.join(sorted(known))}"
            )
        if names.count(part.name) > 1:
            raise _refusal(f"line {part.begin}: the part {part.name!r} is there {names.count(part.name)} times")
    return parts


def rewrite(text: str, written: Mapping[str, str], *, known: Collection[str]) -> str:
    """The page with these parts anew; all others stay as they are."""
    lines = text.split("\n")
    for part in reversed(find(text, known=known)):
        if part.name in written:
            # Empty lines: without them Markdown takes a table for a part of the comment.
            lines[part.begin : part.end] = ["", *written[part.name].strip("\n").split("\n"), ""]
    return "\n".join(lines)


def _pairs(lines: list[str]) -> Iterator[Part]:
    name, begin = "", 0
    for index, line in enumerate(lines):
        opening = OPENING.fullmatch(line)
        if opening is not None:
            if name:
                raise _refusal(
                    f"line {index + 1}: {line} begins inside of the part {name!r}, from line {begin}"
                )
            name, begin = opening[1], index + 1
        elif line == CLOSING:
            if not name:
                raise _refusal(f"line {index + 1}: {CLOSING} ends nothing")
            yield Part(name, begin, index)
            name = ""
        elif "<!-- bench" in line:
            raise _refusal(f"line {index + 1}: {line!r:.60} is no marker by itself on its line")
    if name:
        raise _refusal(f"line {begin}: the part {name!r} has no end")


def _refusal(text: str) -> DocumentError:
    return DocumentError(Problem(f"the page's markers: {text}", HINT))
