"""What the demo's workers have written, as values, read while it is written.

Nothing here judges. Invariant: a line is read once, and only when it is whole.
"""

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a worker made. `busy_s`: what of it was training, not averaging."""

    at_s: float
    step: int
    loss: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """A round of all ranks that a worker has taken the result of."""

    at_s: float
    node: str
    process_id: int
    generation: int
    world: int
    step: int
    digest: str

    @property
    def where(self) -> tuple[int, int]:
        return self.generation, self.step


class Worker:
    """One process, from its first line to its last. `end_digest` is empty until its loop has ended."""

    def __init__(self, node: str, process_id: int) -> None:
        self.node = node
        self.process_id = process_id
        self.steps: list[Step] = []
        self.rounds: list[Round] = []
        self.end_digest = ""

    def take(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "step":
                self.steps.append(Step(line["at_s"], line["step"], line["loss"], line["busy_s"]))
            case "round":
                place = line["generation"], line["world"], line["step"]
                made = Round(line["at_s"], self.node, self.process_id, *place, line["digest"])
                # Two in a row between the same steps: the second is what the worker goes on with.
                if self.rounds and self.rounds[-1].where == made.where:
                    self.rounds.pop()
                self.rounds.append(made)
            case "end":
                self.end_digest = line["digest"]


class Record:
    """Everything all workers have told so far; `read` goes on where it stopped."""

    def __init__(self, folder: Path) -> None:
        self.workers: dict[int, Worker] = {}
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> None:
        for path in sorted(self._folder.iterdir()):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                new = file.read()
            # The last line may be half written.
            whole = new[: new.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            node, _, process_id = path.name.rpartition(".")
            worker = self.workers.setdefault(int(process_id), Worker(node, int(process_id)))
            for line in whole.splitlines():
                worker.take(json.loads(line))

    def of(self, node: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.node == node]

    def last_step(self) -> int:
        return max((worker.steps[-1].step for worker in self.workers.values() if worker.steps), default=0)

    def met(self, nodes: Collection[str], *, slots: int, since_s: float) -> Round | None:
        """The first round after a time that exactly these nodes had, with all their workers.

        As the last of them saw it.
        """
        found: defaultdict[tuple[int, int], list[Round]] = defaultdict(list)
        for worker in self.workers.values():
            for each in reversed(worker.rounds):
                if each.at_s <= since_s:
                    break
                found[each.where].append(each)
        size = slots * len(nodes)
        met = [
            max(rounds, key=lambda each: each.at_s)
            for rounds in found.values()
            if {each.node for each in rounds} == set(nodes) and len(rounds) == size == rounds[0].world
        ]
        return min(met, key=lambda each: each.at_s, default=None)
