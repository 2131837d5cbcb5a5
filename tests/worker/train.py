"""A training script for the tests of the worker session: Adam, with DDP inside the node and its gradient hook,
or through `eh.attach`. It writes the lines that `tests.elastic.jobs` reads.

A file in `orders` named after its process has a worker die in the middle of a backward pass.
"""

import argparse
import atexit
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import elastic_hieravg as eh
from elastic_hieravg.events import Outcome, RoundDone
from elastic_hieravg.worker import Job

WIDTH = 64


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--mode", choices=["plain", "hook", "attach"], default="plain")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--step-s", type=float, default=0.02)
    return parser.parse_args()


class Script:
    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.job: Job | None = None
        self.is_together = False
        self.lines = (flags.folder / "lines" / f"{flags.name}.{os.getpid()}").open("a", buffering=1)
        self.orders = flags.folder / "orders" / str(os.getpid())
        self.stop = flags.folder / "stop"
        torch.manual_seed(os.getpid())
        self.layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.model: nn.Module = nn.Sequential(
            self.layers[0], nn.Tanh(), self.layers[1], nn.Tanh(), self.layers[2]
        )
        # Long memories: a copy that is a few steps old is still close.
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, betas=(0.98, 0.99))
        # The same for everybody and in every step: moments that are far apart are wrong, not unlucky.
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(8, WIDTH, generator=generator)
        self.targets = torch.randn(8, WIDTH, generator=generator)

    def say(self, event: str, **told: Any) -> None:
        job = self.job
        line = {"event": event, "at_s": time.monotonic(), "node": self.flags.name, "pid": os.getpid()}
        if job is not None:
            line |= {"rank": job.rank, "world": job.world_size, "node_rank": job.node_rank}
            line |= {"generation": job.generation, "step": job.step}
        self.lines.write(json.dumps(line | told) + "\n")

    def digest(self) -> str:
        content = b"".join(each.detach().numpy().tobytes() for each in self.model.parameters())
        return hashlib.sha256(content).hexdigest()

    def moments(self) -> dict[str, Any]:
        """Adam's counters, and its moments in short."""
        states = list(self.optimizer.state.values())
        return {
            "counters": sorted({state["step"].item() for state in states}),
            "first": [state["exp_avg"].norm().item() for state in states],
            "second": [state["exp_avg_sq"].sum().item() for state in states],
        }

    def observe(self, done: RoundDone) -> None:
        if self.job is not None:
            is_widest = done.level == self.job.plan.levels[-1].name
            self.is_together |= is_widest and done.outcome is Outcome.COMMITTED

    def loss(self, model: nn.Module) -> Tensor:
        noise = 0.01 * torch.randn(8, WIDTH)
        found: Tensor = (model(self.inputs + noise) - self.targets).square().mean()
        return found

    def run(self) -> None:
        if self.flags.mode == "attach":
            self.run_attached()
        else:
            self.run_joined()

    def run_joined(self) -> None:
        with eh.join() as job:
            self.job = job
            job.on_change(lambda job: self.say("changed", callback_rank=job.rank))
            self.say("start")
            averager = job.averager(self.model, self.optimizer, observe=self.observe)
            model, told = self.model, {}
            if self.flags.mode == "hook":
                group = job.process_group("node")
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                told = {"node_total": total.item(), "is_same": job.process_group() is group}
                model = nn.parallel.DistributedDataParallel(self.model, process_group=group, bucket_cap_mb=1e-3)
                averager.register_hook(model)
            self.say("joined", digest=self.digest(), **self.moments(), **told)
            while job.step < self.flags.steps and not job.should_stop and not self.is_told_to_stop():
                self.is_together = False
                if self.orders.exists():
                    self.die_in_backward()
                loss = self.loss(model)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.optimizer.zero_grad()
                time.sleep(self.flags.step_s)
                averager.step(num_samples=8)
                job.report(loss=loss)
                together = {"digest": self.digest()} if self.is_together else {}
                local = averager.num_local_gradients
                self.say("step", loss=job.reported["loss"], local=local, **self.moments(), **together)
        self.say("end", digest=self.digest(), local=averager.num_local_gradients)

    def run_attached(self) -> None:
        # Registered first, so called last: behind the last round.
        atexit.register(lambda: self.say("end", digest=self.digest()))
        self.job = eh.attach(self.model, self.optimizer, num_samples=8, observe=self.observe)
        self.say("joined", digest=self.digest(), **self.moments())
        for _ in range(self.flags.steps):
            self.is_together = False
            self.loss(self.model).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            time.sleep(self.flags.step_s)
            together = {"digest": self.digest()} if self.is_together else {}
            self.say("step", **together)
            if self.stop.exists():
                break

    def is_told_to_stop(self) -> bool:
        """Everybody is, or this worker alone."""
        stops: list[Path] = [self.stop, self.stop.with_name(f"stop-{os.getpid()}")]
        return any(stop.exists() for stop in stops)

    def die_in_backward(self) -> None:
        """Behind the last layer's gradients, which are on their way then, and before the first layer's."""

        def die(_: Tensor) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        self.say("ordered", order="die")
        self.layers[1].weight.register_hook(die)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Script(read_flags()).run()
