"""What an agent's log looks like, in both formats."""

import io
import json
import logging
import subprocess
import sys

import pytest

from elastic_hieravg.agent.logs import Facts, JsonFormatter, PlainFormatter, set_up_logs
from elastic_hieravg.errors import UsageError

FACTS = Facts("job7", "a", 7, 1234)


def written(
    formatter: logging.Formatter,
    text: str,
    *arguments: object,
    error: Exception | None = None,
    **extra: object,
) -> str:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    logger = logging.getLogger("tests.some_module")
    logger.addHandler(handler)
    logger.warning(text, *arguments, exc_info=error, extra=extra)
    logger.removeHandler(handler)
    return out.getvalue()


def test_json_has_one_object_a_line() -> None:
    text = written(JsonFormatter(FACTS), "lost %s:\n%s", "b", '"quoted" \u2028', reason="its process ended")
    assert text.count("\n") == 1
    found = json.loads(text)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning",
        "run": "job7",
        "node": "a",
        "generation": 7,
        "step": 1234,
        "message": 'lost b:\n"quoted" \u2028',
        "logger": "tests.some_module",
        "reason": "its process ended",
    }


def test_json_has_the_traceback_too() -> None:
    found = json.loads(written(JsonFormatter(FACTS), "failed", error=ValueError("oh")))
    assert "ValueError: oh" in found["exception"]


def test_plain_lines_carry_the_same_facts() -> None:
    line = written(PlainFormatter(FACTS), "lost %s", "b")
    assert line.endswith(" WARNING [job7 a generation=7 step=1234] lost b\n")
    assert written(PlainFormatter(Facts("job7", "a")), "x").endswith(" WARNING [job7 a] x\n")
    assert written(PlainFormatter(Facts()), "x").endswith(" WARNING x\n")


CODE = """
import logging, sys
handler = logging.StreamHandler(sys.stderr)
logging.getLogger("torch.some.part").addHandler(handler)
logging.getLogger("torch.some.part").propagate = False
from elastic_hieravg.agent.logs import set_up_logs
facts = set_up_logs(sys.argv[1])
facts.run, facts.node, facts.generation = "job7", "a", 3
logging.getLogger("any").info("hello")
logging.getLogger("torch.some.part").warning("from torch")
"""


def told_by(log_format: str) -> list[str]:
    """What a program writes that logs in this format, and uses a package with handlers of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, log_format], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_program_writes_plain_lines_to_stderr() -> None:
    hello, from_torch = told_by("plain")
    assert hello.endswith(" INFO [job7 a generation=3] hello")
    assert from_torch == "from torch"


def test_with_json_every_line_is_an_object() -> None:
    hello, from_torch = map(json.loads, told_by("json"))
    assert (hello["message"], hello["generation"], hello["level"]) == ("hello", 3, "info")
    assert (from_torch["message"], from_torch["run"]) == ("from torch", "job7")


def test_another_format_is_refused() -> None:
    with pytest.raises(UsageError, match="--log-format is 'xml'"):
        set_up_logs("xml")
