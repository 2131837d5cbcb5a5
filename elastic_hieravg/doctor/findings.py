"""What was found on a machine, as values. Pure.

Invariant: whatever is not well says what to do about it, and what does not apply is not counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic_hieravg.errors import Problem

VERSION = 1


class Severity(StrEnum):
    """`ABSENT`: the check does not apply here."""

    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Finding:
    """`found` has the values; `advice` is what to do."""

    check: str
    severity: Severity
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert self.found
        assert self.advice or self.severity not in (Severity.PROBLEM, Severity.WARNING)


@dataclass(frozen=True, slots=True)
class Section:
    """Findings that belong together."""

    name: str
    findings: tuple[Finding, ...]


def ok(check: str, found: str) -> Finding:
    return Finding(check, Severity.OK, found)


def note(check: str, found: str, advice: str = "") -> Finding:
    return Finding(check, Severity.NOTE, found, advice)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Severity.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Severity.PROBLEM, found, advice)


def absent(check: str, why: str) -> Finding:
    """`why` in a word or two."""
    return Finding(check, Severity.ABSENT, why)


def told(check: str, problems: Iterable[Problem]) -> list[Finding]:
    """What an error of ours names, each as a finding."""
    return [problem(check, each.message, each.hint) for each in problems]


def count(sections: Sequence[Section], severity: Severity) -> int:
    return sum(each.severity is severity for section in sections for each in section.findings)


def document(sections: Sequence[Section]) -> dict[str, object]:
    """All of it for scripts."""
    return {
        "version": VERSION,
        "counts": {each.value: count(sections, each) for each in Severity if each is not Severity.ABSENT},
        "findings": [
            {
                "group": section.name,
                "check": each.check,
                "severity": each.severity.value,
                "found": each.found,
                "advice": each.advice,
            }
            for section in sections
            for each in section.findings
        ],
    }
