"""Membership stories with the plan after each step: the planner's specification by example.

A scenario file holds commands, each behind `> `, and below each what it prints. To write the printed text
anew after a deliberate change: `pytest tests/test_scenarios.py --regenerate`, then read the diff.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from elastic_hieravg.config import read_nodes
from elastic_hieravg.errors import HierAvgError
from elastic_hieravg.plan import (
    Change,
    GroupKey,
    Hierarchy,
    Misfit,
    Node,
    OnMisfit,
    Plan,
    Topology,
    change_text,
    difference,
    first_keys,
    fit,
    plan_text,
)
from elastic_hieravg.plan.text import ranks_text

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


class Job:
    """A membership that changes step by step, as an agent would follow it, without an agent."""

    hierarchy: Hierarchy

    def __init__(self) -> None:
        self.topology = Topology([Node("nobody", 1)])
        self.warmup_steps = 0
        self.on_misfit: OnMisfit = "repair"
        self.plan: Plan | None = None
        self.keys: tuple[GroupKey, ...] = ()
        self.incarnation = 0

    def run(self, command: str, arguments: list[str]) -> str:
        broken: list[GroupKey] = []
        match command:
            case "hierarchy":
                self.hierarchy = Hierarchy.parse(arguments[0])
                return ""
            case "group-sizes":
                pairs = [argument.split(":") for argument in arguments]
                self.hierarchy = Hierarchy.from_group_sizes({int(period): int(size) for period, size in pairs})
                return ""
            case "warmup-steps":
                self.warmup_steps = int(arguments[0])
                return ""
            case "strict":
                self.on_misfit = "strict"
                return ""
            case "start":
                self.topology = Topology(read_nodes(arguments))
            case "lose":
                self.topology = self.topology.lose(*arguments)
            case "join":
                self.topology = self.topology.join(*read_nodes(arguments))
            case "restart":
                self._restart(arguments[0])
            case "broken":
                broken = self._keys_of(arguments)
            case _:
                raise ValueError(f"unknown command {command}")
        return self._adopt(broken)

    def _restart(self, node_id: str) -> None:
        self.incarnation += 1
        again = next(node for node in self.topology.nodes if node.node_id == node_id)
        renewed = replace(again, incarnation=f"start-{self.incarnation}")
        self.topology = Topology([renewed if node is again else node for node in self.topology.nodes])

    def _keys_of(self, groups: list[str]) -> list[GroupKey]:
        assert self.plan
        found = []
        for key in self.keys:
            ranks = [self.plan.topology.ranks_of(member.node_id)[member.local_rank] for member in key.members]
            if ranks_text(ranks) in groups:
                found.append(key)
        assert len(found) == len(groups)
        return found

    def _adopt(self, broken: list[GroupKey]) -> str:
        generation = self.plan.generation + 1 if self.plan else 1
        plan = fit(
            self.hierarchy,
            self.topology,
            generation=generation,
            warmup_steps=self.warmup_steps,
            on_misfit=self.on_misfit,
        )
        if isinstance(plan, Misfit):
            return f"the job holds: {plan.reason}\nhint: {plan.hint}"
        change: Change | None = None
        if self.plan:
            change = difference(self.plan, plan, keys=self.keys, broken=broken)
        self.plan, self.keys = plan, change.keys if change else first_keys(plan)
        return f"{change_text(change)}\n\n{plan_text(plan)}" if change else plan_text(plan)


def play(text: str) -> str:
    """The scenario with what its commands print now."""
    job = Job()
    told: list[str] = []
    for line in text.splitlines():
        if line.startswith("# "):
            told.append(line)
        elif line.startswith("> "):
            command, *arguments = line.removeprefix("> ").split()
            before = job.topology
            try:
                printed = job.run(command, arguments)
            except HierAvgError as exc:
                job.topology = before
                printed = f"error: {exc}"
            told += ["", line, *([printed] if printed else [])]
    return "\n".join(told) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_reads_as_written(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    played = play(text)
    if request.config.getoption("--regenerate"):
        path.write_text(played)
    else:
        assert played == text


def test_there_are_scenarios_and_each_prints_a_plan() -> None:
    assert len(SCENARIOS) >= 8
    assert all("generation 1:" in path.read_text() for path in SCENARIOS)
