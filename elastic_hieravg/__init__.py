"""elastic_hieravg: fault-tolerant training that averages models at several levels.

Importing it is pure: no torch, no socket, no logging is touched. `join`, `attach` and `Job` import torch when
first used.
"""

from typing import TYPE_CHECKING, Any

from elastic_hieravg.plan import Hierarchy, Level, Node, Plan, Topology, fit

if TYPE_CHECKING:
    from elastic_hieravg.worker import Job, attach, join

__version__ = "0.1.0"

__all__ = ["Hierarchy", "Job", "Level", "Node", "Plan", "Topology", "__version__", "attach", "fit", "join"]


def __getattr__(name: str) -> Any:
    if name in ("Job", "attach", "join"):
        from elastic_hieravg import worker  # noqa: PLC0415 - torch takes seconds, and planning needs none

        return getattr(worker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
