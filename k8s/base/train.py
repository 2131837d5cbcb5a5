"""A small training loop to see a job run. Yours takes its place: in a ConfigMap, or in an image."""

import argparse
import time

import torch

import elastic_hieravg as eh


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--step-s", type=float, default=0.03, help="so long a step takes at least")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with eh.join() as job:
        averager = job.averager(model, optimizer)
        while job.step < flags.steps and not job.should_stop:
            inputs = torch.randn(32, 16)
            loss = (model(inputs).squeeze(1) - inputs.sum(1).sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            averager.step(num_samples=len(inputs))
            if job.step % 100 == 0:
                print(
                    f"step {job.step}: rank {job.rank} of {job.world_size}, loss {loss.item():.3f}", flush=True
                )
            time.sleep(flags.step_s)
    print(f"done after {job.step} steps", flush=True)


if __name__ == "__main__":
    main()
