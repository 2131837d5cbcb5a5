"""A training script that joins the job, for torchrun and for `hieravg run --membership restart`.

Every step is one JSON line: when, who, in which attempt, where in training. It ends when rank 0 sees the file
`finish`, for everybody in the same round, and the last line says what the model has become.
"""

import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch

import elastic_hieravg as eh

# Whatever becomes of the test and of torchrun, no worker outlives this.
LIFE_S = 600
STEP_S = 0.01
BATCH = 8
# Of the job's innermost rounds.
PERIOD = 2


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    steps = [float(state["step"]) for state in optimizer.state.values()]
    return f"{found.hexdigest()[:16]} after {min(steps, default=0.0):g}"


def main() -> None:
    signal.alarm(LIFE_S)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    folder = Path(sys.argv[1])
    # Different on every start: only what is handed on makes replicas alike.
    torch.manual_seed(os.getpid())
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    with eh.join() as job, (folder / "steps.jsonl").open("a", buffering=1) as lines:

        def say(event: str, **further: object) -> None:
            where = {"node_id": os.environ["TEST_NODE_ID"], "local_rank": job.local_rank, "rank": job.rank}
            job_now = {"world_size": job.world_size, "generation": job.generation, "step": job.step}
            now = {"at_s": time.monotonic(), "pid": os.getpid(), "event": event}
            lines.write(json.dumps({**now, **where, **job_now, **further}) + "\n")

        averager = job.averager(model, optimizer)
        neighbours = torch.ones(1)
        torch.distributed.all_reduce(neighbours, group=job.process_group("node"))
        say("begin", digest=digest_of(model, optimizer), neighbours=int(neighbours))
        while not job.should_stop:
            inputs = torch.randn(BATCH, 32)
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            averager.step(num_samples=BATCH)
            # The model after a global round is what snapshots hold; on one node every round is global.
            say("step", **({} if job.step % PERIOD else {"digest": digest_of(model, optimizer)}))
            time.sleep(STEP_S)
            if job.rank == 0 and (folder / "finish").exists():
                break
        averager.finish()
        say("end", digest=digest_of(model, optimizer))


if __name__ == "__main__":
    main()
