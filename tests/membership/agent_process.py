"""One agent's membership as a process of its own, for tests that kill and freeze it.

Says what it is told as JSON lines on stdout, and does what it is told on stdin, a word and its arguments a
line. It ends when stdin does.
"""

import json
import sys
import time
from typing import Any

from elastic_hieravg.membership import following
from elastic_hieravg.membership.decisions import Policy
from elastic_hieravg.membership.embedded import EmbeddedKeyValue
from elastic_hieravg.membership.etcd import EtcdKeyValue
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.failover import FailoverKeyValue
from elastic_hieravg.membership.kv import KeyValue
from elastic_hieravg.membership.messages import Adopted, Candidate, Ended, Failed, Fenced, Notice
from elastic_hieravg.membership.records import Closing, Job, Mode
from elastic_hieravg.membership.service import Membership, StoreAway, StoreBack
from elastic_hieravg.plan import Hierarchy


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps({"at_s": time.monotonic(), **what}) + "\n")
    sys.stdout.flush()


def told(notice: Notice | StoreAway | StoreBack) -> None:
    match notice:
        case Adopted(generation):
            members = [node.node_id for node in generation.members]
            facts = {"number": generation.number, "kind": generation.kind, "reason": generation.reason}
            say(told="adopted", members=members, hold=generation.hold, **facts)
        case Fenced(incarnation):
            say(told="fenced", incarnation=incarnation)
        case Ended(closing):
            say(told="ended", is_success=closing.is_success, reason=closing.reason)
        case Failed(error):
            say(told="failed", error=str(error))
        case StoreAway(why):
            say(told="away", why=why)
        case StoreBack():
            say(told="back")


def open_store(config: dict[str, Any]) -> KeyValue:
    if "failover_ports" in config:
        following.FROZEN_S = config.get("frozen_s", following.FROZEN_S)
        return FailoverKeyValue(
            [("127.0.0.1", port) for port in config["failover_ports"]],
            run_id=config["run_id"],
            address="127.0.0.1",
            report=lambda why: say(told="frozen", why=why),
        )
    if "port" in config:
        return EmbeddedKeyValue("127.0.0.1", config["port"], run_id=config["run_id"])
    return EtcdKeyValue(EtcdSettings(tuple(config["endpoints"])))


def main() -> None:
    config = json.loads(sys.argv[1])
    policy = Policy(
        Job(
            config.get("nodes_min", 1),
            config.get("nodes_max", 8),
            Hierarchy.parse(config.get("hierarchy", "global=8")),
            Mode(config.get("mode", "in-place")),
        ),
        **config.get("times", {}),
    )
    kv = open_store(config)
    candidate = Candidate(
        config["node_id"],
        1,
        config.get("labels", {}),
        "127.0.0.1",
        0,
        config.get("may_rename", False),
        standby=kv.port if isinstance(kv, FailoverKeyValue) else 0,
    )
    membership = Membership(
        kv,
        candidate,
        run_id=config["run_id"],
        policy=policy,
        lease_ttl_s=config.get("lease_ttl_s", 3.0),
        observe=told,
    )
    say(told="started")
    with membership:
        for line in sys.stdin:
            word, *arguments = line.split()
            obey(membership, word, arguments)
    kv.close()


def obey(membership: Membership, word: str, arguments: list[str]) -> None:
    match word:
        case "ready":
            membership.ready()
        case "renew":
            membership.renew(is_ready=True)
        case "enter":
            membership.enter(int(arguments[0]))
        case "broken":
            membership.report_broken(arguments[0])
        case "keys":
            adopted = membership.status.adopted
            say(told="keys", keys=[key.name for key in adopted.keys] if adopted else [])
        case "leave":
            say(told="left", in_time=membership.leave(timeout_s=20.0))
        case "finish":
            closing = Closing(arguments[0] == "well", "asked to")
            say(told="finished", in_time=membership.end_job(closing, timeout_s=20.0))
        case "status":
            status = membership.status
            say(told="status", node_id=status.node.node_id, reason=status.decision.reason)


if __name__ == "__main__":
    main()
