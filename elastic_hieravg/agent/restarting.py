"""`--membership restart`: torch's own elastic agent on our membership. Every change starts all workers anew.

What happens in an attempt, and what outlives it, is the workers' affair. Invariant: when
this returns no worker runs, and the membership knows why the node is gone.
"""

import logging

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from elastic_hieravg.agent.channel import WorkerChannel
from elastic_hieravg.agent.elastic_agent import (
    EXIT_DO_NOT_RETRY,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_LEFT,
    RestartingAgent,
)
from elastic_hieravg.agent.telemetry import Telemetry
from elastic_hieravg.agent.termination import leave_message
from elastic_hieravg.config import (
    AGENT_SOCKET_VARIABLE,
    AGENT_TOKEN_VARIABLE,
    HIERARCHY_VARIABLE,
    LABELS_VARIABLE,
    METRICS_SOCKET_VARIABLE,
    METRICS_TOKEN_VARIABLE,
    ON_MISFIT_VARIABLE,
    WARMUP_STEPS_VARIABLE,
)
from elastic_hieravg.membership.local import Bye, FromWorker, Hello, Measured
from elastic_hieravg.membership.messages import Candidate
from elastic_hieravg.membership.records import Job
from elastic_hieravg.membership.service import Status

_log = logging.getLogger(__name__)


def worker_variables(job: Job, candidate: Candidate) -> dict[str, str]:
    """What the workers have to know, and could not read off torchrun's own variables."""
    return {
        HIERARCHY_VARIABLE: str(job.hierarchy),
        WARMUP_STEPS_VARIABLE: str(job.warmup_steps),
        ON_MISFIT_VARIABLE: job.on_misfit,
        LABELS_VARIABLE: ",".join(f"{key}={value}" for key, value in candidate.labels.items()),
    }


def reports_channel(telemetry: Telemetry) -> WorkerChannel:
    """Where workers say what they measure. It changes nothing whether they do."""

    def hear(local_rank: int, process_id: int, message: FromWorker) -> None:
        match message:
            case Hello():
                telemetry.worker_came(local_rank, process_id)
            case Measured(samples):
                telemetry.measured(local_rank, process_id, samples)
            case Bye():
                telemetry.worker_done(local_rank)

    return WorkerChannel(on_message=hear, on_gone=telemetry.worker_gone)


def report_variables(channel: WorkerChannel) -> dict[str, str]:
    """How workers find that channel. Not as those find their agent who keep running."""
    return {
        METRICS_SOCKET_VARIABLE: channel.variables[AGENT_SOCKET_VARIABLE],
        METRICS_TOKEN_VARIABLE: channel.variables[AGENT_TOKEN_VARIABLE],
    }


def why_not_ready(status: Status, telemetry: Telemetry) -> str:
    """Why this node does not work in the newest generation; nothing if it does."""
    if status.ended is not None or status.error is not None:
        return "the job is over"
    if status.adopted is None or not status.is_listed:
        return f"this node is in no generation: {status.decision.reason}"
    return "this node waits for the others" if telemetry.is_meeting else ""


def run_restarting(spec: WorkerSpec, config: LaunchConfig, telemetry: Telemetry) -> int:
    """Run this node's workers until the job is over or the node leaves; the exit code."""
    assert config.logs_specs is not None
    agent = RestartingAgent(
        telemetry,
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
        leave_message(f"this node stopped: {_last_words(exc)}")
        codes = [failure.exitcode for failure in exc.failures.values()]
        return EXIT_DO_NOT_RETRY if EXIT_DO_NOT_RETRY in codes else EXIT_FAILED
    except SignalException as exc:
        _log.warning("%s received: this node has left the job", exc.sigval.name)
        leave_message(f"left on {exc.sigval.name}")
        return EXIT_LEFT
    except RendezvousError as exc:
        _log.error("%s", exc)
        leave_message(str(exc))
        return EXIT_FAILED
    leave_message("training is done")
    telemetry.log_end()
    return EXIT_DONE


def _last_words(failed: ChildFailedError) -> str:
    rank, failure = failed.get_first_failure()
    return f"worker {rank} exited with {failure.exitcode}; see what it printed"
