"""How long a round takes: torch's averager, raw all-reduce, ours, and what the memory allows, side by side.

All candidates average the same model in the same processes, one round of each after the other, so that the
machine's load falls on all of them alike. A round's time is the span from the first rank's start to the
last rank's end. Exit code 1, and a line on stderr for each, if a figure that was promised is missed.
"""

import argparse
import importlib.util
import math
import multiprocessing
import os
import random
import statistics
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report.running import add_flags, begin, finish
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.averaging.flat import FlatModel
from elastic_hieravg.averaging.memory import create_file, map_file, page_aligned
from elastic_hieravg.averaging.mesh import Mesh, Peer
from elastic_hieravg.averaging.rounds import AveragingGroup, Contribution
from elastic_hieravg.plan import Hierarchy, Node, Topology, fit

Shape = tuple[int, ...]

TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 900.0
WARMUP_ROUNDS = 2
HEADER_BYTES, HEADER_ROUNDS = 170, 500
STEP_CALLS = 100_000
# Copies of the model per rank that exist at once, with some room: see `candidates`.
COPIES_PER_RANK = 7

TORCH, FLAT, TENSORS, TORCHFT = "torch averager", "flat all-reduce", "per tensor", "torchft LocalSGD"
HOST, NETWORK, NODES, COMPAT = "ours, same host", "ours, process group", "ours, 2 x 2", "ours, compat"
COPY = "copy"


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in milliseconds of one model on one number of ranks, and the load after them."""

    model: str
    num_ranks: int
    num_values: int
    num_tensors: int
    load: float
    ms: dict[str, float]

    @property
    def limit_ms(self) -> float:
        """What the memory allows: 3 + 1/k passes over the model on each of k ranks; a copy is two passes.

        Each copy is read once, a k-th of the result written, the result read, and the copy written once.
        """
        return self.ms[COPY] * (1.5 + 0.5 / self.num_ranks)

    def gain(self, name: str) -> float:
        return self.ms[TORCH] / self.ms[name]

    def of_limit(self, name: str) -> float:
        return self.ms[name] / self.limit_ms

    def of_raw(self, name: str) -> float:
        return self.ms[name] / min(self.ms[FLAT], self.ms[TENSORS])


@dataclass(frozen=True, slots=True)
class Costs:
    """What does not depend on the model. `memory` is relative to one copy of it, the worst rank's."""

    num_ranks: int
    header_us: dict[str, float]
    step_us: float
    memory: dict[str, float]
    load: float


def equal_tensors(num_values: int) -> list[Shape]:
    return [(num_values // 60,)] * 60


def resnet_50() -> list[Shape]:
    def convolution(wide: int, narrow: int, kernel: int) -> list[Shape]:
        return [(wide, narrow, kernel, kernel), (wide,), (wide,)]

    shapes, width = convolution(64, 3, 7), 64
    for inner, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            shapes += convolution(inner, width, 1) + convolution(inner, inner, 3)
            shapes += convolution(4 * inner, inner, 1)
            shapes += [] if block else convolution(4 * inner, width, 1)
            width = 4 * inner
    return [*shapes, (1000, width), (1000,)]


def gpt_2() -> list[Shape]:
    width = 768
    norm: list[Shape] = [(width,), (width,)]
    linear = [[(narrow * width, wide * width), (wide * width,)] for narrow, wide in ((1, 3), (1, 1))]
    widening: list[Shape] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block = [*norm, *chain.from_iterable(linear), *norm, *widening]
    return [(50257, width), (1024, width), *block * 12, *norm]


# The shapes, and how many rounds of each candidate.
MODELS: dict[str, tuple[list[Shape], int]] = {
    "1M": (equal_tensors(1_000_000), 31),
    "10M": (equal_tensors(10_000_000), 21),
    "resnet50": (resnet_50(), 15),
    "50M": (equal_tensors(50_000_000), 11),
    "gpt2": (gpt_2(), 7),
}


@dataclass(frozen=True, slots=True)
class World:
    """One rank's way to the others; `mesh` is the benchmark's own, for barriers outside of what is timed."""

    rank: int
    num_ranks: int
    store: dist.Store
    mesh: Mesh

    def gather(self, record: bytes = b"") -> list[bytes]:
        return self.mesh.gather(record, timeout_s=TIMEOUT_S)

    def group(self, flat: FlatModel, name: str, *, ranks_per_node: int) -> AveragingGroup:
        store = dist.PrefixStore(name, self.store)
        peers = make_peers(self.num_ranks, ranks_per_node=ranks_per_node)
        return AveragingGroup(flat, store, level=name, index=self.rank, peers=peers)


def make_peers(num_ranks: int, *, ranks_per_node: int) -> tuple[Peer, ...]:
    return tuple(
        Peer(f"rank {rank}", f"node {rank // ranks_per_node}", "127.0.0.1") for rank in range(num_ranks)
    )


def make_parameters(shapes: Sequence[Shape], *, seed: int) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        # Without a gradient torch's averager leaves a parameter out. This one takes no memory.
        parameter.grad = torch.zeros(()).expand(parameter.shape)
    return parameters


def make_flat(shapes: Sequence[Shape], *, seed: int) -> FlatModel:
    parameters = make_parameters(shapes, seed=seed)
    return FlatModel([f"parameter {index}" for index in range(len(shapes))], lambda: parameters)


class Agreeing:
    """A manager for torchft that agrees to everything at once: what is timed is a floor of its rounds."""

    def start_quorum(self) -> None: ...

    def should_commit(self) -> bool:
        return True

    def allreduce(self, values: Tensor) -> Any:
        work: Any = dist.all_reduce(values.div_(dist.get_world_size()), async_op=True)
        return work


def candidates(world: World, shapes: Sequence[Shape]) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}

    theirs = make_parameters(shapes, seed=world.rank)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    found[TORCH] = lambda: averager.average_parameters(theirs)

    raw = torch.randn(sum(map(math.prod, shapes)))
    parts = torch.split(raw, [math.prod(shape) for shape in shapes])
    found[FLAT] = lambda: dist.all_reduce(raw)

    def reduce_parts() -> None:
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            work.wait()

    found[TENSORS] = reduce_parts

    flat = make_flat(shapes, seed=world.rank)
    layouts = {HOST: world.num_ranks, NETWORK: 1} | ({NODES: 2} if world.num_ranks == 4 else {})
    for name, ranks_per_node in layouts.items():
        group = world.group(flat, name, ranks_per_node=ranks_per_node)
        found[name] = partial(group.run, Contribution(step=1, samples=(1.0,)))

    if is_there("elastic_hieravg.compat"):
        # By name: it may not be there, and then it has no types either.
        compat: Any = importlib.import_module("elastic_hieravg.compat")
        users = make_parameters(shapes, seed=world.rank)
        ours = compat.PeriodicModelAverager(period=1, warmup_steps=0)
        found[COMPAT] = lambda: ours.average_parameters(users)
    if is_there("torchft"):
        torchft: Any = importlib.import_module("torchft.local_sgd")
        model = nn.ParameterList(make_parameters(shapes, seed=world.rank))
        optimizer = torch.optim.SGD(model.parameters())
        found[TORCHFT] = torchft.LocalSGD(Agreeing(), model, optimizer, sync_every=1).sync

    own = flat.banks[0].values
    result = shared_result(world, own)
    found[COPY] = lambda: own.copy_(result)
    return found


def shared_result(world: World, own: Tensor) -> Tensor:
    """Memory like that of a round's result, for a bare copy out of it."""
    num_bytes = page_aligned(own.numel() * own.element_size())
    mine = create_file(num_bytes if world.rank == 0 else page_aligned(1))
    files = world.mesh.share_file(mine, timeout_s=TIMEOUT_S)
    result = map_file(files[0], num_bytes).view(own.dtype)[: own.numel()]
    for file in files:
        os.close(file)
    if world.rank == 0:
        result.copy_(own)
    world.gather()
    return result


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def measure_rounds(world: World, *, shapes: Sequence[Shape], num_rounds: int) -> dict[str, float]:
    """The median span of each candidate's rounds, in milliseconds."""
    runs = candidates(world, shapes)
    spans_ms: dict[str, list[float]] = {name: [] for name in runs}
    times = struct.Struct("<2d")
    for index in range(-WARMUP_ROUNDS, num_rounds):
        # Another order every time, the same on all ranks: nobody always finds the cache as one other left it.
        for name in random.Random(index).sample(list(runs), len(runs)):
            world.gather()
            started_s = time.monotonic()
            runs[name]()
            record = times.pack(started_s, time.monotonic())
            starts, ends = zip(*map(times.unpack_from, world.gather(record)), strict=True)
            if index >= 0:
                spans_ms[name].append((max(ends) - min(starts)) * 1000)
    return {name: statistics.median(spans) for name, spans in spans_ms.items()}


def measure_costs(world: World, *, shapes: Sequence[Shape]) -> Costs:
    layouts = {"one node": world.num_ranks, "a node each": 1} | ({"2 x 2": 2} if world.num_ranks == 4 else {})
    memory = {
        name: measure_memory(world, shapes, name=f"memory {name}", ranks_per_node=count)
        for name, count in layouts.items()
    }
    return Costs(
        num_ranks=world.num_ranks,
        header_us={
            "Unix sockets": measure_header(world, ranks_per_node=world.num_ranks),
            "TCP": measure_header(world, ranks_per_node=1),
        },
        step_us=measure_step(world),
        memory=memory,
        load=os.getloadavg()[0],
    )


def measure_header(world: World, *, ranks_per_node: int) -> float:
    flat = make_flat([(1000,)], seed=world.rank)
    group = world.group(flat, f"header {ranks_per_node}", ranks_per_node=ranks_per_node)
    times_us = []
    for _ in range(HEADER_ROUNDS):
        started_s = time.perf_counter()
        group.gather(bytes(HEADER_BYTES))
        times_us.append((time.perf_counter() - started_s) * 1e6)
    world.gather()
    group.close()
    return statistics.median(times_us)


def measure_step(world: World) -> float:
    """The median time of a step after which nothing is due, one rank at a time."""
    plan = fit(Hierarchy.parse(f"global={10 * STEP_CALLS}"), Topology([Node("a", world.num_ranks)]))
    parameters = make_parameters([(1000,)], seed=world.rank)
    store = dist.PrefixStore("step", world.store)
    times_us = []
    with HierarchicalAverager(parameters, plan=plan, rank=world.rank, store=store) as averager:
        for _ in range(STEP_CALLS if world.rank == 0 else 0):
            started_ns = time.perf_counter_ns()
            averager.step()
            times_us.append((time.perf_counter_ns() - started_ns) / 1000)
        world.gather()
    return statistics.median(times_us) if times_us else 0.0


def measure_memory(world: World, shapes: Sequence[Shape], *, name: str, ranks_per_node: int) -> float:
    """What a group and its rounds need beside the parameters, at most, relative to them."""
    flat = make_flat(shapes, seed=world.rank)
    world.gather()
    before_kb = memory_kb("smaps_rollup", "Pss:")
    world.gather()
    group = world.group(flat, name, ranks_per_node=ranks_per_node)
    contribution = Contribution(step=1, samples=(1.0,))
    group.run(contribution)
    # Resets the peak, so that it is the peak of the second round.
    Path("/proc/self/clear_refs").write_text("5")
    group.run(contribution)
    passing_kb = memory_kb("status", "VmHWM:") - memory_kb("status", "VmRSS:")
    world.gather()
    lasting_kb = memory_kb("smaps_rollup", "Pss:") - before_kb
    world.gather()
    group.close()
    return (lasting_kb + passing_kb) * 1024 / flat.num_bytes


def memory_kb(file: str, label: str) -> int:
    lines = (Path("/proc/self") / file).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(label)).split()[1])


def on_ranks(num_ranks: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """What `function(world, **arguments)` returns on each of so many ranks, in processes of their own."""
    spawn = multiprocessing.get_context("spawn")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    try:
        for rank in range(num_ranks):
            ours, theirs = spawn.Pipe()
            call = partial(function, **arguments)
            process = spawn.Process(
                target=serve, args=(rank, num_ranks, server.port, theirs, call), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        answers = []
        for process, ours in started:
            if not ours.poll(RUN_TIMEOUT_S):
                raise TimeoutError(f"{process.name} did not answer within {RUN_TIMEOUT_S} s")
            answers.append(ours.recv())
        for process, _ in started:
            process.join(timeout=TIMEOUT_S)
        return answers
    finally:
        for process, ours in started:
            process.kill()
            process.join()
            ours.close()


def serve(rank: int, num_ranks: int, port: int, answer: Connection, function: Callable[..., Any]) -> None:
    threading.Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "When period is 1")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    default = dist.PrefixStore("default", store)
    dist.init_process_group("gloo", store=default, rank=rank, world_size=num_ranks)
    peers = make_peers(num_ranks, ranks_per_node=num_ranks)
    mesh = Mesh(dist.PrefixStore("barrier", store), index=rank, peers=peers, timeout_s=TIMEOUT_S)
    world = World(rank, num_ranks, store, mesh)
    answer.send(function(world))
    world.gather()
    dist.destroy_process_group()


def exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def measure_row(model: str, num_ranks: int) -> Row | None:
    shapes, num_rounds = MODELS[model]
    num_values = sum(map(math.prod, shapes))
    needed_kb = num_values * 4 * COPIES_PER_RANK * num_ranks // 1024
    free_kb = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
    if free_kb < needed_kb:
        print(
            f"{model} with {num_ranks} ranks left out: it needs {needed_kb // 1024} MB, "
            f"and {free_kb // 1024} MB are available",
            file=sys.stderr,
        )
        return None
    ms = on_ranks(num_ranks, measure_rounds, shapes=shapes, num_rounds=num_rounds)[0]
    return Row(model, num_ranks, num_values, len(shapes), os.getloadavg()[0], ms)


def print_table(rows: Sequence[Row]) -> None:
    columns = [TORCH, FLAT, TENSORS, TORCHFT, HOST, COMPAT, NETWORK, NODES]
    print(
        f"\n{rows[0].num_ranks} ranks; ms; x torch: times faster than torch's averager; "
        "x limit: times the memory limit; x raw: times the better raw all-reduce\n"
    )
    print(f"| model | {' | '.join(columns)} | memory limit | load |")
    print("|---" * (len(columns) + 3) + "|")
    for row in rows:
        cells = [cell(row, name) for name in columns]
        size = f"{row.model} ({row.num_values / 1e6:.1f} M in {row.num_tensors})"
        print(f"| {size} | {' | '.join(cells)} | {row.limit_ms:.2f} | {row.load:.1f} |", flush=True)


def cell(row: Row, name: str) -> str:
    if name not in row.ms:
        return "not installed" if name in (COMPAT, TORCHFT) else "-"
    text = f"{row.ms[name]:.2f}"
    if name in (HOST, COMPAT):
        text += f" ({row.gain(name):.1f} x torch, {row.of_limit(name):.2f} x limit)"
    elif name in (NETWORK, NODES):
        text += f" ({row.gain(name):.2f} x torch, {row.of_raw(name):.2f} x raw)"
    return text


def print_costs(costs: Costs) -> None:
    headers = ", ".join(f"{name} {us:.0f} us" for name, us in costs.header_us.items())
    memory = ", ".join(f"{name} {ratio:.2f}" for name, ratio in costs.memory.items())
    print(f"\nheader of {HEADER_BYTES} bytes, {costs.num_ranks} idle ranks: {headers}; load {costs.load:.1f}")
    print(f"step with nothing due: {costs.step_us:.2f} us")
    print(f"extra memory per rank, in copies of the parameters: {memory}")


def misses(rows: Sequence[Row], costs: Costs) -> list[str]:
    """The promised figures that were not reached."""
    checks: list[tuple[str, float, str, float]] = []
    for row in rows:
        where = f"{row.model}, {row.num_ranks} ranks"
        for name in (HOST, COMPAT):
            if name in row.ms and row.model in ("10M", "50M"):
                floor = 3.5 if row.model == "10M" else 3.0
                checks.append((f"{where}: {name}, x torch", row.gain(name), ">=", floor))
                checks.append((f"{where}: {name}, x limit", row.of_limit(name), "<=", 2.0))
        checks.append((f"{where}: {NETWORK}, x torch", row.gain(NETWORK), ">=", 1.3))
        checks.append((f"{where}: {NETWORK}, x raw", row.of_raw(NETWORK), "<=", 1.05))
    checks += [(f"header, {name}, us", us, "<=", 2000.0) for name, us in costs.header_us.items()]
    checks += [(f"extra memory, {name}, copies", ratio, "<=", 1.05) for name, ratio in costs.memory.items()]
    checks.append(("step with nothing due, us", costs.step_us, "<=", 5.0))
    return [
        f"{what} is {found:.2f}, promised {sign} {bound}"
        for what, found, sign, bound in checks
        if (found < bound if sign == ">=" else found > bound)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(2, 4), default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add_flags(parser, quick="the smallest model with 2 ranks only")
    arguments = parser.parse_args()
    ranks, models = ([2], ["1M"]) if arguments.quick else (arguments.ranks, arguments.models)
    run = begin("averaging", arguments)
    every_row: list[Row] = []
    for num_ranks in ranks:
        some = [row for model in models if (row := measure_row(model, num_ranks)) is not None]
        if some:
            print_table(some)
        every_row += some
    # A model so large that what a process needs anyway does not show.
    answers: list[Costs] = on_ranks(max(ranks), measure_costs, shapes=MODELS["10M"][0])
    worst = {name: max(each.memory[name] for each in answers) for name in answers[0].memory}
    costs = Costs(**(asdict(answers[0]) | {"memory": worst}))
    print_costs(costs)
    rows = [{**asdict(row), "limit_ms": row.limit_ms} for row in every_row]
    return finish(run, figures={"rows": rows, "costs": asdict(costs)}, missed=misses(every_row, costs))


if __name__ == "__main__":
    sys.exit(main())
