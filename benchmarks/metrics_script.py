"""What `metrics.py` trains: steps of about 10 ms of arithmetic, and what they cost a worker beside.

Writes one line of JSON when it is done. With `--uncounted` a worker counts and tells nothing.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent))

import elastic_hieravg as eh
from elastic_hieravg.metrics.tally import Tally
from elastic_hieravg.worker.job import Job

WIDTH = 256


def calibrate(model: torch.nn.Module, batch: torch.Tensor, *, step_s: float) -> int:
    """How many passes make a step as long as is asked for."""
    tries = []
    for _ in range(20):
        began_s = time.perf_counter()
        model(batch).sum().backward()
        tries.append(time.perf_counter() - began_s)
    return max(1, round(step_s / statistics.median(tries)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--uncounted", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    if flags.uncounted:
        Tally.step = lambda *_: None  # type: ignore[method-assign]
        Job._tell_samples = lambda _: None  # type: ignore[method-assign,assignment] # noqa: SLF001
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    batch = torch.randn(64, WIDTH)
    num_passes = calibrate(model, batch, step_s=flags.step_s)
    steps_s, calls_s = [], []
    with eh.join() as job:
        averager = job.averager(model)
        process_s, thread_s = time.process_time(), time.thread_time()
        for _ in range(flags.steps):
            began_s = time.perf_counter()
            for _ in range(num_passes):
                loss = model(batch).sum()
                loss.backward()
            job.report(loss=1.0, lr=0.1)
            before_s = time.perf_counter()
            averager.step(64)
            now_s = time.perf_counter()
            calls_s.append(now_s - before_s)
            steps_s.append(now_s - began_s)
        # What the process used and its training thread did not: reports, and whoever reads them.
        beside_s = (time.process_time() - process_s) - (time.thread_time() - thread_s)
    flags.result.write_text(
        json.dumps(
            {
                "step_s": statistics.median(steps_s),
                "call_us": statistics.median(calls_s) * 1e6,
                "beside_us": beside_s / flags.steps * 1e6,
            }
        )
    )


if __name__ == "__main__":
    main()
