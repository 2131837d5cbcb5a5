"""`eh.attach()`: a place in the job for training loops that nobody wants to change.

Every step that the optimizer really makes is counted by its own hook. The job ends with `close()`, or with the
interpreter. Invariant: once the end is agreed the model does not change, however long the loop goes on.
"""

import atexit
import sys
from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from elastic_hieravg.averaging.optimizers import on_each_step
from elastic_hieravg.events import Observe, ignore
from elastic_hieravg.worker.job import Job, join


def attach(
    model: nn.Module | Iterable[Tensor],
    optimizer: Optimizer,
    *,
    num_samples: float | Callable[[], float] = 1,
    step: int = 0,
    average_buffers: bool = True,
    observe: Observe = ignore,
) -> Job:
    """Average a model in a loop that is not yours. Returns when the model, and the optimizer, are everybody's.

    `num_samples`: over how many samples a step is made, or a function that says so. `step`: of the checkpoint
    that model and optimizer were loaded from. When the interpreter ends,
    or at `close()`, there is one last global round; not if the script ended with an exception.
    """
    job = join()
    job.__enter__()
    try:
        averager = job.averager(model, optimizer, step=step, average_buffers=average_buffers, observe=observe)
    except BaseException as exc:
        job.__exit__(type(exc), exc, exc.__traceback__)
        raise

    def count(samples: float) -> None:
        if not job.should_stop:
            averager.step(samples)

    def rest(stepped: Optimizer, _args: object, _kwargs: object) -> None:
        # The others have ended: what this loop still does must not change what all agreed on.
        if job.should_stop:
            stepped.zero_grad(set_to_none=True)

    job.on_close(on_each_step(optimizer, count, num_samples=num_samples).remove)
    job.on_close(optimizer.register_step_pre_hook(rest).remove)
    end = _end_of(job)
    atexit.register(end)
    job.on_close(lambda: atexit.unregister(end))
    return job


def _end_of(job: Job) -> Callable[[], None]:
    def end() -> None:
        # What the interpreter has just printed before it ends, if the script did not end by itself.
        error: BaseException | None = getattr(sys, "last_value", None)
        job.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    return end
