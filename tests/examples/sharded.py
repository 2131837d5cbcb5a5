"""A training script for the tests: FSDP2 inside the node. It writes the lines that `tests.elastic.jobs` reads.

Digests are of the whole model, which a node's ranks gather together: so they have to agree on when.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import elastic_hieravg as eh
from elastic_hieravg.events import Outcome, RoundDone


class Script:
    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.is_together = False
        self.lines = (flags.folder / "lines" / f"{flags.name}.{os.getpid()}").open("a", buffering=1)
        self.stop: Path = flags.folder / "stop"
        self.job = eh.join()
        self.model: nn.Module

    def say(self, event: str, **told: Any) -> None:
        job = self.job
        line = {"event": event, "at_s": time.monotonic(), "node": self.flags.name, "pid": os.getpid()}
        line |= {"rank": job.rank, "world": job.world_size, "generation": job.generation, "step": job.step}
        self.lines.write(json.dumps(line | told) + "\n")

    def digest(self) -> str:
        """Collective over the node."""
        whole = [each.full_tensor() for each in self.model.parameters() if isinstance(each, DTensor)]
        assert whole
        return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in whole)).hexdigest()

    def observe(self, done: RoundDone) -> None:
        is_widest = done.level == self.job.plan.levels[-1].name
        self.is_together |= is_widest and done.outcome is Outcome.COMMITTED

    def agree(self, group: dist.ProcessGroup) -> tuple[bool, bool]:
        """Whether all ranks of the node had a global round, and whether all are told to stop."""
        flags = torch.tensor([float(self.is_together), float(self.stop.exists())])
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
        return bool(flags[0]), bool(flags[1])

    def run(self) -> None:
        with self.job as job:
            self.say("start")
            group = job.process_group("node")
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
            fully_shard(self.model, mesh=DeviceMesh.from_group(group, "cpu"))
            optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
            averager = job.averager(self.model, optimizer, observe=self.observe)
            self.say("joined", digest=self.digest())
            is_told = False
            while not is_told and not job.should_stop:
                self.is_together = False
                loss = self.model(torch.randn(8, 32)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(self.flags.step_s)
                averager.step(num_samples=8)
                is_together, is_told = self.agree(group)
                counters = sorted({int(state["step"]) for state in optimizer.state.values()})
                together = {"digest": self.digest()} if is_together else {}
                self.say("step", loss=loss.item(), counters=counters, **together)
            averager.finish()
            self.say("end", digest=self.digest())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--step-s", type=float, default=0.02)
    torch.set_num_threads(1)
    Script(parser.parse_args()).run()
