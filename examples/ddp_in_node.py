"""DDP inside each node, model averaging between nodes.

Inside a node gradients are averaged in every step, as with DDP; between nodes, where links are slow, models are
averaged every 32 steps. On each of two nodes:

    hieravg run --nnodes=1:2 --nproc-per-node=2 --rdzv-endpoint=h1:29400 --rdzv-id=job7 \\
      --hierarchy node=8,global=32 examples/ddp_in_node.py

`averager.register_hook(...)` lets the averager carry DDP's gradients. A worker that dies in a backward pass
then costs its own gradients only: the others neither hang nor see an exception.
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastic_hieravg as eh

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP inside each node, averaging between nodes")
    parser.add_argument("--steps", type=int, default=200)
    flags = parser.parse_args()

    teacher = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []

    with eh.join() as job:
        averager = job.averager(model, optimizer)
        # The averager first: DDP then begins with the job's model.
        ddp_model = DistributedDataParallel(model, process_group=job.process_group("node"))
        averager.register_hook(ddp_model)

        while job.step < flags.steps and not job.should_stop:
            # Every rank draws its own samples, another time others.
            torch.manual_seed(job.step * job.world_size + job.rank)
            points = torch.randn(BATCH, 16)
            loss = nn.functional.mse_loss(ddp_model(points), torch.tanh(points @ teacher))
            loss.backward()  # gradients are the node's mean
            optimizer.step()
            optimizer.zero_grad()
            averager.step(num_samples=BATCH)
            losses.append(loss.item())
            job.report(loss=loss)

    values = nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
    # A worker that joins in the very last round makes no step.
    trend = f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "unknown"
    print(f"rank {job.rank}: {len(losses)} steps, loss {trend}, model {digest}")


if __name__ == "__main__":
    main()
