"""Status documents as an agent could tell them: a small job, what may happen to it, and a large one."""

import copy
import math
from typing import Any

Document = dict[str, Any]

NOW_S = 1_763_467_200.0
STEP = 1234
STEP_S = 0.02


def small_job() -> Document:
    """Three nodes of two workers in two zones; everything is well."""
    return {
        "version": 1,
        "run_id": "demo",
        "node_id": "a",
        "now_s": NOW_S,
        "began_s": NOW_S - 200,
        "backend": "etcd3",
        "generation": generation(7, "join", "c joined", ago_s=65),
        "decision": {"action": "keep", "reason": "all of the generation is there"},
        "is_store_up": True,
        "goodput_ratio": 0.97,
        "step": STEP,
        "world_ranks": 6,
        "nodes_min": 1,
        "nodes_max": 4,
        "hierarchy": "node=4,zone=16,global=64",
        "mode": "in-place",
        "nodes": [
            node("a", ranks=[0, 1], zone="z1", rack="r1"),
            node("b", ranks=[2, 3], zone="z1", rack="r2"),
            node("c", ranks=[4, 5], zone="z2", rack="r3"),
        ],
        "levels": [
            level("node", 4, [[0, 1], [2, 3], [4, 5]], seconds=0.0021, link="shm", sent_bytes=123_456),
            level("zone", 16, [[0, 1, 2, 3], [4, 5]], seconds=0.0064, link="inter_node", sent_bytes=246_912),
            level("global", 64, [[0, 1, 2, 3, 4, 5]], seconds=0.041, link="inter_zone", sent_bytes=246_912),
        ],
        "notes": [],
        "events": [
            event(7, "join", "c joined", ago_s=65, came=["c"]),
            event(6, "loss", "lost c: its process ended", ago_s=95, left=["c"]),
            event(1, "start", "a, b and c are ready", ago_s=190, came=["a", "b", "c"]),
        ],
        "values": {"loss": 1.2345678, "lr": 0.001},
    }


def lost_job(node_id: str = "c", *, reason: str = "its process ended") -> Document:
    """One node of the small job is lost, and the plan follows."""
    document = small_job()
    lost = next(each for each in document["nodes"] if each["node_id"] == node_id)
    lost |= {
        "state": "lost",
        "reason": reason,
        "since_s": NOW_S - 12,
        "ranks": [],
        # Told before it was lost.
        "age_s": 13.5,
    }
    left = [each["node_id"] for each in document["nodes"] if each["node_id"] != node_id]
    for index, each in enumerate(left):
        found = next(node for node in document["nodes"] if node["node_id"] == each)
        found["ranks"] = [2 * index, 2 * index + 1]
    document["generation"] = generation(8, "loss", f"lost {node_id}: {reason}", ago_s=11)
    document["world_ranks"] = 4
    document["levels"] = [
        level("node", 4, [[0, 1], [2, 3]], seconds=0.002, link="shm", sent_bytes=123_456),
        level("zone", 16, [[0, 1, 2, 3]], seconds=0.0058, link="inter_node", sent_bytes=246_912),
    ]
    document["notes"] = [
        {
            "kind": "merged",
            "level": "global",
            "reason": "level global has the same groups as zone inside it: "
            "they are one level, zone, every 16 steps",
        }
    ]
    document["events"].insert(0, event(8, "loss", f"lost {node_id}: {reason}", ago_s=11, left=[node_id]))
    return document


def troubled_job() -> Document:
    """Everything that needs attention, at once."""
    document = lost_job()
    document["is_store_up"] = False
    document["nodes_min"] = 3
    slow = document["nodes"][1]
    slow["is_straggler"] = True
    slow["step_seconds"] = trace(0.045)
    slow["age_s"] = 35.5
    slow["workers"][1]["state"] = "gone"
    node_level, zone_level = document["levels"]
    node_level["last"] |= {"at_s": NOW_S - 42, "outcome": "failed"}
    zone_level["last"] |= {"seconds": 0.9, "outcome": "skipped"}
    document["decision"] = {"action": "wait", "reason": "d is alive and not ready yet"}
    return document


def calm_job() -> Document:
    """One node has left on purpose, one starts its workers, one has ended its loops: nothing to worry about."""
    document = small_job()
    starting, done, left = document["nodes"]
    left |= {"state": "left", "reason": "it left on purpose", "since_s": NOW_S - 12, "ranks": [], "age_s": 13.5}
    for node_, state in ((starting, "starting"), (done, "done")):
        for worker in node_["workers"]:
            worker["state"] = state
    for each in document["levels"]:
        each["last"]["at_s"] = NOW_S - 60
    return document


def held_job() -> Document:
    document = small_job()
    hold = "level size-2 averages groups of 2 ranks, which does not divide the world of 3"
    document["generation"] = generation(9, "join", "c joined", ago_s=30) | {"hold": hold}
    return document


def large_job(*, num_nodes: int = 64, slots: int = 8) -> Document:
    """Four zones of four racks; one node is lost, one slow, one a spare."""
    document = small_job()
    names = [f"node-{index}" for index in range(num_nodes)]
    document["nodes"] = [
        node(
            name,
            ranks=list(range(index * slots, (index + 1) * slots)),
            zone=f"z{index * 4 // num_nodes}",
            rack=f"r{index * 16 // num_nodes}",
            phase=index,
        )
        for index, name in enumerate(names)
    ]
    lost, slow, spare = document["nodes"][17], document["nodes"][42], document["nodes"][63]
    lost |= {"state": "lost", "reason": "its lease ended", "since_s": NOW_S - 80, "ranks": []}
    slow |= {"is_straggler": True, "step_seconds": trace(0.051)}
    spare |= {"state": "spare", "ranks": []}
    document["world_ranks"] = num_nodes * slots
    document["nodes_max"] = num_nodes
    by_node = [list(range(index * slots, (index + 1) * slots)) for index in range(num_nodes)]
    wide = num_nodes * slots // 4
    by_zone = [list(range(index * wide, (index + 1) * wide)) for index in range(4)]
    document["levels"] = [
        level("node", 4, by_node, seconds=0.004, link="shm", sent_bytes=5e8),
        level("zone", 16, by_zone, seconds=0.11, link="inter_node", sent_bytes=1.3e9),
        level("global", 64, [list(range(num_nodes * slots))], seconds=1.2, link="inter_zone", sent_bytes=1.3e9),
    ]
    document["values"] = {f"value_{index}": index / 7 for index in range(50)}
    return document


def hollow_documents() -> list[Document]:
    """Documents with every field missing, null, or of another type, one way after the other."""
    wrong: list[Any] = [None, [], {}, "text", True, -1, 1e308]
    found: list[Document] = [{"version": 1}]
    for value in wrong:
        found.append(dict.fromkeys(small_job(), value) | {"version": 1})
        inside = troubled_job()
        for key in ("nodes", "levels", "notes", "events"):
            inside[key] = [value, dict.fromkeys(inside[key][0], value), *inside[key]]
        inside["generation"] = dict.fromkeys(inside["generation"], value)
        inside["decision"] = dict.fromkeys(inside["decision"], value)
        inside["values"] = {"loss": value}
        inside["nodes"][2]["workers"] = [value, dict.fromkeys(inside["nodes"][2]["workers"][0], value)]
        inside["levels"][2]["last"] = dict.fromkeys(inside["levels"][2]["last"], value)
        inside["levels"][3]["groups"] = [value, [value]]
        found.append(inside)
    return copy.deepcopy(found)


def generation(number: int, kind: str, reason: str, *, ago_s: float) -> Document:
    return {"number": number, "kind": kind, "reason": reason, "hold": "", "at_s": NOW_S - ago_s}


def node(node_id: str, *, ranks: list[int], zone: str, rack: str, phase: int = 0) -> Document:
    return {
        "node_id": node_id,
        "state": "training",
        "labels": {"zone": zone, "rack": rack, "host": f"host-{node_id}"},
        "slots": len(ranks),
        "ranks": ranks,
        "address": "10.0.0.1",
        "metrics_port": 9400,
        "since_s": NOW_S - 100,
        "reason": "",
        "goodput_ratio": 0.97,
        "steps_per_s": 48.0,
        "step_seconds": trace(STEP_S, phase=phase),
        "is_straggler": False,
        "age_s": 1.2,
        "workers": [
            {
                "local_rank": local_rank,
                "rank": rank,
                "process_id": 4711 + rank,
                "step": STEP,
                "state": "training",
                "step_seconds": STEP_S,
                "restarts": 0,
            }
            for local_rank, rank in enumerate(ranks)
        ],
    }


def level(
    name: str, period_steps: int, groups: list[list[int]], *, seconds: float, link: str, sent_bytes: float
) -> Document:
    last_step = STEP // period_steps * period_steps
    return {
        "name": name,
        "period_steps": period_steps,
        "num_groups": len(groups),
        "groups": groups,
        "next_step": last_step + period_steps,
        "last": {
            "step": last_step,
            "seconds": seconds,
            "sent_bytes": sent_bytes,
            "link": link,
            "outcome": "committed",
            "at_s": NOW_S - (STEP - last_step) * STEP_S,
        },
    }


def event(
    number: int,
    kind: str,
    reason: str,
    *,
    ago_s: float,
    left: list[str] | None = None,
    came: list[str] | None = None,
) -> Document:
    return {
        "at_s": NOW_S - ago_s,
        "generation": number,
        "kind": kind,
        "reason": reason,
        "left": left or [],
        "came": came or [],
    }


def trace(seconds: float, *, phase: int = 0) -> list[float]:
    return [round(seconds * (1 + 0.12 * math.sin(index * 1.7 + phase)), 6) for index in range(60)]
