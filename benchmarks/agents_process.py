"""Agents' memberships in one process, for `rendezvous.py`: opened and closed on a word, and timed from inside.

Takes `open <run id>` and `close` as lines on stdin and ends with it. What its agents are told goes to stdout as
JSON lines; the time is the machine's monotonic clock, which all of its processes share.
"""

import contextlib
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_hieravg.membership.decisions import Policy
from elastic_hieravg.membership.doors import Door
from elastic_hieravg.membership.etcd import EtcdKeyValue
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.messages import Adopted, Candidate, Failed, Fenced, Notice
from elastic_hieravg.membership.records import Job
from elastic_hieravg.membership.service import Membership, StoreAway, StoreBack
from elastic_hieravg.plan import Hierarchy

HIERARCHY = Hierarchy.parse("node=1,global=8")
_lock = threading.Lock()


class TimedMembership(Membership):
    """Says when this process first knows that another one died: everything else follows from that."""

    def _told_of_death(self, door: Door, why: str) -> None:
        say("death", port=door.port)
        super()._told_of_death(door, why)


class Agent:
    """One node with a client of etcd of its own, as every agent has. Its ranks enter what it adopts at once."""

    def __init__(self, node_id: str, *, run_id: str, settings: EtcdSettings, nodes_max: int) -> None:
        self._node_id = node_id
        self._kv = EtcdKeyValue(settings)
        self._membership = TimedMembership(
            self._kv,
            Candidate(node_id, 1, {}, "127.0.0.1", 0),
            run_id=run_id,
            policy=Policy(Job(1, nodes_max, HIERARCHY)),
            observe=self._told,
        )
        self._membership.ready()

    def close(self) -> None:
        self._membership.close()
        self._kv.close()

    def _told(self, notice: Notice | StoreAway | StoreBack) -> None:
        match notice:
            case Adopted(generation):
                num_members = len(generation.members)
                say("adopted", node=self._node_id, number=generation.number, num_members=num_members)
                self._membership.enter(generation.number)
            case Fenced():
                say("fenced", node=self._node_id)
            case Failed(error):
                say("failed", node=self._node_id, why=str(error))
            case StoreAway(why):
                say("away", node=self._node_id, why=why)


def say(told: str, **facts: Any) -> None:
    line = json.dumps({"told": told, "at_s": time.monotonic(), **facts})
    with _lock, contextlib.suppress(BrokenPipeError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def main() -> None:
    config = json.loads(sys.argv[1])
    settings = EtcdSettings(tuple(config["endpoints"]))
    node_ids: list[str] = config["node_ids"]
    # Everything is imported and etcd has been asked once; agents make connections of their own.
    warm = EtcdKeyValue(settings)
    warm.get("/hieravg/nothing/")
    warm.close()
    say("started")
    agents: list[Agent] = []
    with ThreadPoolExecutor(len(node_ids)) as pool:
        for line in sys.stdin:
            word, *arguments = line.split()
            if word == "open":
                (run_id,) = arguments
                nodes_max: int = config["nodes_max"]
                opened = [
                    pool.submit(Agent, node_id, run_id=run_id, settings=settings, nodes_max=nodes_max)
                    for node_id in node_ids
                ]
                agents = [each.result() for each in opened]
            else:
                list(pool.map(Agent.close, agents))
                say("closed")


if __name__ == "__main__":
    main()
