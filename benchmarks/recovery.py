"""How long the others stand still when a node is lost, and what it costs them: `hieravg run` beside its peers.

The same small model and the same events under `hieravg run` with either store, under stock torchrun, and under
torchft if it is installed. Then the cost of a step with nothing due, and of agents at rest. Exit code 1, and a
line on stderr for each, if a figure that was promised is missed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from recovery_jobs import (
    BOUND_S,
    EVENTS,
    FROZEN,
    HANG_TIMEOUT_S,
    JOINS,
    NAMES,
    NODE,
    OURS,
    SLOTS,
    SYSTEMS,
    WORKER,
    Outcome,
    Rest,
    System,
    measure_life,
    measure_rest,
)
from recovery_script import BATCH, GLOBAL_STEPS, NODE_STEPS
from report.running import add_flags, begin, finish
from torchrun_jobs import FRESH, TUNED

sys.path.append(str(Path(__file__).parent.parent))

import elastic_hieravg as eh
from tests.membership.etcd_servers import EtcdCluster, etcd_cluster

NUM_CALLS, NUM_TRIES = 20_000, 5
# The promised figures.
LEASE_S = 3.0
KILLED_S_MAX = 0.5
FROZEN_S_MAX = LEASE_S + 1.0
JOIN_S_MAX = 0.3
CALL_US_MAX = 20.0
CORE_SHARE_MAX = 0.01


def measure_events(
    etcd: EtcdCluster, folder: Path, *, systems: Sequence[System], events: Sequence[str], num_repeats: int
) -> list[Outcome]:
    """Every system in turn, again and again, so that the machine's load falls on all of them alike.

    What a peer did not get over is not tried again: it would be waited for in vain.
    """
    outcomes: list[Outcome] = []
    for repeat in range(num_repeats):
        for index, system in enumerate(systems):
            if repeat < system.num_repeats_max and system.is_installed:
                life = folder / f"life-{repeat}-{index}"
                vain = {row.event for row in outcomes if row.system == system.name and row.failure}
                left = [event for event in events if system.is_ours or event not in vain]
                outcomes += measure_life(system, left, life, etcd=etcd)
    return outcomes


def measure_alone() -> float:
    """Microseconds of a call with nothing due in a world of one."""
    model = torch.nn.Linear(8, 8)
    with eh.join() as job:
        averager = job.averager(model, torch.optim.SGD(model.parameters(), lr=0.1))
        tries = []
        for _ in range(NUM_TRIES):
            began_s = time.perf_counter()
            for _ in range(NUM_CALLS):
                averager.step(BATCH)
            tries.append((time.perf_counter() - began_s) / NUM_CALLS * 1e6)
    return statistics.median(tries)


# --- tables ---------------------------------------------------------------------------------------------------


def print_events(outcomes: Sequence[Outcome], *, systems: Sequence[System], events: Sequence[str]) -> None:
    print(
        f"\n## Events\n\n{len(NAMES)} nodes of {SLOTS} workers on one machine, an average over the node every "
        f"{NODE_STEPS} steps and over all every {GLOBAL_STEPS}. Gap: the longest time between two steps of a "
        "worker whose node nothing was done to, beside an ordinary step. Next round: from the event to the "
        "next global average in the membership that follows. Lost: steps that a survivor had made and has to "
        f"make again. Restarted: survivors with another process, of all. Ours with --hang-timeout-s "
        f"{HANG_TIMEOUT_S:.0f} and defaults otherwise. torchrun saves a checkpoint with every global average; "
        f"tuned: {TUNED}3; tuned, fresh stores, torchft: {FRESH}. torchft: a replica group and a torchrun for "
        "each node, LocalSGD; tuned: heartbeat and join timeouts of 1 s, others of 5 s, quorum 20 s. The "
        "coordinator is the agent that hosts the store, all of etcd, or the lighthouse. A node that joins "
        "starts Python and torch on the same machine. Medians.\n"
    )
    print(
        "| event | runtime | gap, s | least-most | ordinary, s | next round, s | lost | restarted "
        "| runs | load |"
    )
    print("|---" * 10 + "|")
    for event in events:
        for system in systems:
            rows = [row for row in outcomes if (row.event, row.system) == (event, system.name)]
            if rows:
                print(event_row(rows), flush=True)
            elif not system.is_installed:
                print(f"| {event} | {system.name} | not installed | | | | | | 0 | |", flush=True)


def event_row(rows: Sequence[Outcome]) -> str:
    failures = sorted({row.failure for row in rows if row.failure})
    counted = [f"{each} ({sum(row.failure == each for row in rows)})" for each in failures]
    whole = [row for row in rows if row.gap_s is not None]
    gap, spread, recovery, lost, restarted = ", ".join(counted), "", "", "", ""
    if whole:
        gaps_s = [row.gap_s for row in whole if row.gap_s is not None]
        gap = ", ".join([f"{statistics.median(gaps_s):.3f}", *counted])
        spread = f"{min(gaps_s):.3f}-{max(gaps_s):.3f}"
        recovery = f"{middle(whole, lambda row: row.recovery_s or 0.0):.2f}"
        lost = f"{middle(whole, lambda row: row.steps_lost):.0f}"
        restarted = f"{middle(whole, lambda row: row.num_restarted):.0f}"
    ordinary, load = middle(rows, lambda row: row.ordinary_s), middle(rows, lambda row: row.load)
    cells = (rows[0].event, rows[0].system, gap, spread, f"{ordinary:.3f}", recovery, lost, restarted)
    return f"| {' | '.join(cells)} | {len(rows)} | {load:.1f} |"


def print_rest(alone_us: float, rests: Sequence[Rest]) -> None:
    print(
        "\n## At rest\n\n`averager.step()` with nothing due, in microseconds, the median; and how much of a "
        f"core each of {len(NAMES)} agents takes while its workers make no steps.\n"
    )
    print("| job | step, us | calls | agents, % of a core | load |\n|---|---|---|---|---|")
    print(f"| a world of one | {alone_us:.2f} | {NUM_CALLS * NUM_TRIES} | | |")
    for rest in rests:
        shares = ", ".join(f"{share:.2%}" for share in rest.core_shares)
        print(
            f"| {rest.system} | {rest.call_us:.2f} | {rest.num_calls} | {shares} | {rest.load:.1f} |",
            flush=True,
        )


def middle(rows: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
    return statistics.median(value(row) for row in rows)


# --- what was promised ----------------------------------------------------------------------------------------


def misses(outcomes: Sequence[Outcome], alone_us: float, rests: Sequence[Rest]) -> list[str]:
    """The promised figures that were not reached."""
    found = []
    for system in OURS:
        for event in EVENTS:
            rows = [row for row in outcomes if (row.event, row.system) == (event, system.name)]
            found += [f"{system.name}, {event}: {what}" for what in event_misses(event, rows)]
    calls = [("a world of one", alone_us), *((rest.system, rest.call_us) for rest in rests)]
    found += [
        f"{where}: a step with nothing due took {call_us:.1f} us, promised < {CALL_US_MAX:.0f} us"
        for where, call_us in calls
        if call_us >= CALL_US_MAX
    ]
    return found + [
        f"{rest.system}: an agent at rest took {max(rest.core_shares):.2%} of a core, "
        f"promised < {CORE_SHARE_MAX:.0%}"
        for rest in rests
        if max(rest.core_shares) >= CORE_SHARE_MAX
    ]


def event_misses(event: str, rows: Sequence[Outcome]) -> list[str]:
    found = [f"{row.failure}, promised that the job goes on" for row in rows if row.failure]
    whole = [row for row in rows if row.gap_s is not None]
    found += [f"{row.num_restarted} survivors restarted, promised 0" for row in whole if row.num_restarted]
    found += [f"survivors lost {row.steps_lost} steps, promised 0" for row in whole if row.steps_lost]
    limits_s = {WORKER: KILLED_S_MAX, NODE: KILLED_S_MAX, FROZEN: FROZEN_S_MAX}
    if whole and event in limits_s:
        beyond_s = middle(whole, lambda row: (row.gap_s or 0.0) - row.ordinary_s)
        if beyond_s >= limits_s[event]:
            found.append(
                f"survivors stood still for {beyond_s:.2f} s beyond a step, promised < {limits_s[event]} s"
            )
    if whole and event == JOINS:
        beyond_s = middle(whole, lambda row: (row.gap_s or 0.0) - row.ordinary_s - row.round_s)
        if beyond_s > JOIN_S_MAX:
            found.append(
                f"survivors stood still for {beyond_s:.2f} s beyond a step and the round that takes the joiner "
                f"in, promised <= {JOIN_S_MAX} s"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [each.name for each in SYSTEMS]
    parser.add_argument("--systems", nargs="+", choices=names, default=names, help="the runtimes")
    parser.add_argument("--repeats", type=int, default=5, help="of each event; what waits in vain is run once")
    parser.add_argument("--rest-s", type=float, default=10.0, help="how long agents are looked at")
    add_flags(parser, quick="one event with one runtime")
    arguments = parser.parse_args()
    run = begin("recovery", arguments)
    is_quick = run.is_quick
    systems = [each for each in (OURS[:1] if is_quick else SYSTEMS) if each.name in arguments.systems]
    events = (WORKER,) if is_quick else EVENTS
    alone_us = measure_alone()
    with tempfile.TemporaryDirectory() as folder, etcd_cluster(Path(folder) / "etcd") as etcd:
        rests = [
            measure_rest(
                system, Path(folder) / f"rest-{index}", etcd=etcd, span_s=2.0 if is_quick else arguments.rest_s
            )
            for index, system in enumerate(systems)
            if system.is_ours
        ]
        outcomes = measure_events(
            etcd,
            Path(folder),
            systems=systems,
            events=events,
            num_repeats=1 if is_quick else arguments.repeats,
        )
    print_events(outcomes, systems=systems, events=events)
    print_rest(alone_us, rests)
    figures = {
        "events": [asdict(each) for each in outcomes],
        "alone_us": alone_us,
        "rest": [asdict(each) for each in rests],
        "bound_s": BOUND_S,
    }
    return finish(run, figures=figures, missed=misses(outcomes, alone_us, rests))


if __name__ == "__main__":
    sys.exit(main())
