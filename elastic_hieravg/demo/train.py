"""The training script of the demo: a small model learns the source of the standard library by characters.

It is an ordinary script for `hieravg run`. Beside that it tells what it does, a line of JSON for every step and
every round of all ranks, from which the demo takes its facts. A file named `stop` ends the loop.
"""

import argparse
import hashlib
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn

import elastic_hieravg as eh
from elastic_hieravg.demo.endings import end_with_parent
from elastic_hieravg.events import Outcome, RoundDone

TEXT_BYTES = 1_000_000
NUM_CHARACTERS = 128
BATCH = 12
WINDOW = 24
RATE = 0.002
# A step takes at least so long, like that of a larger model: eight workers should leave a laptop usable.
STEP_S = 0.025


class CharacterModel(nn.Module):
    """Says for every character of a window which one comes next."""

    def __init__(self, *, width: int = 72) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CHARACTERS, width // 3)
        self.memory = nn.GRU(width // 3, width, batch_first=True)
        self.output = nn.Linear(width, NUM_CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        seen, _ = self.memory(self.embedding(characters))
        scores: torch.Tensor = self.output(seen)
        return scores


def read_text(folder: Path, *, num_bytes: int = TEXT_BYTES) -> torch.Tensor:
    """The beginning of the Python files of a folder, in the order of their names."""
    content = bytearray()
    for path in sorted(folder.glob("*.py")):
        content += path.read_bytes()
        if len(content) >= num_bytes:
            break
    if len(content) <= WINDOW + 1:
        raise FileNotFoundError(f"there is no source of the standard library in {folder}")
    return torch.frombuffer(content[:num_bytes], dtype=torch.uint8).long().clamp(max=NUM_CHARACTERS - 1)


class Lines:
    """What this worker tells of itself. Times are of the machine's own clock, one for all processes."""

    def __init__(self, folder: Path, *, node: str, job: eh.Job, model: nn.Module) -> None:
        self._file = (folder / f"{node}.{os.getpid()}").open("a", buffering=1)
        self._job = job
        self._model = model

    def say(self, event: str, **told: float | str) -> None:
        place = {"generation": self._job.generation, "world": self._job.world_size, "step": self._job.step}
        line = {"event": event, "at_s": time.monotonic(), **place, **told}
        self._file.write(json.dumps(line) + "\n")

    def digest(self) -> str:
        content = b"".join(each.detach().numpy().tobytes() for each in self._model.parameters())
        return hashlib.sha256(content).hexdigest()[:16]

    def observe(self, done: RoundDone) -> None:
        """All replicas are alike behind a round of all ranks, and nowhere else."""
        if done.level == self._job.plan.levels[-1].name and done.outcome is Outcome.COMMITTED:
            self.say("round", digest=self.digest())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    flags = parser.parse_args()
    end_with_parent()
    torch.set_num_threads(1)
    text = read_text(Path(sysconfig.get_paths()["stdlib"]))
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    window = torch.arange(WINDOW + 1)
    with eh.join() as job:
        lines = Lines(flags.folder / "lines", node=flags.name, job=job, model=model)
        lines.say("start")
        averager = job.averager(model, optimizer, observe=lines.observe)
        while not job.should_stop and not (flags.folder / "stop").exists():
            began_s = time.monotonic()
            batch = text[torch.randint(len(text) - WINDOW, (BATCH, 1)) + window]
            scores = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, began_s + STEP_S - time.monotonic()))
            busy_s = time.monotonic() - began_s
            averager.step(num_samples=BATCH)
            job.report(loss=loss.item())
            lines.say("step", loss=loss.item(), busy_s=busy_s)
    lines.say("end", digest=lines.digest())


if __name__ == "__main__":
    main()
