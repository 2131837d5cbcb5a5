"""What runs in a training process: `join`, `attach` and the elastic averager."""

from elastic_hieravg.worker.attach import attach
from elastic_hieravg.worker.job import Job, join

__all__ = ["Job", "attach", "join"]
