"""FSDP2 inside each node, model averaging between nodes.

The ranks of a node share one copy of model, gradients and optimizer state. Between nodes, the ranks that hold
the same shard average it: each shard crosses the network once per node. On each of two nodes, with equal slots:

    hieravg run --nnodes=1:2 --nproc-per-node=2 --rdzv-endpoint=h1:29400 --rdzv-id=job7 \\
      --hierarchy node=8,global=32 examples/fsdp_in_node.py
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import elastic_hieravg as eh

BATCH = 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
        self.last = nn.Linear(2 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        after: torch.Tensor = values + self.last(self.layers(values))
        return after


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 inside each node, averaging between nodes")
    parser.add_argument("--steps", type=int, default=200)
    flags = parser.parse_args()

    teacher = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    losses: list[float] = []

    with eh.join() as job:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = DeviceMesh.from_group(job.process_group("node"), device)
        # Each rank keeps its part of what it has here: the same seed makes the parts fit together.
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), Block(64), Block(64), nn.Linear(64, 32))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # Shard first, then the optimizer and the averager: both work on the shards.
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        averager = job.averager(model, optimizer)

        while job.step < flags.steps and not job.should_stop:
            torch.manual_seed(job.step * job.world_size + job.rank)
            points = torch.randn(BATCH, 32)
            loss = nn.functional.mse_loss(model(points), torch.tanh(points @ teacher))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            averager.step(num_samples=BATCH)
            losses.append(loss.item())
            job.report(loss=loss)

        # The shards are gathered for the checksum while the node's group is there.
        averager.finish()
        whole = [each.full_tensor() for each in model.parameters() if isinstance(each, DTensor)]

    values = nn.utils.parameters_to_vector(whole).detach()
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
    # A worker that joins in the very last round makes no step.
    trend = f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "unknown"
    print(f"rank {job.rank}: {len(losses)} steps, loss {trend}, model {digest}")


if __name__ == "__main__":
    main()
