"""What `training.py` trains: a small model that learns the source of the standard library by characters.

The same model, start, batches and optimizer in three ways: gradients averaged in every step (DDP), parameters
averaged by torch's HierarchicalModelAverager, or by ours. Every worker writes a line for each step; the time is
the machine's monotonic clock, which all of its processes share. After a round of all ranks, when all replicas
are alike, rank 0 saves the model: the loss is found out later, so that nobody waits for it here.
"""

import argparse
import json
import os
import sys
import sysconfig
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

sys.path.append(str(Path(__file__).parent.parent))

import elastic_hieravg as eh
from elastic_hieravg.demo.endings import end_with_parent
from elastic_hieravg.demo.train import NUM_CHARACTERS, read_text
from elastic_hieravg.events import Outcome, RoundDone

NODE_STEPS, GLOBAL_STEPS = 4, 16
SLOTS = 2
TEXT_BYTES, HELD_OUT_BYTES = 4_000_000, 200_000
WINDOW = 32
BATCH, HELD_OUT_BATCH = 64, 4096
RATE = 0.001
# With `WINDOW` these give 1.4 million parameters.
CHARACTER_WIDTH, WIDTH = 32, 1024


def make_model() -> nn.Module:
    """Says which character comes after a window of them. Everybody begins with the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(NUM_CHARACTERS, CHARACTER_WIDTH),
        nn.Flatten(),
        nn.Linear(WINDOW * CHARACTER_WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH // 4),
        nn.GELU(),
        nn.Linear(WIDTH // 4, NUM_CHARACTERS),
    )


def read_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """What is trained with, and what is held out."""
    text = read_text(Path(sysconfig.get_paths()["stdlib"]), num_bytes=TEXT_BYTES)
    return text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]


def draw(text: torch.Tensor, *, num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of the text, and the character after each."""
    chance = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - WINDOW, (num_samples, 1), generator=chance)
    found = text[starts + torch.arange(WINDOW + 1)]
    return found[:, :-1], found[:, -1]


class Trainer:
    """A step of the model on this place's own part of the text. A step draws the same batch in every way."""

    def __init__(self, flags: argparse.Namespace, *, local_rank: int) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self._place = flags.node_index * SLOTS + local_rank
        text, _ = read_texts()
        self._part = text.chunk(flags.num_nodes * SLOTS)[self._place]
        self._folder = flags.folder
        lines = flags.folder / "lines" / f"{flags.node_index}.{local_rank}.{os.getpid()}"
        self._lines = lines.open("a", buffering=1)

    def train(self, step: int, model: nn.Module | None = None) -> None:
        """Make this step, without the averaging of parameters behind it."""
        windows, following = draw(self._part, num_samples=BATCH, seed=step * 1000 + self._place)
        self.optimizer.zero_grad()
        scores = (model or self.model)(windows)
        nn.functional.cross_entropy(scores, following).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def say(self, step: int, *, is_start: bool = False, arrived_s: float | None = None) -> None:
        """That this step is made; or, at the start, that it was made before. `arrived_s`: at its averaging."""
        line = {"at_s": time.monotonic(), "step": step, "is_start": is_start, "arrived_s": arrived_s}
        self._lines.write(json.dumps(line) + "\n")

    def save(self, step: int, **more: object) -> None:
        """The model as it is after this step; with more, something to go on from."""
        saved = {"step": step, "at_s": time.monotonic(), "model": self.model.state_dict(), **more}
        path = self._folder / "models" / f"{step:06}.pt"
        torch.save(saved, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def resume(self) -> dict[str, Any]:
        """Go on from what was saved last, as every process does that torchrun starts anew."""
        paths = sorted((self._folder / "models").glob("*.pt"))
        if not paths:
            return {"step": 0}
        saved: dict[str, Any] = torch.load(paths[-1], weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return saved


def train_ddp(flags: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    trainer = Trainer(flags, local_rank=dist.get_node_local_rank())
    first = trainer.resume()["step"]
    model = nn.parallel.DistributedDataParallel(trainer.model)
    dist.barrier()
    trainer.say(first, is_start=True)
    for step in range(first + 1, flags.steps + 1):
        trainer.train(step, model)
        trainer.say(step)
        if step % GLOBAL_STEPS == 0 and dist.get_rank() == 0:
            trainer.save(step, optimizer=trainer.optimizer.state_dict())
    dist.destroy_process_group()


def train_torch_averager(flags: argparse.Namespace) -> None:
    """torch's averager knows its group sizes from its start on: every start gives it those of its own world."""
    dist.init_process_group("gloo")
    trainer = Trainer(flags, local_rank=dist.get_node_local_rank())
    first = trainer.resume()["step"]
    sizes = OrderedDict([(NODE_STEPS, SLOTS), (GLOBAL_STEPS, dist.get_world_size())])
    averager = HierarchicalModelAverager(sizes)  # type: ignore[no-untyped-call]
    # It averages before it counts, first of all after step 1. So it averages after the same steps as ours.
    averager.step = first + 1
    dist.barrier()
    trainer.say(first, is_start=True)
    for step in range(first + 1, flags.steps + 1):
        trainer.train(step)
        arrived_s = time.monotonic()
        averager.average_parameters(trainer.model.parameters())
        trainer.say(step, arrived_s=arrived_s)
        if step % GLOBAL_STEPS == 0 and dist.get_rank() == 0:
            trainer.save(step, optimizer=trainer.optimizer.state_dict())
    dist.destroy_process_group()


def train_ours(flags: argparse.Namespace) -> None:
    with eh.join() as job:
        trainer = Trainer(flags, local_rank=job.local_rank)
        rounds: list[RoundDone] = []
        averager = job.averager(trainer.model, trainer.optimizer, observe=rounds.append)
        trainer.say(job.step, is_start=True)
        while job.step < flags.steps and not job.should_stop:
            trainer.train(job.step + 1)
            rounds.clear()
            arrived_s = time.monotonic()
            averager.step(num_samples=BATCH)
            trainer.say(job.step, arrived_s=arrived_s)
            widest = job.plan.levels[-1].name
            is_global = any(each.level == widest and each.outcome is Outcome.COMMITTED for each in rounds)
            if is_global and job.rank == 0:
                # Nobody will need it, but the others save too, and the loss is to be known.
                trainer.save(job.step)


WAYS = {"ddp": train_ddp, "torch": train_torch_averager, "ours": train_ours}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=sorted(WAYS), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node-index", type=int, required=True)
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    flags = parser.parse_args()
    end_with_parent()
    torch.set_num_threads(1)
    WAYS[flags.way](flags)


if __name__ == "__main__":
    main()
