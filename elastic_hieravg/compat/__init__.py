"""torch's model averaging, name for name, on our rounds.

Signatures, schedules, errors, warnings and public attributes are torch's: the classes derive from torch's
own. What differs is the averaging itself, and what torch gets wrong; the README has the table.
"""

from elastic_hieravg.compat.averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
from elastic_hieravg.compat.hooks import PostLocalSGDState, post_localSGD_hook
from elastic_hieravg.compat.optimizer import PostLocalSGDOptimizer
from elastic_hieravg.compat.parameters import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from elastic_hieravg.compat.subgroups import new_subgroups

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
    "new_subgroups",
    "post_localSGD_hook",
]
