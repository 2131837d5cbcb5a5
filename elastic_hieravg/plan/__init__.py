"""The pure core: from a membership and a hierarchy to a plan.

Nothing here reads a clock, an environment, a file or a socket, logs, or imports torch. Same input, same
plan, on every node.
"""

from elastic_hieravg.plan.changes import Change, GroupKey, Member, Move, PlannedGroup, difference, first_keys
from elastic_hieravg.plan.costs import Cost, LevelCost, Traffic, cost
from elastic_hieravg.plan.fitting import Misfit, OnMisfit, fit
from elastic_hieravg.plan.hierarchy import Hierarchy, Level
from elastic_hieravg.plan.plan import Note, NoteKind, Plan, PlannedLevel
from elastic_hieravg.plan.text import change_text, cost_text, plan_text
from elastic_hieravg.plan.topology import Node, Seat, Topology, natural_key

__all__ = [
    "Change",
    "Cost",
    "GroupKey",
    "Hierarchy",
    "Level",
    "LevelCost",
    "Member",
    "Misfit",
    "Move",
    "Node",
    "Note",
    "NoteKind",
    "OnMisfit",
    "Plan",
    "PlannedGroup",
    "PlannedLevel",
    "Seat",
    "Topology",
    "Traffic",
    "change_text",
    "cost",
    "cost_text",
    "difference",
    "first_keys",
    "fit",
    "natural_key",
    "plan_text",
]
