"""Small documents as benchmarks leave them, with figures that are easy to read in a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from report.documents import Document, parse

Paper = dict[str, Any]

MACHINE = {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "torchft": "0.2.0",
    "etcd": "3.5.1",
    "processor": "Abacus 2000",
    "cores": 2,
    "load_start": 0.5,
    "load_end": 2.25,
}


def framed(benchmark: str, **figures: object) -> Paper:
    frame = {"version": 1, "benchmark": benchmark, "is_quick": False, "seconds": 60.0, "missed": []}
    return {**frame, "machine": dict(MACHINE), **figures}


def plan() -> Paper:
    sizes = [(125, 0.001, 24e6), (1250, 0.0088, 36e6), (12500, 0.0968, 129e6)]
    rows = [
        {
            "num_nodes": num_nodes,
            "num_ranks": 8 * num_nodes,
            "fit_s": fit_s,
            "fit_min_s": fit_s,
            "change_s": 2 * fit_s,
            "json_s": 3 * fit_s,
            "peak_bytes": int(peak_bytes),
        }
        for num_nodes, fit_s, peak_bytes in sizes
    ]
    return framed("plan", hierarchy="node=4,global=64", num_repeats=7, rows=rows)


def averaging() -> Paper:
    rows = [
        {
            "model": model,
            "num_ranks": num_ranks,
            "num_values": 1,
            "num_tensors": 60,
            "load": 1.4,
            "limit_ms": 5.0,
            "ms": {
                "torch averager": 87.0,
                "flat all-reduce": 45.0,
                "per tensor": 50.0,
                "torchft LocalSGD": 90.0,
                "ours, same host": 8.0 if num_ranks == 4 else 7.0,
                "ours, compat": 9.0,
                "ours, process group": 54.0 if num_ranks == 4 else 45.0,
                "copy": 3.0,
                **({"ours, 2 x 2": 31.0} if num_ranks == 4 else {}),
            },
        }
        for num_ranks in (2, 4)
        for model in ("1M", "10M", "resnet50", "50M", "gpt2")
    ]
    costs = {
        "num_ranks": 4,
        "header_us": {"Unix sockets": 40.0, "TCP": 70.0},
        "step_us": 0.12,
        "memory": {"one node": 0.3, "a node each": 1.0, "2 x 2": 0.6},
        "load": 1.0,
    }
    return framed("averaging", rows=rows, costs=costs)


GAPS_S = {
    "hieravg run": 0.25,
    "hieravg run, etcd3": 0.5,
    "torchft, tuned": 0.77,
    "torchft, defaults": 4.9,
    "torchrun, tuned": 10.94,
    "torchrun, defaults, fresh stores": 38.1,
}
EVENTS = (
    "node joins",
    "node killed",
    "worker killed",
    "node frozen",
    "Python hang of a worker",
    "coordinator or store host killed",
)


def gap(event: str, system: str, **other: object) -> Paper:
    is_torchrun = system.startswith("torchrun")
    return {
        "event": event,
        "system": system,
        "load": 1.0,
        "ordinary_s": 0.02,
        "gap_s": GAPS_S[system],
        "recovery_s": 1.0,
        "round_s": 0.01,
        "steps_lost": 14 if is_torchrun else 0,
        "num_restarted": 4 if is_torchrun else 0,
        "num_survivors": 4,
        "failure": "",
        **other,
    }


def recovery() -> Paper:
    events = [gap(event, system) for event in EVENTS for system in GAPS_S]
    rest = [
        {"system": "hieravg run", "load": 1.0, "call_us": 6.0, "num_calls": 9, "core_shares": [0.003, 0.005]}
    ]
    return framed("recovery", events=events, alone_us=5.0, rest=rest, bound_s=75.0)


def rendezvous() -> Paper:
    steps_s = {"etcd3, defaults": 1.3, "c10d, defaults, fresh stores": 42.3, "c10d, tuned to 3 beats": 6.2}
    torchrun: list[Paper] = [
        {
            "event": event,
            "setting": setting,
            "load": 0.7,
            "step_s": step_s,
            "process_s": 1.0,
            "failure": "",
            "why": "",
        }
        for event in ("worker killed", "node killed", "node added", "rank 0's node killed")
        for setting, step_s in steps_s.items()
    ]
    for row in torchrun:
        if row["event"] == "rank 0's node killed" and row["setting"].startswith("c10d"):
            row |= {"step_s": None, "process_s": None, "failure": "job lost"}
    loss = {"detection_s": 0.1, "adoption_s": 0.29, "total_s": 0.39, "load": 1.0}
    join = {
        "num_agents": 64,
        "num_processes": 8,
        "join_s": 1.5,
        "num_generations": 2,
        "load": 1.0,
        "loss": loss,
    }
    load = {
        "num_agents": 8,
        "num_busy": 12,
        "span_s": 120.0,
        "num_dropped": 0,
        "num_away": 0,
        "num_runnable": 13.0,
        "load": 11.8,
        "kills": [loss, loss],
    }
    return framed("rendezvous", torchrun=torchrun, joins=[join, join], load=load)


def metrics() -> Paper:
    return framed("metrics", more_us=1.2, step_us=10_000.0, num_repeats=3, runs=[])


def training() -> Paper:
    def run(system: str, done_s: float, last_loss: float, sent_bytes: float, **other: object) -> Paper:
        return {
            "system": system,
            "num_steps": 384,
            "done_s": done_s,
            "killed_s": 1.0,
            "ordinary_s": 0.068,
            "standstill_s": 11.0,
            "round_s": 0.42,
            "steps_lost": 15,
            "num_restarted": 6,
            "num_survivors": 6,
            "sent_bytes": sent_bytes,
            "load": 1.1,
            "losses": [[0.0, 4.5], [done_s / 2, 2.2], [done_s, last_loss]],
            "traffic": [],
            "failure": "",
            **other,
        }

    kept = {"steps_lost": 0, "num_restarted": 0, "standstill_s": 0.7, "round_s": 0.58}
    runs = [
        run("DDP, torchrun", 180.0, 1.97, 13.2e9, round_s=None),
        run("torch's averager, torchrun", 35.0, 2.14, 802e6),
        run("elastic_hieravg", 27.0, 2.13, 716e6, **kept),
    ]
    return framed("training", runs=runs, num_parameters=1_300_000)


def all_papers() -> dict[str, Paper]:
    made = (plan(), averaging(), rendezvous(), recovery(), metrics(), training())
    return {paper["benchmark"]: paper for paper in made}


def read(papers: Mapping[str, Paper]) -> dict[str, Document]:
    return {name: parse(json.dumps(paper), benchmark=name) for name, paper in papers.items()}


def write(papers: Mapping[str, Paper], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, paper in papers.items():
        (folder / f"{name}.json").write_text(json.dumps(paper))
