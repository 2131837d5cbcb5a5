"""What a job under soak does, read from its workers' lines while they are written, and held against the rules.

Lines are looked at once and not kept, so that a long run takes no more memory than a short one. Invariant:
every rule that is broken is in `broken`, with the time and the worker; nothing is repaired or excused here
that the faults do not explain.
"""

import json
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]

# A gap between two steps of a survivor that is worth a line in the report.
GAP_TOLD_S = 0.5
GAPS_MAX = 1000
BROKEN_MAX = 100
# Results of rounds are compared while they are not older than so many steps.
ROUNDS_KEPT_STEPS = 5000
ORDINARY_KEPT = 5000


@dataclass(slots=True)
class Worker:
    """One worker process, as its lines tell of it."""

    node: str
    pid: int
    started_s: float
    step: int | None = None
    step_s: float = 0.0
    num_steps: int = 0
    # The last global round it had a part in: what it did since is lost with it.
    together_step: int = 0
    together_s: float = 0.0
    may_jump: bool = False
    ordered: list[str] = field(default_factory=list)
    end_digest: str | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    seconds: float
    at_s: float
    node: str
    pid: int
    step: int


class Watch:
    """`window_steps`: the loss is averaged over so many steps of the job, all ranks together."""

    def __init__(self, folder: Path, *, slots: int, window_steps: int) -> None:
        # All there were, in the order of their starts. Process ids are used again in a long run.
        self.workers: list[Worker] = []
        self._newest: dict[int, Worker] = {}
        self.broken: list[str] = []
        self.gaps: deque[Gap] = deque(maxlen=GAPS_MAX)
        self.num_rounds = 0
        self.totals: Counter[str] = Counter()
        self._folder = folder / "lines"
        self._slots = slots
        self._window_steps = window_steps
        self._offsets: dict[Path, int] = {}
        self._starts: Counter[str] = Counter()
        self._digests: dict[tuple[int, int], str] = {}
        self._losses: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._ordinary_s: deque[float] = deque(maxlen=ORDINARY_KEPT)

    # --- told by whoever hurts the job ------------------------------------------------------------------------

    def expect_start(self, node: str) -> None:
        """The node's workers start, for the first time or by a fault of its own."""
        self._starts[node] += 1

    def excuse_jump(self, node: str) -> None:
        """The node was out while its processes lived: each may go on at the others' step, once."""
        for worker in self.current(node):
            worker.may_jump = True

    # --- asked ------------------------------------------------------------------------------------------------

    def current(self, node: str) -> list[Worker]:
        """The workers of the node's last start, as far as they have told of themselves."""
        found = [worker for worker in self.workers if worker.node == node]
        return found[self._slots * (self._starts[node] - 1) :]

    def is_in(self, node: str, *, since_s: float) -> bool:
        """Whether all of the node's workers had a global round after this time."""
        workers = self.current(node)
        return len(workers) == self._slots and all(worker.together_s > since_s for worker in workers)

    def ordinary_step_s(self) -> float:
        return statistics.median(self._ordinary_s) if self._ordinary_s else 0.0

    def newest_step(self) -> int:
        return max((worker.step or 0 for worker in self.workers), default=0)

    def num_steps(self) -> int:
        return sum(worker.num_steps for worker in self.workers)

    def windows(self) -> list[float]:
        """The mean loss of each window, without the last one, which is not full."""
        means = [total / count for _, (total, count) in sorted(self._losses.items()) if count]
        return means[:-1]

    # --- reading ----------------------------------------------------------------------------------------------

    def read(self) -> None:
        lines: list[Line] = []
        for path in sorted(self._folder.iterdir()):
            offset = self._offsets.get(path, 0)
            if path.stat().st_size == offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                new = file.read()
            # The last line may be half written.
            whole = new[: new.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            lines += map(json.loads, whole.splitlines())
        lines.sort(key=lambda line: float(line["at_s"]))
        self._take(lines)

    def _take(self, lines: Iterable[Line]) -> None:
        for line in lines:
            match line["event"]:
                case "start":
                    self._started(line)
                case "ordered":
                    self._newest[line["pid"]].ordered.append(line["order"])
                case "step":
                    self._stepped(self._newest[line["pid"]], line)
                case "end":
                    self._newest[line["pid"]].end_digest = line["digest"]
                    self.totals.update({name: line[name] for name in ("num_retried", "num_skipped")})

    def _started(self, line: Line) -> None:
        node, pid = line["node"], line["pid"]
        self._newest[pid] = Worker(node, pid, line["at_s"])
        self.workers.append(self._newest[pid])
        num_started = sum(worker.node == node for worker in self.workers)
        if num_started > self._slots * self._starts[node]:
            self._break(line, f"started, though nothing was done to {node}: {num_started} starts of a worker")
            # Told once; what follows is held against the workers that are there now.
            self._starts[node] += 1

    def _stepped(self, worker: Worker, line: Line) -> None:
        step, at_s = line["step"], line["at_s"]
        if worker.step is not None:
            if step != worker.step + 1 and not (worker.may_jump and step > worker.step):
                self._break(line, f"made step {step} after step {worker.step}")
            seconds = at_s - worker.step_s
            self._ordinary_s.append(seconds)
            if worker.may_jump:
                worker.may_jump = step == worker.step + 1
            elif seconds > GAP_TOLD_S:
                self.gaps.append(Gap(seconds, at_s, worker.node, worker.pid, step))
        worker.step, worker.step_s = step, at_s
        worker.num_steps += 1
        if math.isfinite(line["loss"]):
            window = self._losses[step // self._window_steps]
            window[0] += line["loss"]
            window[1] += 1
        else:
            self.totals["steps with a loss that is not finite"] += 1
        if "digest" in line:
            worker.together_step, worker.together_s = step, at_s
            self._compare(line)

    def _compare(self, line: Line) -> None:
        where = line["generation"], line["step"]
        if where not in self._digests:
            self.num_rounds += 1
            stale = [each for each in self._digests if each[1] < where[1] - ROUNDS_KEPT_STEPS]
            for each in stale:
                del self._digests[each]
        if self._digests.setdefault(where, line["digest"]) != line["digest"]:
            self._break(line, f"differs from others after the round of step {where[1]}, generation {where[0]}")

    def _break(self, line: Line, what: str) -> None:
        if len(self.broken) < BROKEN_MAX:
            self.broken.append(f"{line['at_s']:.1f} s: worker {line['pid']} of {line['node']} {what}")
