"""Findings as lines for people: grouped, one line for each check, what needs doing at the end. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_hieravg.doctor.findings import Finding, Section, Severity, count

# In rich's words; used on a terminal only.
STYLES = {
    Severity.PROBLEM: "bold red",
    Severity.WARNING: "yellow",
    Severity.NOTE: "cyan",
    Severity.OK: "green",
    Severity.ABSENT: "dim",
}
MARKS = {each: each.value for each in Severity} | {Severity.ABSENT: "-"}


@dataclass(frozen=True, slots=True)
class Line:
    """`mark` is what `style` is for; `text` comes after it."""

    mark: str
    text: str
    style: str = ""

    def __str__(self) -> str:
        return f"{self.mark}{self.text}".rstrip()


def lines(sections: Sequence[Section]) -> list[Line]:
    """Everything, then what there is to do, problems first."""
    told: list[Line] = []
    mark_width = max(len(mark) for mark in MARKS.values())
    for section in sections:
        told.append(Line(section.name, "", "bold"))
        check_width = max((len(each.check) for each in section.findings), default=0)
        for each in section.findings:
            mark = f"  {MARKS[each.severity]:{mark_width}}"
            told.append(Line(mark, f"  {each.check:{check_width}}  {_one_line(each)}", STYLES[each.severity]))
        told.append(Line("", ""))
    return [*told, *_summary(sections)]


def _summary(sections: Sequence[Section]) -> list[Line]:
    told = [
        Line(
            f"{severity.value}: ",
            f"{section.name}, {each.check}: {_plain(each.found)}\n  do: {_plain(each.advice)}",
            style,
        )
        for severity, style in ((kind, STYLES[kind]) for kind in (Severity.PROBLEM, Severity.WARNING))
        for section in sections
        for each in section.findings
        if each.severity is severity
    ]
    counted = [
        _counted(severity, count(sections, severity))
        for severity in Severity
        if severity is not Severity.ABSENT
    ]
    return [*told, Line(", ".join(counted), "", "bold")]


def _one_line(finding: Finding) -> str:
    # What to do about a problem or a warning stands at the end, where it is looked for.
    is_told_later = finding.severity in (Severity.PROBLEM, Severity.WARNING)
    advice = "" if is_told_later or not finding.advice else f" ({finding.advice})"
    return _plain(f"{finding.found}{advice}")


def _plain(text: str) -> str:
    """On one line, and nothing that a terminal would act on: some of it was written by others."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _counted(severity: Severity, number: int) -> str:
    """A number with its word.

    >>> _counted(Severity.PROBLEM, 1), _counted(Severity.NOTE, 2)
    ('1 problem', '2 notes')
    """
    plural = "" if number == 1 or severity is Severity.OK else "s"
    return f"{number} {severity.value}{plural}"
