"""What an agent makes of what it is told: by its workers, by its membership, by nobody for a while."""

import contextlib
import http.client
import json
import logging
import math
from collections.abc import Iterator

import pytest

from elastic_hieravg.agent.logs import Facts
from elastic_hieravg.agent.telemetry import HEALTH_S, Telemetry
from elastic_hieravg.config import MetricsPlace
from elastic_hieravg.membership.decisions import Action, Decision, Loss
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.records import Kind
from elastic_hieravg.membership.service import Status, StoreAway, StoreBack
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.catalogue import Cause, RestartReason
from elastic_hieravg.metrics.samples import LastRound, Samples
from elastic_hieravg.plan import Plan, Topology, fit
from tests.metrics.test_status import JOB, generation, live, node, view

LEASE_TTL_S = 3.0
WITHIN_S = 60.0


class Agent:
    """Telemetry with a clock that stands still unless it is set; both clocks show the same."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.why_not_ready = ""
        self.facts = Facts()
        self.telemetry = Telemetry(
            run_id="demo",
            node_id="a",
            backend="c10d",
            job=JOB,
            slots=2,
            lease_ttl_s=LEASE_TTL_S,
            facts=self.facts,
            clock=lambda: self.now_s,
            wall=lambda: self.now_s,
        )
        self.value = self.telemetry.registry.value

    def serve(self, port: int = 0) -> None:
        self.telemetry.serve(
            MetricsPlace("127.0.0.1", port),
            why_not_ready=lambda: self.why_not_ready,
            membership=lambda: Status(node("a"), Decision(Action.KEEP, "all there")),
            has_group_store=False,
        )

    def get(self, path: str) -> tuple[int, bytes]:
        port = self.telemetry.port
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def adopt(self, number: int, *names_of: str, kind: Kind = Kind.START) -> None:
        members = tuple(node(name) for name in names_of)
        made = generation(number, *members, kind=kind)
        plan = fit(JOB.hierarchy, Topology(members), generation=number)
        assert isinstance(plan, Plan)
        self.telemetry.viewed(view(made))
        self.telemetry.noticed(Adopted(made, plan, ()))

    def tell(self, samples: Samples, *, local_rank: int = 0, process_id: int = 7) -> None:
        self.telemetry.measured(local_rank, process_id, samples.to_json())

    def phases(self) -> dict[str, float]:
        """How long the phases were that were told."""
        text = self.telemetry.registry.text().decode()
        found = {}
        for phase in names.Phase:
            count, total = (
                float(text.partition(f'hieravg_recovery_seconds_{what}{{phase="{phase}"}} ')[2].split()[0])
                for what in ("count", "sum")
            )
            if count:
                assert count == 1, "each is told once"
                found[str(phase)] = total
        return found


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    with contextlib.closing(made.telemetry):
        yield made


def test_everything_that_is_not_of_a_level_is_there_before_anything_happens(agent: Agent) -> None:
    assert agent.value(names.GENERATION) == 0
    assert agent.value(names.STORE_UP) == 1
    assert (agent.value(names.NODES_LIMIT, "min"), agent.value(names.NODES_LIMIT, "max")) == (1, 3)
    assert [agent.value(names.GENERATIONS, str(kind)) for kind in Kind] == [0] * len(Kind)
    assert [agent.value(names.WORKER_RESTARTS, str(reason)) for reason in RestartReason] == [0] * 4
    assert [agent.value(names.BADPUT_SECONDS, str(cause)) for cause in Cause] == [0] * len(Cause)


def test_what_the_membership_tells_is_counted(agent: Agent) -> None:
    agent.adopt(1, "a", "b")
    assert (agent.value(names.GENERATION), agent.value(names.WORLD_RANKS)) == (1, 4)
    assert agent.value(names.GENERATIONS, "start") == 1
    agent.adopt(2, "a", kind=Kind.LOSS)
    assert (agent.value(names.NODES, "training"), agent.value(names.NODES, "lost")) == (1, 1)
    assert agent.value(names.PLAN_NOTES, "merged") == 1, "one node is the whole world"
    agent.telemetry.noticed(StoreAway("it is gone"))
    assert agent.value(names.STORE_UP) == 0
    agent.telemetry.noticed(StoreBack())
    assert agent.value(names.STORE_UP) == 1
    assert (agent.facts.run, agent.facts.node, agent.facts.generation) == ("demo", "a", 2)


@pytest.mark.parametrize(
    ("why", "ended_s", "detect_s"),
    [
        ("its process ended (seen by a)", 1001.5, 0.5),
        ("its process ended (seen by c)", None, None),
        ("its lease ended", None, LEASE_TTL_S),
        ("it started anew", None, 0.0),
    ],
)
def test_a_recovery_is_measured_phase_by_phase(
    agent: Agent, why: str, ended_s: float | None, detect_s: float | None
) -> None:
    agent.adopt(1, "a", "b", "c")
    agent.now_s = 1002.1
    lost = {"b": Loss("b1", 1002.0, why)}
    for _ in range(3):
        agent.telemetry.viewed(
            view(generation(1, node("a"), node("b"), node("c")), lost=lost), lambda _: ended_s
        )
    agent.now_s = 1002.25
    agent.adopt(2, "a", "c", kind=Kind.LOSS)
    agent.now_s = 1002.75
    agent.telemetry.entered(2)
    for local_rank in (0, 1):
        agent.telemetry.worker_came(local_rank, 7)
    agent.telemetry.worker_came(0, 7)
    agent.now_s = 1004.0
    rounds = {"global": LastRound(16, 0.1, 0, "shm", "failed", 1003.0)}
    agent.tell(Samples(generation=2, rounds=rounds))
    rounds = {"global": LastRound(16, 0.1, 0, "shm", "committed", 1003.75)}
    agent.tell(Samples(generation=1, rounds=rounds))
    agent.tell(Samples(generation=2, rounds=rounds))
    agent.tell(Samples(generation=2, rounds=rounds))
    found = agent.phases()
    detect = {} if detect_s is None else {"detect": detect_s}
    assert found == pytest.approx({**detect, "replan": 0.25, "regroup": 0.5, "first_round": 1.0})


def test_leaving_on_purpose_is_no_loss_to_recover_from(agent: Agent) -> None:
    agent.adopt(1, "a", "b")
    lost = {"b": Loss("b1", 1000.0, "it left on purpose", is_on_purpose=True)}
    agent.telemetry.viewed(view(generation(1, node("a"), node("b")), lost=lost))
    agent.adopt(2, "a", kind=Kind.LOSS)
    agent.telemetry.entered(2)
    assert agent.phases() == {}


def test_a_suspicion_that_was_wrong_is_no_loss_to_recover_from(agent: Agent) -> None:
    agent.adopt(1, "a", "b")
    lost = {"b": Loss("b1", 1000.0, "its process ended (seen by c)")}
    agent.telemetry.viewed(view(generation(1, node("a"), node("b")), lost=lost))
    agent.telemetry.viewed(view(generation(1, node("a"), node("b"))))
    agent.adopt(2, "a", kind=Kind.LOSS)
    assert agent.phases() == {}


def test_time_is_the_agents_until_a_worker_speaks_and_again_when_it_is_gone(agent: Agent) -> None:
    agent.now_s = 1010.0
    for local_rank in (0, 1):
        agent.telemetry.worker_came(local_rank, 7)
    assert agent.value(names.BADPUT_SECONDS, "start") == 20.0
    agent.now_s = 1020.0
    told = {
        (names.STEPS, ()): 5.0,
        (names.PRODUCTIVE_SECONDS, ()): 8.0,
        (names.BADPUT_SECONDS, ("quiet",)): 2.0,
    }
    for local_rank in (0, 1):
        agent.tell(Samples(counters=told), local_rank=local_rank)
    assert agent.value(names.GOODPUT) == 16.0 / 40.0
    agent.telemetry.worker_gone(1, 7)
    agent.now_s = 1025.0
    assert agent.value(names.BADPUT_SECONDS, "recovery") == 5.0
    assert agent.value(names.BADPUT_SECONDS, "quiet") == 4.0
    assert agent.value(names.PRODUCTIVE_SECONDS) == 16.0
    agent.telemetry.worker_came(1, 8)
    agent.telemetry.worker_gone(1, 7)
    agent.now_s = 1030.0
    assert agent.value(names.BADPUT_SECONDS, "recovery") == 5.0, "the old one is not the new one"


def test_a_report_that_is_none_is_dropped_and_counted(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.telemetry.worker_came(0, 7)
    for text in ("", "[]", "{}", '{"step": "x"}', "[" * 100_000):
        agent.telemetry.measured(0, 7, text)
    assert agent.value(names.REPORTS_DROPPED) == 5
    assert len(caplog.records) == 1, "it is said once"
    agent.telemetry.measured(0, 8, "of another process")
    assert agent.value(names.REPORTS_DROPPED) == 5
    agent.tell(Samples(counters={(names.STEPS, ()): 5.0}))
    assert agent.value(names.STEPS, "0") == 5


def test_nothing_that_goes_wrong_reaches_whoever_told(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.telemetry.worker_came(17, 7)
    agent.telemetry.worker_gone(-9, 7)
    agent.telemetry.viewed(None)  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    assert agent.value(names.GENERATION) == 0


# --- over http ------------------------------------------------------------------------------------------------


def test_health_is_that_the_agent_looks_at_its_workers(agent: Agent) -> None:
    agent.serve()
    assert agent.get("/healthz") == (200, b"ok\n")
    agent.now_s += HEALTH_S + 1
    status, body = agent.get("/healthz")
    assert (status, body) == (503, b"the agent has not looked at its workers for 31 s\n")
    agent.telemetry.looked()
    assert agent.get("/healthz")[0] == 200
    with agent.telemetry.meeting():
        agent.now_s += 10 * HEALTH_S
        assert agent.get("/healthz")[0] == 200, "it waits for others, and for no longer than it may"
    assert agent.get("/healthz")[0] == 200


def test_readiness_comes_with_its_reason(agent: Agent) -> None:
    agent.serve()
    assert agent.get("/readyz") == (200, b"ok\n")
    agent.why_not_ready = "workers [1] are not in generation 7 yet"
    assert agent.get("/readyz") == (503, b"workers [1] are not in generation 7 yet\n")


def test_status_is_of_the_whole_job(agent: Agent) -> None:
    agent.serve()
    agent.adopt(1, "a", "b")
    agent.telemetry.viewed(view(generation(1, node("a"), node("b")), live(node("c"))))
    agent.telemetry.worker_came(0, 7)
    agent.tell(Samples(step=12, state="averaging", gauges={(names.USER_VALUE, ("loss",)): math.inf}))
    found = json.loads(agent.get("/status")[1])
    assert {each["node_id"]: each["state"] for each in found["nodes"]} == {
        "a": "training",
        "b": "training",
        "c": "joining",
    }
    first = found["nodes"][0]
    assert [worker["state"] for worker in first["workers"]] == ["averaging", "starting"]
    assert first["metrics_port"] == agent.telemetry.port
    assert (found["step"], found["values"], found["decision"]["reason"]) == (12, {"loss": None}, "all there")


def test_a_worker_is_starting_until_it_speaks_and_gone_only_if_it_is_missed(agent: Agent) -> None:
    def states() -> list[str]:
        return [worker["state"] for worker in agent.telemetry._summary()["workers"]]

    assert states() == ["starting", "starting"]
    for local_rank in (0, 1):
        agent.telemetry.worker_came(local_rank, 7)
        agent.tell(Samples(step=1, state="training"), local_rank=local_rank)
    agent.telemetry.worker_gone(0, 7)
    assert states() == ["gone", "training"]
    agent.telemetry.workers_start()
    assert states() == ["starting", "starting"]
    # Its connection is known to have ended only now: it is not the new one's.
    agent.telemetry.worker_gone(1, 7)
    assert states() == ["starting", "starting"]
    for local_rank in (0, 1):
        agent.telemetry.worker_came(local_rank, 8)
    agent.telemetry.worker_done(1)
    agent.telemetry.worker_gone(1, 8)
    assert states() == ["joining", "done"]


def test_a_port_that_is_taken_costs_one_warning(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.serve()
    other = Agent()
    with contextlib.closing(other.telemetry), caplog.at_level(logging.INFO):
        other.serve(agent.telemetry.port)
        assert other.telemetry.port not in (0, agent.telemetry.port)
        assert other.get("/healthz")[0] == 200
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert f"http://127.0.0.1:{other.telemetry.port}/" in caplog.text


def test_an_address_that_is_not_ours_costs_one_warning(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.telemetry.serve(
        MetricsPlace("192.0.2.1", 0),
        why_not_ready=str,
        membership=lambda: Status(node("a"), Decision(Action.KEEP, "")),
        has_group_store=False,
    )
    assert (agent.telemetry.port, len(caplog.records)) == (0, 1)
