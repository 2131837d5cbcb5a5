"""What all tests share: the machine's programs, the rule that CI skips nothing, and the regenerate flag."""

import os
import shutil
import signal
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# Deterministic in `make test`; a wider search is `HYPOTHESIS_PROFILE=search`.
settings.register_profile("test", derandomize=True, deadline=None, max_examples=200)
settings.register_profile("search", deadline=None, max_examples=5000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))

if TYPE_CHECKING:
    from tests.averaging.ranks import Ranks

pytest_plugins = ["pytester"]

# A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start with them.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write the scenarios' expected text anew")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        program, apt = mark.args[0], mark.kwargs["apt"]
        if shutil.which(program) is None:
            pytest.skip(f"{item.name} needs {program}: apt-get install {apt}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, and CI skips nothing: {reason}"
    return report


@pytest.fixture(scope="session")
def ranks() -> "Iterator[Ranks]":
    """A pool of real processes."""
    from tests.averaging.ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()
