"""A training script for the tests: a small model, steps of some 20 ms, and a line of JSON for each of them.

A test gives orders to a running worker through a file named after its process: to raise, to hang, to make its
model not finite, to be quiet, to exit, to die in the middle of a verdict. A file named `stop` ends the training
loop.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import elastic_hieravg as eh
from elastic_hieravg.averaging.header import Agreement, Verdict
from elastic_hieravg.averaging.mesh import RECORD_BYTES
from elastic_hieravg.averaging.rounds import AveragingGroup
from elastic_hieravg.events import Outcome, RoundDone
from elastic_hieravg.worker.job import PROGRESS_S


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--log-bytes", type=int, default=0, help="how much it logs with every step")
    parser.add_argument("--raise-at-start", action="store_true")
    parser.add_argument("--raise-after-joining", action="store_true")
    parser.add_argument("--exit-at-start", type=int)
    return parser.parse_args()


class Script:
    """The loop, and what it tells of itself."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.counts: Counter[str] = Counter()
        self.is_together = False
        self.rounds: list[str] = []
        self.job = eh.join()
        lines = flags.folder / "lines" / f"{flags.name}.{os.getpid()}"
        self.lines = lines.open("a", buffering=1)
        self.orders = flags.folder / "orders" / str(os.getpid())
        self.stop = flags.folder / "stop"
        torch.manual_seed(os.getpid())
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, flags.hidden), torch.nn.Tanh(), torch.nn.Linear(flags.hidden, 64)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def say(self, event: str, **told: Any) -> None:
        job = self.job
        place: dict[str, Any] = {
            "rank": job.rank,
            "world": job.world_size,
            "generation": job.generation,
            "step": job.step,
        }
        place["levels"] = [level.name for level in job.plan.levels]
        line = {"event": event, "at_s": time.monotonic(), "node": self.flags.name, "pid": os.getpid()}
        self.lines.write(json.dumps(line | place | told) + "\n")

    def digest(self) -> str:
        content = b"".join(each.detach().numpy().tobytes() for each in self.model.parameters())
        return hashlib.sha256(content).hexdigest()

    def observe(self, done: RoundDone) -> None:
        self.counts[f"{done.level} {done.outcome}"] += 1
        self.rounds.append(f"{done.level} of generation {self.job.generation} {done.outcome}")
        self.counts["not finite"] += done.num_nonfinite
        is_widest = done.level == self.job.plan.levels[-1].name
        self.is_together |= is_widest and done.outcome is Outcome.COMMITTED

    def run(self) -> None:
        flags = self.flags
        with self.job as job:
            self.say("start")
            if flags.raise_at_start:
                raise ValueError("raised at every start")
            if flags.exit_at_start is not None:
                sys.exit(flags.exit_at_start)
            averager = job.averager(self.model, self.optimizer, observe=self.observe)
            self.say("joined", digest=self.digest())
            if flags.raise_after_joining:
                # As a script that looks for its data only now; the agent has heard where it is by then.
                time.sleep(3 * PROGRESS_S)
                raise ValueError("there is no data on this node")
            while job.step < flags.steps and not job.should_stop and not self.stop.exists():
                self.follow_orders()
                self.is_together, self.rounds = False, []
                loss = self.model(torch.randn(8, 64)).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                time.sleep(flags.step_s)
                averager.step(num_samples=8)
                job.report(loss=loss.item(), rate=0.01)
                # All replicas are alike behind a global round, and nowhere else.
                together = {"digest": self.digest()} if self.is_together else {}
                if flags.log_bytes:
                    logging.getLogger(__name__).warning("x" * flags.log_bytes)
                self.say("step", loss=loss.item(), rounds=self.rounds, state=self.digest(), **together)
        told = {name: getattr(averager, name) for name in ("num_committed", "num_retried", "num_skipped")}
        self.say("end", digest=self.digest(), counts=dict(self.counts), **told)

    def follow_orders(self) -> None:
        if not self.orders.exists():
            return
        order, _, argument = self.orders.read_text().partition(" ")
        self.orders.unlink()
        self.say("ordered", order=order)
        match order:
            case "raise":
                raise ValueError("raised as ordered")
            case "hang":
                hang_here()
            case "quiet":
                with self.job.quiet():
                    time.sleep(float(argument))
            case "nan":
                next(self.model.parameters()).data.fill_(math.nan)
            case "exit":
                sys.exit(int(argument))
            case "die-in-verdict":
                die_in_verdict([int(index) for index in argument.split()])


def hang_here() -> None:
    """A function with a name that a dump of the stacks shows."""
    while True:
        time.sleep(1.0)


def die_in_verdict(told: Sequence[int]) -> None:
    """In the next round, tell the verdict to some of the ranks, and die before the others know it."""

    def tell_and_die(group: AveragingGroup, _: Agreement, *, is_finite: bool) -> tuple[Verdict, ...]:
        record = Verdict(is_finite, 0.0, 1.0).encode().ljust(RECORD_BYTES, b"\0")
        for index in told:
            group._mesh._sockets[index].send(record)
        os.kill(os.getpid(), signal.SIGKILL)
        return ()

    AveragingGroup._exchange_verdicts = tell_and_die  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Script(read_flags()).run()
