"""How an agent logs: for people, or one JSON object a line, both with the same facts. The only home of it.

Every line says which run and node it is of, the newest generation, and the step its workers are at. Invariant:
nothing is logged per step.
"""

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

from elastic_hieravg.errors import Problem, UsageError

PLAIN, JSON = "plain", "json"


@dataclass(slots=True)
class Facts:
    """What every line carries; whoever knows it sets it, any thread may."""

    run: str = ""
    node: str = ""
    generation: int = 0
    step: int = 0


def set_up_logs(log_format: str) -> Facts:
    """Log to stderr in this format; the facts of every line can be set in what is returned."""
    facts = Facts()
    formatters: dict[str, type[PlainFormatter | JsonFormatter]] = {
        PLAIN: PlainFormatter,
        JSON: JsonFormatter,
    }
    if log_format not in formatters:
        raise UsageError(Problem(f"--log-format is {log_format!r}", f"take {PLAIN} or {JSON}"))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatters[log_format](facts))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if log_format == JSON:
        _take_over("torch", handler.formatter)
    return facts


def _take_over(package: str, formatter: logging.Formatter | None) -> None:
    """Have a package that has handlers of its own write in this format too."""
    for name in (
        package,
        *(each for each in logging.root.manager.loggerDict if each.startswith(f"{package}.")),
    ):
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(formatter)


class PlainFormatter(logging.Formatter):
    """`time LEVEL [run node generation step] message`, as far as it is known."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        facts = self._facts
        known = [facts.run, facts.node]
        known += [f"generation={facts.generation}"] if facts.generation else []
        known += [f"step={facts.step}"] if facts.step else []
        shown = " ".join(each for each in known if each)
        place = f"[{shown}] " if shown else ""
        return f"{self.formatTime(record)} {record.levelname} {place}{record.message}"

    def usesTime(self) -> bool:  # noqa: N802 - logging's own name
        return True


class JsonFormatter(logging.Formatter):
    """Time, level, run, node, generation, step and message; the reason where there is one."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        facts = self._facts
        seconds, milliseconds = divmod(round(record.created * 1000), 1000)
        told: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "run": facts.run,
            "node": facts.node,
            "generation": getattr(record, "generation", facts.generation),
            "step": facts.step,
            "message": record.getMessage(),
            "logger": record.name,
        }
        reason = getattr(record, "reason", None)
        if reason is not None:
            told["reason"] = str(reason)
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=True)
