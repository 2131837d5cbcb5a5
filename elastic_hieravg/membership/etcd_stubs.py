"""etcd's messages and stubs, out of the package `etcd3`, without a trace in the environment.

Its generated code is of 2020 and loads with today's protobuf only in the pure-Python implementation. That is
chosen for this one import, and only processes that talk to etcd make it: agents, never workers. If protobuf
was loaded otherwise before, in somebody's program around us, the maintained fork `pyetcd` does.
"""

import importlib
import sys
import warnings
from functools import cache
from types import ModuleType

from elastic_hieravg.config import environment_with
from elastic_hieravg.errors import Problem, UsageError

IMPLEMENTATION = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


@cache
def etcd_stubs() -> ModuleType:
    """The module with `KVStub`, `LeaseStub`, `WatchStub`, `AuthStub` and their messages."""
    chosen = sys.modules.get("google.protobuf.internal.api_implementation")
    if chosen is not None and chosen.Type() != "python":
        # Not even tried: protobuf would remember half of etcd3's messages, and the fork's have the same names.
        return _fork()
    with environment_with(IMPLEMENTATION, "python"), warnings.catch_warnings():
        # Old generated code makes its messages in a deprecated way.
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("etcd3.etcdrpc")


def _fork() -> ModuleType:
    try:
        return importlib.import_module("pyetcd.etcdrpc")
    except ImportError as exc:
        raise UsageError(
            Problem(
                "something in this process loaded protobuf before elastic_hieravg could, and etcd3 needs "
                "protobuf's pure-Python implementation",
                "install etcd-sdk-python, which does without, or connect to etcd first",
            )
        ) from exc
