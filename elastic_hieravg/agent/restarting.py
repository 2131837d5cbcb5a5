"""`--membership restart`: torch's own elastic agent on our membership. Every change starts all workers anew.

What happens in an attempt, and what outlives it, is the workers' affair. Invariant: when
this returns no worker runs, and the membership knows why the node is gone.
"""

import logging

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from elastic_hieravg.agent.elastic_agent import EXIT_DO_NOT_RETRY, EXIT_DONE, EXIT_FAILED, EXIT_LEFT
from elastic_hieravg.config import (
    HIERARCHY_VARIABLE,
    LABELS_VARIABLE,
    ON_MISFIT_VARIABLE,
    WARMUP_STEPS_VARIABLE,
)
from elastic_hieravg.membership.messages import Candidate
from elastic_hieravg.membership.records import Job

_log = logging.getLogger(__name__)


def worker_variables(job: Job, candidate: Candidate) -> dict[str, str]:
    """What the workers have to know, and could not read off torchrun's own variables."""
    return {
        HIERARCHY_VARIABLE: str(job.hierarchy),
        WARMUP_STEPS_VARIABLE: str(job.warmup_steps),
        ON_MISFIT_VARIABLE: job.on_misfit,
        LABELS_VARIABLE: ",".join(f"{key}={value}" for key, value in candidate.labels.items()),
    }


def run_restarting(spec: WorkerSpec, config: LaunchConfig) -> int:
    """Run this node's workers until the job is over or the node leaves; the exit code."""
    assert config.logs_specs is not None
    agent = LocalElasticAgent(
        spec=spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
    )
    try:
        try:
            result = agent.run()
            if result is not None and result.is_failed():
                raise ChildFailedError(name=str(spec.entrypoint), failures=result.failures)
        finally:
            # While the exception is on its way: the handler looks at it.
            spec.rdzv_handler.shutdown()
    except ChildFailedError as exc:
        _log.error("%s", exc)
        codes = [failure.exitcode for failure in exc.failures.values()]
        return EXIT_DO_NOT_RETRY if EXIT_DO_NOT_RETRY in codes else EXIT_FAILED
    except SignalException as exc:
        _log.warning("left on %s", exc.sigval.name)
        return EXIT_LEFT
    except RendezvousError as exc:
        _log.error("%s", exc)
        return EXIT_FAILED
    return EXIT_DONE
