"""How long `fit` takes and how much memory it needs, up to 100,000 ranks, and that it grows linearly.

There is no alternative to run beside it: torch's averagers do not plan. What is compared is the planner
with itself at a tenth of the size. Each size runs in a process of its own, so that memory is its own.
Exit code 1, and a line on stderr for each, if a figure that was promised is missed.
"""

import argparse
import gc
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise

from report.running import add_flags, begin, finish

from elastic_hieravg.plan import Hierarchy, Node, Plan, Topology, difference, first_keys, fit

HIERARCHY = Hierarchy.parse("node=4,zone=16,global=64")
SLOTS = 8
NODES_PER_ZONE = 100
SIZES, SIZES_QUICK = (125, 1_250, 12_500), (125, 1_250)
REPEATS = 7
# The promised figures. Of the largest size, 100,000 ranks.
FIT_S_MAX = 1.0
PEAK_BYTES_MAX = 500_000_000
# Of every size against the one before: sorting and caches leave a little more than 10.
GROWTH_MAX = 12.0


@dataclass(frozen=True, slots=True)
class Row:
    """Medians, and of `fit` the minimum too: what else the machine does can only add to it."""

    num_nodes: int
    num_ranks: int
    fit_s: float
    fit_min_s: float
    change_s: float
    json_s: float
    peak_bytes: int


@contextmanager
def timed(times_s: list[float]) -> Iterator[None]:
    """Append how long the block takes, without garbage collection, whose turn may come at any time."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    yield
    times_s.append(time.perf_counter() - start)
    gc.enable()


def measure(num_nodes: int) -> Row:
    nodes = [Node(f"node-{i}", SLOTS, {"zone": f"zone-{i // NODES_PER_ZONE}"}) for i in range(num_nodes)]
    topology = Topology(nodes)
    fit_times: list[float] = []
    change_times: list[float] = []
    json_times: list[float] = []
    for _ in range(REPEATS):
        with timed(fit_times):
            plan = fit(HIERARCHY, Topology(nodes))
        after = fit(HIERARCHY, topology.lose("node-7"), generation=2)
        keys = first_keys(plan)
        with timed(change_times):
            difference(plan, after, keys=keys)
        with timed(json_times):
            Plan.from_json(plan.to_json())
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Row(
        num_nodes=num_nodes,
        num_ranks=topology.world_size,
        fit_s=statistics.median(fit_times),
        fit_min_s=min(fit_times),
        change_s=statistics.median(change_times),
        json_s=statistics.median(json_times),
        peak_bytes=peak_bytes,
    )


def growth(before: Row, row: Row) -> float:
    return row.fit_min_s / before.fit_min_s


def misses(rows: list[Row]) -> list[str]:
    """The promised figures that were not reached."""
    last = rows[-1]
    found = []
    if last.fit_s >= FIT_S_MAX:
        found.append(f"{last.num_ranks:,} ranks took {last.fit_s:.2f} s to fit, promised < {FIT_S_MAX:.2f} s")
    if last.peak_bytes >= PEAK_BYTES_MAX:
        peak_mb, limit_mb = last.peak_bytes / 1e6, PEAK_BYTES_MAX / 1e6
        found.append(f"{last.num_ranks:,} ranks took {peak_mb:.0f} MB, promised < {limit_mb:.0f} MB")
    found += [
        f"{row.num_nodes:,} nodes took {growth(before, row):.1f} times the time of {before.num_nodes:,}, "
        f"promised <= {GROWTH_MAX:.1f} times"
        for before, row in pairwise(rows)
        if growth(before, row) > GROWTH_MAX
    ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_flags(parser, quick="without the largest size")
    run = begin("plan", parser.parse_args())
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for num_nodes in SIZES_QUICK if run.is_quick else SIZES:
        with spawn.Pool(1) as pool:
            rows.append(pool.apply(measure, (num_nodes,)))
    how = f"medians of {REPEATS}, growth of minimums, garbage collection off"
    print(f"{HIERARCHY}, nodes of {SLOTS}, {how}\n")
    print("| nodes | ranks | fit | 10 times the nodes | change after a loss | JSON there and back | memory |")
    print("|---|---|---|---|---|---|---|")
    for before, row in zip([None, *rows], rows, strict=False):
        grown = f"{growth(before, row):.1f} times the time" if before else ""
        print(
            f"| {row.num_nodes:,} | {row.num_ranks:,} | {row.fit_s * 1000:.0f} ms | {grown} "
            f"| {row.change_s * 1000:.0f} ms | {row.json_s * 1000:.0f} ms | {row.peak_bytes / 1e6:.0f} MB |"
        )
    figures = {"hierarchy": str(HIERARCHY), "num_repeats": REPEATS, "rows": [asdict(row) for row in rows]}
    return finish(run, figures=figures, missed=misses(rows))


if __name__ == "__main__":
    sys.exit(main())
