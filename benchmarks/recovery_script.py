"""What `recovery.py` trains: one small model, averaged by the runtime that is asked for.

Steps of about 20 ms, an average over the node every 4 and over all every 16. Every worker writes a line for
each step; the time is the machine's monotonic clock, which all of its processes share.
"""

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent.parent))

import elastic_hieravg as eh
from elastic_hieravg.events import Outcome, RoundDone

NODE_STEPS, GLOBAL_STEPS = 4, 16
STEP_S = 0.02
BATCH = 8
WIDTH = 64
PR_SET_PDEATHSIG = 1
HANG, QUIET = "hang", "quiet"
# The tuned setting of torchft: nothing waits for longer.
TORCHFT_TIMEOUT, TORCHFT_QUORUM_TIMEOUT = timedelta(seconds=5), timedelta(seconds=20)


class Trainer:
    """The model, a step of it, and the lines that tell of it."""

    def __init__(self, flags: argparse.Namespace, *, local_rank: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 256), torch.nn.Tanh(), torch.nn.Linear(256, WIDTH)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        torch.manual_seed(os.getpid())
        self._orders = flags.folder / "orders" / str(os.getpid())
        lines = flags.folder / "lines" / f"{flags.name}.{local_rank}.{os.getpid()}"
        self._lines = lines.open("a", buffering=1)

    def train(self, quiet: Any = None) -> None:
        self._follow_orders(quiet)
        self.model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        time.sleep(STEP_S)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def say(self, **told: object) -> None:
        self._lines.write(json.dumps({"at_s": time.monotonic(), **told}) + "\n")

    def _follow_orders(self, quiet: Any) -> None:
        if not self._orders.exists():
            return
        order = self._orders.read_text()
        self._orders.unlink()
        self.say(order=order)
        if order == HANG:
            while True:
                time.sleep(1.0)
        if quiet is not None:
            with quiet():
                time.sleep(float(order.removeprefix(QUIET)))


def main() -> None:
    flags = read_flags()
    torch.set_num_threads(1)
    match flags.runtime:
        case "hieravg":
            train_hieravg(flags)
        case "torchrun":
            train_torchrun(flags)
        case "torchft":
            train_torchft(flags)


def train_hieravg(flags: argparse.Namespace) -> None:
    with eh.join() as job:
        trainer = Trainer(flags, local_rank=job.local_rank)
        rounds: list[RoundDone] = []
        averager = job.averager(trainer.model, trainer.optimizer, observe=rounds.append)
        while not job.should_stop:
            trainer.train(job.quiet)
            rounds.clear()
            began_s = time.perf_counter()
            averager.step(BATCH)
            call_us = None if rounds else (time.perf_counter() - began_s) * 1e6
            widest = job.plan.levels[-1].name if job.plan.levels else ""
            took = [
                done.seconds for done in rounds if done.level == widest and done.outcome is Outcome.COMMITTED
            ]
            trainer.say(
                step=job.step,
                era=job.generation,
                num_ranks=job.world_size,
                round_s=took[-1] if took else None,
                call_us=call_us,
            )


def train_torchrun(flags: argparse.Namespace) -> None:
    """Every change of the membership starts all processes anew; they go on from the last global average."""
    end_with_agent()
    dist.init_process_group("gloo")
    trainer = Trainer(flags, local_rank=dist.get_node_local_rank())
    node, _ = dist.new_subgroups(group_size=flags.slots)  # type: ignore[no-untyped-call]
    checkpoint = flags.folder / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        trainer.model.load_state_dict(saved["model"])
    while True:
        trainer.train()
        step += 1
        began_s, round_s = time.perf_counter(), None
        if step % GLOBAL_STEPS == 0:
            average(trainer.model, dist.group.WORLD)
            round_s = time.perf_counter() - began_s
            if dist.get_rank() == 0:
                new = checkpoint.with_suffix(".new")
                torch.save({"step": step, "model": trainer.model.state_dict()}, new)
                new.rename(checkpoint)
        elif step % NODE_STEPS == 0:
            average(trainer.model, node)
        trainer.say(step=step, era=os.getpid(), num_ranks=dist.get_world_size(), round_s=round_s, call_us=None)


def train_torchft(flags: argparse.Namespace) -> None:
    """A replica group is a node, under a torchrun of its own; LocalSGD averages over the groups."""
    # Not imported by name: it need not be installed.
    torchft, local_sgd = importlib.import_module("torchft"), importlib.import_module("torchft.local_sgd")

    end_with_agent()
    dist.init_process_group("gloo")
    trainer = Trainer(flags, local_rank=dist.get_node_local_rank())
    counted = {"step": 0}

    def load(state: dict[str, Any]) -> None:
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        counted["step"] = state["step"]

    def save() -> dict[str, Any]:
        return {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "step": counted["step"],
        }

    tuned: dict[str, Any] = {}
    if flags.is_tuned:
        tuned = {
            "timeout": TORCHFT_TIMEOUT,
            "quorum_timeout": TORCHFT_QUORUM_TIMEOUT,
            "connect_timeout": TORCHFT_TIMEOUT,
        }
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TORCHFT_TIMEOUT if flags.is_tuned else timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,
        lighthouse_addr=flags.lighthouse,
        replica_id=f"node_{flags.name}_",
        hostname="localhost",
        **tuned,
    )
    with local_sgd.LocalSGD(manager, trainer.model, trainer.optimizer, sync_every=GLOBAL_STEPS):
        while True:
            committed, began_s = manager.current_step(), time.perf_counter()
            trainer.train()
            is_committed = manager.current_step() > committed
            round_s = max(0.0, time.perf_counter() - began_s - STEP_S) if is_committed else None
            counted["step"] += 1
            if not is_committed and counted["step"] % NODE_STEPS == 0:
                average(trainer.model, dist.group.WORLD)
            num_ranks = manager.num_participants() * flags.slots
            trainer.say(
                step=counted["step"],
                era=manager._quorum_id,  # noqa: SLF001 - there is no other way to ask
                num_ranks=num_ranks,
                round_s=round_s,
                call_us=None,
            )


@torch.no_grad()
def average(model: torch.nn.Module, group: "dist.ProcessGroup | None") -> None:
    parameters = list(model.parameters())
    flat = torch.cat([each.flatten() for each in parameters])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    parts = torch.split(flat, [each.numel() for each in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view_as(parameter))


def end_with_agent() -> None:
    """The worker of an agent that is killed goes with it, as on a machine that is lost."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime", choices=("hieravg", "torchrun", "torchft"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--lighthouse")
    parser.add_argument("--is-tuned", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
