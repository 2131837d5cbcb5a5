"""A plain training loop that survives lost and joining nodes.

    python examples/plain_loop.py --steps 200                                         # alone
    hieravg run --standalone --nproc-per-node=2 examples/plain_loop.py --steps 200    # one machine
    torchrun --standalone --nproc-per-node=2 examples/plain_loop.py --steps 200       # the same, restarting

It shows what a worker that joins a running job has to do by itself: set its scheduler and its place in the data
from `job.step`. Model, optimizer and step are there when `job.averager(...)` returns.
"""

import argparse
import hashlib

import torch
from torch import Tensor, nn

import elastic_hieravg as eh

BATCH = 32


def make_data() -> tuple[Tensor, Tensor]:
    """Points and what a fixed network says of them; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(4096, 16, generator=generator)
    weights = torch.randn(16, 8, generator=generator)
    return points, torch.tanh(points @ weights)


def rows_of(job: eh.Job, num_rows: int) -> Tensor:
    """The rows of this rank's next batch.

    They follow from the step, the rank and the size of the world alone. So a worker that joins at step 5000
    goes on there, and if the world has another size tomorrow, the rest of the data is shared out anew.
    """
    rows_per_step = BATCH * job.world_size
    epoch, index = divmod(job.step, num_rows // rows_per_step)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(epoch))
    first = index * rows_per_step + job.rank * BATCH
    return order[first : first + BATCH]


def main() -> None:
    parser = argparse.ArgumentParser(description="a plain training loop")
    parser.add_argument("--steps", type=int, default=200)
    flags = parser.parse_args()

    points, targets = make_data()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=flags.steps)
    losses: list[float] = []

    with eh.join() as job:
        # From here on the model, the optimizer's state and job.step are everybody's.
        averager = job.averager(model, optimizer)

        while job.step < flags.steps and not job.should_stop:
            rows = rows_of(job, len(points))
            loss = nn.functional.mse_loss(model(points[rows]), targets[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            averager.step(num_samples=len(rows))  # averages, if a level is due
            # The step of the job counts: a worker that joined, or was away for a while, is at the others' now.
            scheduler.last_epoch = job.step - 1
            scheduler.step()
            losses.append(loss.item())
            job.report(loss=loss)  # for the status page and Grafana

    # Behind the block all replicas are bit-identical.
    values = nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
    # A worker that joins in the very last round makes no step.
    trend = f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "unknown"
    print(f"rank {job.rank}: {len(losses)} steps, loss {trend}, model {digest}")


if __name__ == "__main__":
    main()
