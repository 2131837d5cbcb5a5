"""The averaging engine: rounds over the groups of a plan, exact, weighted and safe."""

from elastic_hieravg.averaging.averager import HierarchicalAverager

__all__ = ["HierarchicalAverager"]
