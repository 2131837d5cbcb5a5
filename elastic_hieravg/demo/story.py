"""What happens in the demo, scene by scene: nodes are started, hurt and healed, one after the other.

A scene ends when the workers' own lines show it: a round of all ranks that exactly the right nodes had. No
fault is healed by waiting for a time to pass, and nothing waits for ever. Invariant: whatever happens, nothing
is left running.
"""

import functools
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from elastic_hieravg.demo.facts import Fault, Gap, Kind, Run, longest_gap
from elastic_hieravg.demo.nodes import SLOTS, Nodes
from elastic_hieravg.demo.record import Record, Round
from elastic_hieravg.demo.screen import PlanShown, Screen, Shown, generation_text, plan_text
from elastic_hieravg.demo.watching import Watcher
from elastic_hieravg.errors import DemoError, Problem
from elastic_hieravg.metrics.status_reading import Status

FIRST = ("a", "b", "c")
# The node that nothing is done to: its page is offered, and its agent tells what is shown.
WATCHED = "b"
# On a machine that does much else; else it takes seconds.
WITHIN_S = 120.0
POLL_S = 0.1
DRAW_S = 0.25
# So many steps are made between two faults.
CALM_STEPS = 60
LOG_LINES_SHOWN = 5
LOSSES_KEPT = 600

T = TypeVar("T")
_URL = re.compile(r"http://127\.0\.0\.1:(\d+)/")


class Story:
    """`seconds`: how long it goes on at least, the faults spread over it; they take as long as they take."""

    def __init__(self, folder: Path, screen: Screen, *, seconds: float, has_faults: bool) -> None:
        self._screen = screen
        self._seconds = seconds
        self._nodes = Nodes(folder)
        self._record = Record(folder / "lines")
        self._folder = folder
        self._watcher: Watcher | None = None
        self._began_s = time.monotonic()
        self._present = set(FIRST)
        self._faults: list[Fault] = []
        self._exits: dict[str, int] = {}
        self._plans: deque[PlanShown] = deque(maxlen=2)
        self._losses: deque[float] = deque(maxlen=LOSSES_KEPT)
        self._seen: Status | None = None
        self._drawn_s = 0.0
        self._told_generation = 0
        faults = (self._kill, self._freeze, self._join, self._leave)
        self._scenes: tuple[Callable[[], None], ...] = faults if has_faults else ()
        self._num_scenes_done = 0

    def play(self) -> Run:
        """All of it. Whatever ends it, all processes have ended when this does."""
        try:
            since_s = self._begin()
            for index, scene in enumerate(self._scenes, start=1):
                self._calm(self._seconds * index / (len(self._scenes) + 1))
                scene()
                self._num_scenes_done += 1
            self._calm(self._seconds)
            self._end()
        finally:
            self._close()
        return Run(
            workers=tuple(self._record.workers.values()),
            faults=tuple(self._faults),
            starts=dict(self._nodes.starts),
            exits=self._exits,
            slots=SLOTS,
            began_s=self._began_s,
            since_s=since_s,
            ended_s=time.monotonic(),
        )

    # --- scenes -----------------------------------------------------------------------------------------------

    def _begin(self) -> float:
        self._say(
            f"three nodes of two workers start: {', '.join(FIRST)}; their logs are in {self._folder}/logs"
        )
        self._say("they import torch first, which takes some seconds")
        # Whoever is first serves the store: here the one that is killed, and not the one that freezes.
        first, *others = FIRST
        self._nodes.start(first)
        self._until("a serves the store", self._nodes.is_store_served)
        for name in others:
            self._nodes.start(name)
        self._until("importing torch: a, b and c start", self._are_all_there)
        met = self._await_met("a, b and c find each other", since_s=0.0)
        self._num_scenes_done += 1
        self._say(f"a, b and c train together, 6 ranks; loss {self._loss():.2f}")
        port = self._until("the page is served", self._find_port)
        self._say(f"the job's page: http://127.0.0.1:{port}/")
        self._watcher = Watcher(port)
        return met.at_s

    def _kill(self) -> None:
        at_s = self._hurt(
            "a", "node a, with rank 0 and the store, is killed: SIGKILL for its agent and both workers"
        )
        self._nodes.kill("a")
        without = self._await_met("b and c go on without a", since_s=at_s)
        self._tell_without(at_s, without)
        back_s = time.monotonic()
        self._say("node a starts again")
        self._nodes.start("a")
        healed = self._await_met("a comes back", since_s=back_s, joined="a")
        self._heal(Fault(Kind.KILLED, "a", at_s, healed.at_s, without.at_s, back_s))

    def _freeze(self) -> None:
        at_s = self._hurt("c", "node c is frozen: SIGSTOP for its agent and both workers; its lease lasts 3 s")
        self._nodes.freeze("c")
        without = self._await_met("a and b go on without c", since_s=at_s)
        self._tell_without(at_s, without)
        back_s = time.monotonic()
        self._say("node c thaws: SIGCONT")
        self._nodes.thaw("c")
        healed = self._await_met("c comes back", since_s=back_s, joined="c")
        self._heal(Fault(Kind.FROZEN, "c", at_s, healed.at_s, without.at_s, back_s))

    def _join(self) -> None:
        at_s = time.monotonic()
        self._say("node d, which was not there before, starts")
        self._nodes.start("d")
        healed = self._await_met("d joins", since_s=at_s, joined="d")
        self._heal(Fault(Kind.JOINED, "d", at_s, healed.at_s))

    def _leave(self) -> None:
        at_s = self._hurt("c", "node c is asked to leave: SIGTERM, as before a preemption")
        self._nodes.ask_to_leave("c")
        self._exits["c"] = self._until("c leaves", lambda: self._nodes.exit_code("c"))
        without = self._await_met("a, b and d go on without c", since_s=at_s)
        self._heal(Fault(Kind.LEFT, "c", at_s, max(time.monotonic(), without.at_s), without.at_s))

    def _calm(self, until_s: float) -> None:
        """Some training that nobody disturbs, and not over before so many seconds after the start."""
        target, end_s = self._record.last_step() + CALM_STEPS, self._began_s + until_s
        within_s = max(0.0, end_s - time.monotonic()) + WITHIN_S
        self._until(
            "all is calm",
            lambda: self._record.last_step() >= target and time.monotonic() >= end_s,
            within_s=within_s,
        )

    def _end(self) -> None:
        self._say("the training ends, with one last round of all")
        self._nodes.stop()
        for name in sorted(self._present):
            find = functools.partial(self._nodes.exit_code, name)
            self._exits[name] = self._until("the last round of all", find)
        self._record.read()

    # --- what scenes are made of ------------------------------------------------------------------------------

    def _hurt(self, name: str, told: str) -> float:
        self._present.discard(name)
        self._say(told)
        return time.monotonic()

    def _tell_without(self, at_s: float, without: Round) -> None:
        names = " and ".join(sorted(self._present))
        self._say(f"{names} have averaged without it after {without.at_s - at_s:.1f} s, {self._gap_text(at_s)}")

    def _heal(self, fault: Fault) -> None:
        self._faults.append(fault)
        names = ", ".join(sorted(self._present))
        self._say(f"{names} train together, {len(self._present) * SLOTS} ranks; loss {self._loss():.2f}")

    def _gap_text(self, since_s: float) -> str:
        workers = [worker for worker in self._record.workers.values() if worker.node in self._present]
        gap: Gap = longest_gap(workers, self._faults, since_s=since_s)
        return f"their longest gap between two steps is {gap.seconds:.2f} s"

    def _await_met(self, what: str, *, since_s: float, joined: str | None = None) -> Round:
        """Until exactly those who are present have had a round of all ranks, and with them who joined."""
        self._present |= {joined} if joined else set()
        return self._until(what, lambda: self._record.met(self._present, slots=SLOTS, since_s=since_s))

    def _until(self, what: str, find: Callable[[], T | None], *, within_s: float = WITHIN_S) -> T:
        """What is found, as soon as it is; None and False are nothing."""
        deadline_s = time.monotonic() + within_s
        while True:
            self._record.read()
            found = find()
            if found is not None and found is not False:
                return found
            fallen = self._nodes.fallen()
            if fallen is not None:
                code = self._nodes.exit_code(fallen)
                raise self._failure(f"node {fallen} has ended with exit code {code}", name=fallen)
            if time.monotonic() > deadline_s:
                raise self._failure(f"not within {within_s:.0f} s: {what}", name=WATCHED)
            if time.monotonic() >= self._drawn_s + DRAW_S:
                self._drawn_s = time.monotonic()
                self._refresh(what)
            time.sleep(POLL_S)

    def _failure(self, message: str, *, name: str) -> DemoError:
        told = self._nodes.log(name).read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        log = "\n  ".join([f"the log of {name} ends with:", *told])
        return DemoError(Problem(f"{message}\n{log}", f"read the logs in {self._folder}/logs"))

    def _are_all_there(self) -> bool:
        """Whether every worker of the first nodes has spoken."""
        return all(len(self._record.of(name)) >= SLOTS for name in FIRST)

    def _find_port(self) -> int | None:
        found = _URL.search(self._nodes.log(WATCHED).read_text(errors="replace"))
        return int(found[1]) if found else None

    def _loss(self) -> float:
        newest = [worker.steps[-1].loss for worker in self._record.workers.values() if worker.steps]
        return sum(newest) / len(newest) if newest else 0.0

    # --- what is shown ----------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._screen.say(time.monotonic() - self._began_s, text)

    def _refresh(self, doing: str) -> None:
        status = self._watcher.newest if self._watcher else None
        if status is not None and status is not self._seen:
            self._seen = status
            self._tell_generations(status)
            self._losses.extend(value for name, value in status.values if name == "loss" and value is not None)
        plans = (None, None, *self._plans)
        shown = Shown(
            time.monotonic() - self._began_s,
            doing,
            self._num_scenes_done,
            len(self._scenes) + 2,
            status,
            plans[-2],
            plans[-1],
            tuple(self._losses),
        )
        self._screen.show(shown)

    def _tell_generations(self, status: Status) -> None:
        """Say what nobody was told of yet. What was before the first look is over."""
        if not status.generation or status.generation <= self._told_generation:
            return
        before = self._told_generation
        for event in status.events:
            if event.generation and event.generation > before > 0:
                self._say(generation_text(event, before=before))
                before = event.generation
        self._told_generation = status.generation
        if status.levels:
            self._tell_plan(PlanShown(status.generation, status.levels))

    def _tell_plan(self, plan: PlanShown) -> None:
        if self._plans and plan_text(plan) == plan_text(self._plans[-1]):
            self._plans[-1] = plan
            return
        self._plans.append(plan)
        self._say(f"plan of generation {plan.generation}: {plan_text(plan)}")

    def _close(self) -> None:
        try:
            self._nodes.close()
        finally:
            if self._watcher is not None:
                self._watcher.close()
