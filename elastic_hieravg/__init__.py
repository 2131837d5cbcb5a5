"""elastic_hieravg: fault-tolerant training that averages models at several levels.

What is importable here is pure: no torch, no socket, no logging is touched by importing it.
"""

from elastic_hieravg.plan import Hierarchy, Level, Node, Plan, Topology, fit

__version__ = "0.1.0"

__all__ = ["Hierarchy", "Level", "Node", "Plan", "Topology", "__version__", "fit"]
