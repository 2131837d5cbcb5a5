"""How long `fit` takes and how much memory it needs, up to 100,000 ranks, and that it grows linearly.

There is no alternative to run beside it: torch's averagers do not plan. What is compared is the planner
with itself at a tenth of the size. Each size runs in a process of its own, so that memory is its own.
"""

import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_hieravg.plan import Hierarchy, Node, Plan, Topology, difference, first_keys, fit

HIERARCHY = Hierarchy.parse("node=4,zone=16,global=64")
SLOTS = 8
NODES_PER_ZONE = 100
SIZES = (125, 1_250, 12_500)
REPEATS = 7
RESULTS = Path(__file__).parent / "results" / "plan.json"


@dataclass(frozen=True, slots=True)
class Row:
    num_nodes: int
    num_ranks: int
    fit_s: float
    change_s: float
    json_s: float
    peak_bytes: int


def measure(num_nodes: int) -> Row:
    nodes = [Node(f"node-{i}", SLOTS, {"zone": f"zone-{i // NODES_PER_ZONE}"}) for i in range(num_nodes)]
    topology = Topology(nodes)
    fit_times, change_times, json_times = [], [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        plan = fit(HIERARCHY, Topology(nodes))
        fit_times.append(time.perf_counter() - start)
        after = fit(HIERARCHY, topology.lose("node-7"), generation=2)
        keys = first_keys(plan)
        start = time.perf_counter()
        difference(plan, after, keys=keys)
        change_times.append(time.perf_counter() - start)
        start = time.perf_counter()
        Plan.from_json(plan.to_json())
        json_times.append(time.perf_counter() - start)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Row(
        num_nodes=num_nodes,
        num_ranks=topology.world_size,
        fit_s=statistics.median(fit_times),
        change_s=statistics.median(change_times),
        json_s=statistics.median(json_times),
        peak_bytes=peak_bytes,
    )


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for num_nodes in SIZES:
        with spawn.Pool(1) as pool:
            rows.append(pool.apply(measure, (num_nodes,)))
    load = os.getloadavg()[0]
    print(f"{HIERARCHY}, nodes of {SLOTS}, medians of {REPEATS}; {os.cpu_count()} cores, load {load:.1f}")
    print("| nodes | ranks | fit | 10 times the nodes | change after a loss | JSON there and back | memory |")
    print("|---|---|---|---|---|---|---|")
    for before, row in zip([None, *rows], rows, strict=False):
        growth = f"{row.fit_s / before.fit_s:.1f} times the time" if before else ""
        print(
            f"| {row.num_nodes:,} | {row.num_ranks:,} | {row.fit_s * 1000:.0f} ms | {growth} "
            f"| {row.change_s * 1000:.0f} ms | {row.json_s * 1000:.0f} ms | {row.peak_bytes / 1e6:.0f} MB |"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": load}
    RESULTS.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
