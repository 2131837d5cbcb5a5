"""How fast a job has its nodes together again: stock torchrun with our backend and its own, and many agents.

Three parts. Events under stock torchrun, `--rdzv-backend=etcd3` beside `--rdzv-backend=c10d`, from the event to
the next step of the world formed again. 64 agents that join one job on a real etcd, and one of them killed.
Agents on a machine kept busy, of whom none may be dropped. Exit code 1, and a line on stderr for each, if a
figure that was promised is missed.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from many_agents import Joined, Loaded, LossTimes, measure_joins, measure_load
from report.running import add_flags, begin, finish
from torchrun_jobs import (
    BOUND_S,
    EVENTS,
    FRESH,
    NODES_MAX,
    NODES_MIN,
    OURS,
    SETTINGS,
    TUNED,
    WORKER,
    Outcome,
    Setting,
    measure_life,
)

sys.path.append(str(Path(__file__).parent.parent))

from tests.membership.etcd_servers import EtcdCluster, etcd_cluster, free_ports

PARTS = ("torchrun", "join", "load")
# As in a real cluster: every write is on the disk before it is answered.
ETCD_FLAGS = ("--unsafe-no-fsync=false",)
NUM_BUSY = 12
# The promised figures.
JOIN_S_MAX = 5.0
ADOPTION_S_MAX = 0.5
TOTAL_S_MAX = 1.0


def measure_torchrun(
    etcd: EtcdCluster, folder: Path, *, settings: Sequence[Setting], events: Sequence[str], num_repeats: int
) -> list[Outcome]:
    """Every setting in turn, again and again, so that the machine's load falls on all of them alike.

    What a peer did not get over is not tried again: it would be waited for in vain.
    """

    def make_endpoint(backend: str) -> str:
        return ",".join(etcd.endpoints) if backend == "etcd3" else f"127.0.0.1:{free_ports(1)[0]}"

    outcomes: list[Outcome] = []
    for repeat in range(num_repeats):
        for index, setting in enumerate(settings):
            if repeat < setting.num_repeats_max:
                life = folder / f"life-{repeat}-{index}"
                vain = {row.event for row in outcomes if row.setting == setting.name and row.failure}
                left = [event for event in events if setting == OURS or event not in vain]
                outcomes += measure_life(setting, left, life, make_endpoint=make_endpoint)
    return outcomes


def print_torchrun(outcomes: Sequence[Outcome]) -> None:
    print(
        f"\n## Stock torchrun\n\n{NODES_MAX} agents of 1 worker, --nnodes={NODES_MIN}:{NODES_MAX}, an "
        "all-reduce every 50 ms. Seconds from the event to the first step of the world formed again, and to "
        "the start of its last process: what comes between is Python, torch and gloo starting. A node that is "
        "added is timed from the start of its agent's process. Rank 0's node is for c10d the one that hosts "
        f"its store. Fresh stores, and all that is tuned: {FRESH}, without which c10d does not get over a "
        f"lost worker with gloo. Tuned: {TUNED}2 and 3.\n"
    )
    print("| event | backend | next step, s | least-most | processes, s | times ours | runs | load |")
    print("|---" * 8 + "|")
    ours = {event: median_step_s(outcomes, event, OURS.name) for event in EVENTS}
    for event in EVENTS:
        for setting in SETTINGS:
            rows = [row for row in outcomes if (row.event, row.setting) == (event, setting.name)]
            if rows:
                print(torchrun_row(rows, ours_s=ours[event]), flush=True)
    whys = {(row.setting, row.event): row.why for row in outcomes if row.why}
    for (setting_name, event), why in whys.items():
        print(f"\n{setting_name}, {event}: {why}")


def torchrun_row(rows: Sequence[Outcome], *, ours_s: float | None) -> str:
    steps_s = [row.step_s for row in rows if row.step_s is not None]
    processes_s = [row.process_s for row in rows if row.process_s is not None]
    failures = sorted({row.failure for row in rows if row.failure})
    counted = [f"{each} ({sum(row.failure == each for row in rows)})" for each in failures]
    step, spread, process, ratio = ", ".join(counted), "", "", ""
    if steps_s:
        median_s = statistics.median(steps_s)
        step = ", ".join([f"{median_s:.1f}", *counted])
        spread = f"{min(steps_s):.1f}-{max(steps_s):.1f}"
        process = f"{statistics.median(processes_s):.1f}"
        ratio = f"{median_s / ours_s:.1f}" if ours_s else ""
    elif ours_s and any(failure.startswith("not within") for failure in failures):
        ratio = f"more than {BOUND_S / ours_s:.0f}"
    loads = statistics.median(row.load for row in rows)
    where = f"{rows[0].event} | {rows[0].setting}"
    return f"| {where} | {step} | {spread} | {process} | {ratio} | {len(rows)} | {loads:.1f} |"


def median_step_s(outcomes: Sequence[Outcome], event: str, setting: str) -> float | None:
    steps_s = [
        row.step_s
        for row in outcomes
        if (row.event, row.setting) == (event, setting) and row.step_s is not None
    ]
    return statistics.median(steps_s) if steps_s else None


def print_joins(joins: Sequence[Joined]) -> None:
    first = joins[0]
    print(
        f"\n## {first.num_agents} agents on one etcd\n\nThe agents share {first.num_processes} processes, "
        "which have imported everything and begin on a word; each agent makes its own client of etcd. "
        "Join: from that word until the last of them has adopted a generation of all "
        f"{first.num_agents}. Then one that has a process of its own is killed. Detection: until the first "
        "survivor knows. Adoption: from there until the last one has adopted the generation without it, "
        "settling included. Seconds; the last row is medians.\n"
    )
    print("| run | join | generations | detection | adoption | kill to adoption | load before | load at kill |")
    print("|---" * 8 + "|")
    for index, join in enumerate(joins, 1):
        loads = f"{join.load:.1f} | {join.loss.load:.1f}"
        print(f"| {index} | {join.join_s:.2f} | {join.num_generations} | {loss_cells(join.loss)} | {loads} |")
    median = median_loss([join.loss for join in joins])
    print(f"| median | {median_join_s(joins):.2f} | | {loss_cells(median)} | | {median.load:.1f} |", flush=True)


def print_load(loaded: Loaded) -> None:
    print(
        f"\n## {loaded.num_agents} agents under load\n\n{loaded.num_agents} agent processes with the default "
        f"lease and {loaded.num_busy} processes that never wait, for {loaded.span_s:.0f} s. Wanted a core: how "
        "many processes and threads did at once, the median. Then kills, one after the other, with the load "
        "still on; medians in seconds.\n"
    )
    print(
        "| live nodes dropped | times etcd did not answer | wanted a core | load | kills | "
        "detection | adoption | kill to adoption | slowest |"
    )
    print("|---" * 9 + "|")
    kills = f"{len(loaded.kills)} | | | | "
    if loaded.kills:
        slowest_s = max(each.total_s for each in loaded.kills)
        kills = f"{len(loaded.kills)} | {loss_cells(median_loss(loaded.kills))} | {slowest_s:.2f}"
    state = f"{loaded.num_away} | {loaded.num_runnable:.0f} | {loaded.load:.1f}"
    print(f"| {loaded.num_dropped} | {state} | {kills} |", flush=True)


def loss_cells(loss: LossTimes) -> str:
    return f"{loss.detection_s:.3f} | {loss.adoption_s:.2f} | {loss.total_s:.2f}"


def median_loss(losses: Sequence[LossTimes]) -> LossTimes:
    return LossTimes(
        detection_s=statistics.median(each.detection_s for each in losses),
        adoption_s=statistics.median(each.adoption_s for each in losses),
        total_s=statistics.median(each.total_s for each in losses),
        load=statistics.median(each.load for each in losses),
    )


def median_join_s(joins: Sequence[Joined]) -> float:
    return statistics.median(join.join_s for join in joins)


def misses(outcomes: Sequence[Outcome], joins: Sequence[Joined], loaded: Loaded | None) -> list[str]:
    """The promised figures that were not reached."""
    found = [
        f"{OURS.name}, {row.event}: {row.failure}, promised that the job goes on"
        for row in outcomes
        if row.setting == OURS.name and row.failure
    ]
    if joins:
        median = median_loss([join.loss for join in joins])
        agents = f"{joins[0].num_agents} agents"
        checks = [
            (f"{agents}, join", median_join_s(joins), JOIN_S_MAX),
            (f"{agents}, adoption after detection", median.adoption_s, ADOPTION_S_MAX),
            (f"{agents}, adoption after the kill", median.total_s, TOTAL_S_MAX),
        ]
        found += [
            f"{what} took {took_s:.2f} s, promised <= {limit_s} s"
            for what, took_s, limit_s in checks
            if took_s > limit_s
        ]
    if loaded is not None and loaded.num_dropped:
        found.append(f"{loaded.num_dropped} live nodes were dropped under load, promised 0")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    names = [each.name for each in SETTINGS]
    parser.add_argument("--settings", nargs="+", choices=names, default=names, help="of torchrun")
    parser.add_argument("--repeats", type=int, default=3, help="of each event under torchrun")
    parser.add_argument("--joins", type=int, default=5, help="jobs of 64 agents")
    parser.add_argument("--load-s", type=float, default=300.0, help="how long the machine is kept busy")
    add_flags(parser, quick="one event, 8 agents, 5 s of load")
    arguments = parser.parse_args()
    run = begin("rendezvous", arguments)
    is_quick = run.is_quick
    outcomes: list[Outcome] = []
    joins: list[Joined] = []
    loaded: Loaded | None = None
    with tempfile.TemporaryDirectory() as folder, etcd_cluster(Path(folder) / "etcd", flags=ETCD_FLAGS) as etcd:
        if "torchrun" in arguments.parts:
            outcomes = measure_torchrun(
                etcd,
                Path(folder),
                settings=[each for each in SETTINGS if each.name in arguments.settings and not is_quick]
                or [OURS],
                events=(WORKER,) if is_quick else EVENTS,
                num_repeats=1 if is_quick else arguments.repeats,
            )
            print_torchrun(outcomes)
        if "join" in arguments.parts:
            num_agents, num_repeats = (8, 1) if is_quick else (64, arguments.joins)
            joins = measure_joins(etcd.endpoints, num_agents=num_agents, num_repeats=num_repeats)
            print_joins(joins)
        if "load" in arguments.parts:
            span_s = 5.0 if is_quick else arguments.load_s
            loaded = measure_load(etcd.endpoints, num_busy=NUM_BUSY, span_s=span_s)
            print_load(loaded)
    print("\netcd: one member, fsync on")
    figures = {
        "torchrun": [asdict(each) for each in outcomes],
        "joins": [asdict(each) for each in joins],
        "load": asdict(loaded) if loaded else None,
    }
    return finish(run, figures=figures, missed=misses(outcomes, joins, loaded))


if __name__ == "__main__":
    sys.exit(main())
