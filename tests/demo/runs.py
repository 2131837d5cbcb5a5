"""Runs of the demo made by hand, for its facts and its picture."""

from collections.abc import Mapping, Sequence

from elastic_hieravg.demo.facts import Fault, Kind, Run
from elastic_hieravg.demo.record import Round, Step, Worker

STEP_S = 0.1
PERIOD_STEPS = 4
SLOTS = 1
FIRST_LOSS = 4.0


def worker(
    node: str,
    process_id: int,
    steps: Sequence[int],
    *,
    at_s: float = 0.0,
    generation: int = 1,
    world: int = 2,
    end: str = "same",
) -> Worker:
    """One that makes these steps from a time on, with a round of all after every fourth."""
    found = Worker(node, process_id)
    for index, step in enumerate(steps, start=1):
        when_s = at_s + index * STEP_S
        found.steps.append(Step(when_s, step, FIRST_LOSS / (1 + step), busy_s=0.8 * STEP_S))
        if step % PERIOD_STEPS == 0:
            found.rounds.append(Round(when_s, node, process_id, generation, world, step, f"digest {step}"))
    found.end_digest = end
    return found


def run_of(
    *workers: Worker,
    faults: Sequence[Fault] = (),
    starts: Mapping[str, int] | None = None,
    exits: Mapping[str, int] | None = None,
    ended_s: float = 10.0,
) -> Run:
    nodes = {each.node for each in workers}
    return Run(
        workers=workers,
        faults=tuple(faults),
        starts=dict.fromkeys(nodes, 1) if starts is None else starts,
        exits=dict.fromkeys(nodes, 0) if exits is None else exits,
        slots=SLOTS,
        began_s=0.0,
        since_s=0.0,
        ended_s=ended_s,
    )


def hurt_run() -> Run:
    """a is killed at 2 s and starts again; b is frozen at 5 s; c joins at 7 s; a leaves at 9 s."""
    first = worker("a", 1, range(1, 19), end="")
    again = worker("a", 2, range(37, 85), at_s=3.7, end="")
    frozen = worker("b", 3, range(1, 49))
    thawed = worker("b", 3, range(61, 101), at_s=6.0)
    frozen.steps += thawed.steps
    # It comes back with the others' model.
    frozen.rounds += [Round(6.05, "b", 3, 1, 2, 60, "digest 60"), *thawed.rounds]
    joined = worker("c", 4, range(73, 101), at_s=7.2)
    survivor = worker("d", 5, range(1, 21))
    later = worker("d", 5, range(21, 101), at_s=2.2)
    survivor.steps += later.steps
    survivor.rounds += later.rounds
    faults = [
        Fault(Kind.KILLED, "a", 2.0, 4.0, 2.5, 3.0),
        Fault(Kind.FROZEN, "b", 5.0, 6.5, 5.5, 6.0),
        Fault(Kind.JOINED, "c", 6.8, 7.5),
        Fault(Kind.LEFT, "a", 8.0, 9.0, 8.5),
    ]
    return run_of(
        first,
        again,
        frozen,
        joined,
        survivor,
        faults=faults,
        starts={"a": 2, "b": 1, "c": 1, "d": 1},
        exits={"a": 143, "b": 0, "c": 0, "d": 0},
        ended_s=10.5,
    )
