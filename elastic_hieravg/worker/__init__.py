"""What runs in a training process: `join` and the elastic averager."""

from elastic_hieravg.worker.job import Job, join

__all__ = ["Job", "join"]
