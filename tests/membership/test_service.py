"""Memberships as processes, on the embedded store and on a real etcd: killed, frozen, leaving, late."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from elastic_hieravg.membership.embedded import EmbeddedServer
from elastic_hieravg.membership.etcd import EtcdKeyValue
from elastic_hieravg.membership.kv import KeyValue
from tests.membership.agents import AgentProcess, agent_processes
from tests.membership.etcd_servers import EtcdCluster

_runs = count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture(params=["embedded", "etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Where the agents of one run find their store."""
    run_id = f"service-{next(_runs)}"
    if request.param == "embedded":
        server = EmbeddedServer("127.0.0.1", 0, run_id=run_id)
        yield {"run_id": run_id, "port": server.port}
        server.close()
    else:
        cluster: EtcdCluster = request.getfixturevalue("etcd")
        yield {"run_id": run_id, "endpoints": cluster.endpoints}


@contextmanager
def running(node_ids: str, store: dict[str, Any], **config: Any) -> Iterator[dict[str, AgentProcess]]:
    """Agents that are all in one generation and have entered it."""
    with agent_processes(node_ids, **store, **config) as agents:
        for agent in agents.values():
            agent.tell("ready")
        for agent in agents.values():
            adopted = agent.hear_adopted(*node_ids)
            agent.tell(f"enter {adopted['number']}")
        yield agents


def test_agents_agree_on_one_generation(store: dict[str, Any]) -> None:
    with running("abc", store) as agents:
        said = [agent.heard[-1] for agent in agents.values()]
    assert {each["number"] for each in said} == {1}
    assert {tuple(each["members"]) for each in said} == {("a", "b", "c")}


def test_a_killed_agent_is_dropped_long_before_its_lease_ends(store: dict[str, Any]) -> None:
    with running("abc", store, lease_ttl_s=120.0) as agents:
        killed_s = agents["b"].kill()
        told = [agents[each].hear_adopted("a", "c") for each in "ac"]
        assert all("its process ended" in each["reason"] for each in told), told
        # Its name is free again at once too: nobody waits for the lease.
        again = AgentProcess(node_id="b", **store, lease_ttl_s=120.0)
        try:
            again.tell("ready")
            for each in "ac":
                agents[each].tell(f"enter {told[0]['number']}")
            again.hear_adopted("a", "b", "c")
        finally:
            again.close()
    assert max(each["at_s"] for each in told) - killed_s < 60.0


def test_a_frozen_agent_is_dropped_by_its_lease_and_comes_back_as_another(store: dict[str, Any]) -> None:
    with running("abc", store, lease_ttl_s=2.0) as agents:
        agents["b"].send(signal.SIGSTOP)
        told = agents["a"].hear_adopted("a", "c")
        assert "its lease ended" in told["reason"]
        agents["c"].hear_adopted("a", "c")
        agents["b"].send(signal.SIGCONT)
        agents["b"].hear(lambda said: said["told"] == "fenced")
        for each in "ac":
            agents[each].tell(f"enter {told['number']}")
        for agent in agents.values():
            agent.hear_adopted("a", "b", "c")
        assert not [said for said in agents["a"].heard if said["told"] == "fenced"]


def test_a_peer_that_dies_while_everybody_else_starts_anew_is_found(store: dict[str, Any]) -> None:
    with running("abc", store, lease_ttl_s=600.0, mode="restart", times={"stop_s": 600.0}) as agents:
        # Frozen, it opens its door to nobody: what the others know of it they knew before.
        agents["c"].send(signal.SIGSTOP)
        for each in "ab":
            agents[each].tell("renew")
        for each in "ab":
            agents[each].hear_reason("c still runs the generation before")
        agents["c"].kill()
        for each in "ab":
            assert "c: its process ended" in agents[each].hear_adopted("a", "b")["reason"]


def test_an_agent_frozen_for_less_than_its_lease_is_not_dropped(store: dict[str, Any]) -> None:
    with running("abc", store, lease_ttl_s=6.0) as agents:
        agents["b"].send(signal.SIGSTOP)
        time.sleep(1.5)
        agents["b"].send(signal.SIGCONT)
        for agent in agents.values():
            agent.tell("status")
            agent.hear(lambda said: said["told"] == "status")
        numbers = {said["number"] for each in agents.values() for said in each.heard if "number" in said}
        assert numbers == {1}


def test_leaving_on_purpose_needs_no_lease_to_end(store: dict[str, Any]) -> None:
    with running("abc", store, lease_ttl_s=120.0) as agents:
        agents["b"].tell("leave")
        assert agents["b"].hear(lambda said: said["told"] == "left")["in_time"]
        told = [agents[each].hear_adopted("a", "c") for each in "ac"]
        assert all("it left on purpose" in each["reason"] for each in told)


def test_workers_that_start_anew_take_their_node_out_and_in_again(store: dict[str, Any]) -> None:
    with running("ab", store) as agents:
        agents["b"].tell("renew")
        told = agents["a"].hear_adopted("a")
        assert "b: it started anew" in told["reason"]
        agents["a"].tell(f"enter {told['number']}")
        for agent in agents.values():
            agent.hear_adopted("a", "b")


def test_a_group_that_failed_with_nobody_lost_is_built_anew(store: dict[str, Any]) -> None:
    with running("ab", store) as agents:
        agents["a"].tell("keys")
        (key,) = agents["a"].hear(lambda said: said["told"] == "keys")["keys"]
        agents["b"].tell(f"broken {key}")
        for agent in agents.values():
            assert agent.hear_adopted("a", "b")["kind"] == "rebuild"
        agents["a"].tell("keys")
        (built_anew,) = agents["a"].hear(lambda said: said["told"] == "keys")["keys"]
        assert built_anew != key


def test_a_rack_lost_at_once_is_one_change(store: dict[str, Any]) -> None:
    with running("abcd", store, lease_ttl_s=120.0, times={"loss_settle_s": 1.0}) as agents:
        for each in "bd":
            agents[each].kill()
        for each in "ac":
            told = agents[each].hear(lambda said: said["told"] == "adopted")
            assert told["members"] == ["a", "c"]


def test_a_job_below_its_minimum_holds_and_ends_in_the_end(store: dict[str, Any]) -> None:
    with running("ab", store, nodes_min=2, times={"pause_s": 3.0}) as agents:
        agents["b"].kill()
        told = agents["a"].hear_adopted("a")
        assert told["hold"] == "1 of at least 2 nodes"
        ended = agents["a"].hear(lambda said: said["told"] == "ended")
        assert not ended["is_success"]
        assert "could not run for 3 s" in ended["reason"]


def test_spares_wait_above_the_maximum_and_step_in(store: dict[str, Any]) -> None:
    with agent_processes("abc", **store, nodes_max=2) as agents:
        for each in "ab":
            agents[each].tell("ready")
        for each in "ab":
            number = agents[each].hear_adopted("a", "b")["number"]
            agents[each].tell(f"enter {number}")
        agents["c"].tell("ready")
        agents["c"].hear_reason("1 node spare: the job has its 2 nodes")
        agents["b"].kill()
        number = agents["a"].hear_adopted("a")["number"]
        agents["a"].tell(f"enter {number}")
        agents["c"].hear_adopted("a", "c")


def test_the_end_of_a_job_is_told_to_all_and_to_whoever_comes_late(store: dict[str, Any]) -> None:
    with running("ab", store) as agents:
        agents["a"].tell("finish well")
        assert agents["a"].hear(lambda said: said["told"] == "finished")["in_time"]
        assert agents["b"].hear(lambda said: said["told"] == "ended")["is_success"]
    with agent_processes("c", **store) as late:
        assert late["c"].hear(lambda said: said["told"] == "ended")["reason"] == "asked to"


def test_a_node_that_asks_for_something_else_is_refused_with_both_values(store: dict[str, Any]) -> None:
    with running("a", store, nodes_max=4), agent_processes("b", **store, nodes_max=5, nodes_min=2) as other:
        error = other["b"].hear(lambda said: said["told"] == "failed")["error"]
    asked = "this node asks for --nnodes minimum 2, --nnodes maximum 5"
    running_with = "runs with --nnodes minimum 1, --nnodes maximum 4"
    assert asked in error
    assert running_with in error
    assert "hint: start every node of a job with the same settings" in error


def test_two_live_agents_cannot_have_one_name(store: dict[str, Any]) -> None:
    with running("a", store) as agents, agent_processes("a", **store) as twin:
        error = twin["a"].hear(lambda said: said["told"] == "failed")["error"]
        assert "node id a is in use by a live agent at 127.0.0.1" in error
        assert agents["a"].heard[-1]["members"] == ["a"]


def test_agents_of_one_host_find_names_of_their_own(store: dict[str, Any]) -> None:
    config = {**store, "may_rename": True}
    with agent_processes("h", **config) as first, agent_processes("h", **config) as second:
        for agent in (first["h"], second["h"]):
            agent.tell("ready")
        for agent in (first["h"], second["h"]):
            agent.hear_adopted("h", "h.2")


def test_nothing_is_left_behind_but_what_a_lease_removes(store: dict[str, Any]) -> None:
    with running("ab", store):
        pass
    kv: KeyValue
    if "port" in store:
        from elastic_hieravg.membership.embedded import EmbeddedKeyValue

        kv = EmbeddedKeyValue("127.0.0.1", store["port"], run_id=store["run_id"])
    else:
        from elastic_hieravg.membership.etcd_client import EtcdSettings

        kv = EtcdKeyValue(EtcdSettings(tuple(store["endpoints"])))
    left = kv.get(f"/hieravg/{store['run_id']}/").entries
    kv.close()
    assert {key.rpartition("/")[2] for key in left} == {"generation", "job"}
    assert all(entry.lease_id for entry in left.values())


def test_a_store_that_goes_away_and_comes_back_changes_nothing(etcd: EtcdCluster) -> None:
    store = {"run_id": f"service-{next(_runs)}", "endpoints": etcd.endpoints}
    with running("ab", store) as agents:
        (member,) = etcd.members
        member.kill()
        for agent in agents.values():
            agent.hear(lambda said: said["told"] == "away")
        time.sleep(4.0)
        member.start()
        for agent in agents.values():
            agent.hear(lambda said: said["told"] == "back")
        agents["b"].tell("renew")
        agents["a"].hear_adopted("a")
        assert not [said for each in agents.values() for said in each.heard if said["told"] == "fenced"]
