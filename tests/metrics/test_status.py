"""The status of a whole job: who is in which state, what happened, and what the agents tell each other."""

import contextlib
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from elastic_hieravg.membership.decisions import Live, Loss, View
from elastic_hieravg.membership.embedded import EmbeddedKeyValue, EmbeddedServer
from elastic_hieravg.membership.frames import FRAME_BYTES_MAX
from elastic_hieravg.membership.kv import Put, Write
from elastic_hieravg.membership.mirror import LEFT
from elastic_hieravg.membership.records import Generation, Job, Kind, NodeRecord, NodeState, StoreOffer
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics import summaries as summaries_module
from elastic_hieravg.metrics.board import EVENTS_MAX, LEFT_SHOWN_S, LOST_MAX, Board
from elastic_hieravg.metrics.catalogue import NodeShown
from elastic_hieravg.metrics.pace import POINTS_MAX, Pace, of_late
from elastic_hieravg.metrics.samples import LastRound, Samples
from elastic_hieravg.metrics.status import (
    GROUPS_MAX,
    Document,
    JobSeen,
    WorkerSeen,
    fitted,
    read_summary,
    status,
    status_json,
    summary,
)
from elastic_hieravg.metrics.summaries import GROUPS_RUN_ID, PREFIX, Summaries
from elastic_hieravg.plan import Hierarchy, Node, Plan, Topology, fit

WITHIN_S = 60.0
JOB = Job(1, 3, Hierarchy.parse("node=4,global=16"))


def node(name: str, *, life: int = 1, slots: int = 2) -> Node:
    return Node(name, slots, {"zone": "z1"}, f"{name}{life}")


def live(member: Node, state: NodeState = NodeState.READY) -> Live:
    return Live(NodeRecord(member, state, "10.0.0.1", 7), 0.0)


def generation(number: int, *members: Node, kind: Kind = Kind.START, reason: str = "because") -> Generation:
    addresses = {member.node_id: "10.0.0.1" for member in members}
    return Generation(number, kind, reason, members, addresses, "", (), "", "")


def view(made: Generation | None, *others: Live, lost: dict[str, Loss] | None = None) -> View:
    """Everybody in the generation who is not lost lives; `others` too."""
    members = made.members if made else ()
    nodes = {each.node_id: live(each) for each in members if each.node_id not in (lost or {})}
    nodes |= {each.record.node.node_id: each for each in others}
    return View(node("a"), nodes, made, lost or {})


def states(board: Board) -> dict[str, NodeShown]:
    return {node_id: seen.state for node_id, seen in board.nodes.items()}


# --- the board ------------------------------------------------------------------------------------------------


def test_states_of_nodes() -> None:
    board = Board(nodes_max=3)
    joining, leaving = live(node("d"), NodeState.JOINING), live(node("e"), NodeState.LEAVING)
    board.see(10.0, view(None, live(node("a")), joining))
    assert states(board) == {"a": NodeShown.JOINING, "d": NodeShown.JOINING}
    made = generation(1, node("a"), node("b"))
    board.see(11.0, view(made, live(node("c")), joining, leaving))
    assert states(board) == {
        "a": NodeShown.TRAINING,
        "b": NodeShown.TRAINING,
        "c": NodeShown.JOINING,
        "d": NodeShown.JOINING,
        "e": NodeShown.LEAVING,
    }
    full = generation(2, node("a"), node("b"), node("c"), kind=Kind.JOIN)
    board.see(12.0, view(full, live(node("d")), live(node("f"), NodeState.JOINING)))
    assert states(board)["d"] is NodeShown.SPARE
    assert states(board)["f"] is NodeShown.JOINING
    assert board.count_by_state()[NodeShown.TRAINING] == 3
    assert [seen.since_s for seen in board.nodes.values()] == [11.0, 11.0, 12.0, 12.0, 12.0]


def test_a_lost_node_is_shown_with_the_reason_until_it_is_back() -> None:
    board = Board(nodes_max=3)
    board.see(10.0, view(generation(1, node("a"), node("b"))))
    board.see(20.0, view(generation(1, node("a"), node("b")), lost={"b": Loss("b1", 5.0, "its process ended")}))
    assert (board.nodes["b"].state, board.nodes["b"].reason) == (NodeShown.LOST, "its process ended")
    board.see(21.0, view(generation(2, node("a"), kind=Kind.LOSS)))
    lost = board.nodes["b"]
    assert (lost.state, lost.reason, lost.since_s) == (NodeShown.LOST, "its process ended", 20.0)
    board.see(30.0, view(board.generation, live(node("b", life=2), NodeState.JOINING)))
    assert (board.nodes["b"].state, board.nodes["b"].reason) == (NodeShown.JOINING, "")
    board.see(31.0, view(generation(3, node("a"), node("b", life=2), kind=Kind.JOIN)))
    assert states(board) == {"a": NodeShown.TRAINING, "b": NodeShown.TRAINING}
    assert [(each.generation, each.kind, each.left, each.came) for each in board.events] == [
        (1, "start", (), ("a", "b")),
        (2, "loss", ("b",), ()),
        (3, "join", (), ("b",)),
    ]


def test_a_node_that_goes_on_purpose_is_leaving() -> None:
    board = Board(nodes_max=3)
    gone = {"b": Loss("b1", 5.0, "it left on purpose", is_on_purpose=True)}
    board.see(10.0, view(generation(1, node("a"), node("b")), lost=gone))
    assert states(board)["b"] is NodeShown.LEAVING


@pytest.mark.parametrize("has_seen_it_leave", [True, False])
def test_a_node_that_went_on_purpose_has_left_and_is_shown_for_a_while(has_seen_it_leave: bool) -> None:
    board = Board(nodes_max=3)
    both = generation(1, node("a"), node("b"))
    board.see(10.0, view(both))
    if has_seen_it_leave:
        board.see(11.0, view(both, lost={"b": Loss("b1", 5.0, LEFT, is_on_purpose=True)}))
    alone = generation(2, node("a"), kind=Kind.LOSS, reason=f"lost b: {LEFT}")
    # Its record is there a moment longer than its part in the job.
    board.see(12.0, view(alone, live(node("b"), NodeState.LEAVING)))
    board.see(13.0, view(alone))
    left = board.nodes["b"]
    assert (left.state, left.reason, left.since_s) == (NodeShown.LEFT, LEFT, 12.0)
    assert NodeShown.LEFT not in board.count_by_state()
    assert sum(board.count_by_state().values()) == 1
    assert board.shown(12.0 + LEFT_SHOWN_S).keys() == {"a", "b"}
    assert board.shown(13.0 + LEFT_SHOWN_S).keys() == {"a"}
    # It may come back.
    board.see(20.0, view(alone, live(node("b", life=2), NodeState.JOINING)))
    assert board.nodes["b"].state is NodeShown.JOINING


def test_a_node_that_started_anew_has_come() -> None:
    board = Board(nodes_max=3)
    board.see(10.0, view(generation(1, node("a"), node("b"))))
    board.see(11.0, view(generation(2, node("a"), node("b", life=2), kind=Kind.JOIN)))
    assert board.events[-1].came == ("b",)
    assert board.events[-1].left == ()


def test_what_is_remembered_is_bounded() -> None:
    board = Board(nodes_max=3)
    for number in range(1, 1000):
        board.see(float(number), view(generation(number, node("a"), node(f"n{number}"))))
    assert len(board.events) == EVENTS_MAX
    assert board.count_by_state()[NodeShown.LOST] == LOST_MAX
    assert "n998" in board.nodes
    assert "n1" not in board.nodes


# --- the pace -------------------------------------------------------------------------------------------------


def at(steps: float, productive_s: float, **values: float) -> Samples:
    return Samples(
        step=int(steps),
        state="training",
        counters={(names.STEPS, ()): steps, (names.PRODUCTIVE_SECONDS, ()): productive_s},
        gauges={(names.USER_VALUE, (name,)): value for name, value in values.items()},
        rounds={"global": LastRound(16, 0.004, 1000, "inter_node", "committed", steps)},
    )


def test_pace_is_that_of_late() -> None:
    pace = Pace()
    pace.point(0.0, {(0, 7): at(0, 0.0), (1, 8): at(0, 0.0)})
    assert list(pace.points) == []
    pace.point(2.0, {(0, 7): at(80, 1.6), (1, 8): at(60, 1.8)})
    assert pace.step_seconds_of == pytest.approx({(0, 7): 0.02, (1, 8): 0.03})
    assert list(pace.points) == [0.025]
    assert pace.steps_per_s == 35.0
    # One started anew, the other stands still: what is known of it stays.
    pace.point(4.0, {(0, 9): at(10, 1.0), (1, 8): at(60, 1.8)})
    assert pace.step_seconds_of == pytest.approx({(1, 8): 0.03})
    assert pace.steps_per_s == 0.0
    for index in range(2 * POINTS_MAX):
        pace.point(6.0 + 2 * index, {(1, 8): at(100.0 * (index + 1), 1.0 * (index + 3))})
    assert len(pace.points) == POINTS_MAX
    assert of_late(deque()) is None
    assert of_late([1.0] * 50 + [2.0] * 5) == 2.0


# When two workers of a node made their part of a round, and what each sent.
PARTS = [(99.0, 261_632), (99.5, 0)]


# --- the document ---------------------------------------------------------------------------------------------


def told(step_seconds: float, *, at_s: float = 100.0, step: int = 10, **values: float | None) -> Document:
    return {
        "at_s": at_s,
        "metrics_port": 9400,
        "goodput_ratio": 0.5,
        "steps_per_s": 48.0,
        "step_seconds": [step_seconds] * 3,
        "step": step,
        "workers": [],
        "rounds": {"global": {"step": step, "at_s": at_s, "seconds": 0.1}},
        "values": values,
    }


def document(summaries: dict[str, Document], *members: Node) -> Document:
    board = Board(nodes_max=3)
    board.see(90.0, view(generation(1, *members)))
    plan = fit(JOB.hierarchy, Topology(members), generation=1)
    assert isinstance(plan, Plan)
    seen = JobSeen("demo", "a", "etcd3", JOB, 50.0, "keep", "all there", plan=plan, summaries=summaries)
    found: Document = json.loads(status_json(status(101.0, seen=seen, board=board)))
    return found


def test_the_document_has_the_form_that_was_agreed_on() -> None:
    workers = [
        WorkerSeen(0, 4711, at(40, 0.8, loss=1.0), restarts=2, step_seconds=0.02),
        WorkerSeen(1, 4712, at(42, 0.8, loss=2.0, lr=math.nan)),
        WorkerSeen(2, 4713),
        WorkerSeen(3),
    ]
    own = summary(100.0, workers=workers, pace=Pace(), goodput_ratio=0.97, metrics_port=9400)
    found = document({"a": own}, node("a", slots=4), node("b"))
    assert set(found) == {
        *("version", "run_id", "node_id", "now_s", "began_s", "backend", "generation", "decision"),
        *("is_store_up", "goodput_ratio", "step", "world_ranks", "nodes_min", "nodes_max", "hierarchy"),
        *("mode", "nodes", "levels", "notes", "events", "values"),
    }
    assert (found["version"], found["step"], found["world_ranks"]) == (1, 42, 6)
    assert found["values"] == {"loss": 1.5, "lr": None}
    assert found["goodput_ratio"] == 0.97
    first, second = found["nodes"]
    assert set(first) == {
        *("node_id", "state", "labels", "slots", "ranks", "address", "metrics_port", "since_s", "reason"),
        *("goodput_ratio", "steps_per_s", "step_seconds", "is_straggler", "age_s", "workers"),
    }
    assert (first["ranks"], first["age_s"], first["metrics_port"]) == ([0, 1, 2, 3], 1.0, 9400)
    assert [worker["state"] for worker in first["workers"]] == ["training", "training", "joining", "gone"]
    assert first["workers"][0] == {
        "local_rank": 0,
        "rank": 0,
        "process_id": 4711,
        "step": 40,
        "state": "training",
        "step_seconds": 0.02,
        "restarts": 2,
    }
    assert (second["workers"], second["age_s"], second["ranks"]) == ([], None, [4, 5])
    last_level = found["levels"][-1]
    assert (last_level["name"], last_level["next_step"], last_level["last"]["step"]) == ("global", 48, 16)
    assert found["events"][0]["came"] == ["a", "b"]


def test_what_a_node_sent_in_a_round_is_what_all_its_workers_did() -> None:
    """The second carries no part of the model: another node has only one worker. It is the last to tell."""
    rounds = [LastRound(16, 0.004, sent, "inter_zone", "committed", at_s) for at_s, sent in PARTS]
    workers = [
        WorkerSeen(slot, 4711 + slot, Samples(step=16, rounds={"global": last}))
        for slot, last in enumerate(rounds)
    ]
    own = summary(100.0, workers=workers, pace=Pace(), goodput_ratio=1.0, metrics_port=0)
    last = document({"a": own}, node("a"), node("b", slots=1))["levels"][-1]["last"]
    assert (last["sent_bytes"], last["at_s"]) == (261_632, 99.5)
    own = summary(100.0, workers=workers[1:], pace=Pace(), goodput_ratio=1.0, metrics_port=0)
    last = document({"a": own}, node("a"), node("b", slots=1))["levels"][-1]["last"]
    assert last["sent_bytes"] is None, "who carries the model has not told yet"


def test_nodes_that_take_much_longer_are_stragglers() -> None:
    members = [node(name) for name in "abc"]
    found = document({"a": told(0.02), "b": told(0.021), "c": told(0.03)}, *members)
    assert [each["is_straggler"] for each in found["nodes"]] == [False, False, True]
    found = document({"a": told(0.02), "b": told(0.021), "c": told(0.025)}, *members)
    assert not any(each["is_straggler"] for each in found["nodes"])


def test_what_a_node_told_before_it_was_lost_is_not_of_now() -> None:
    found = document({"a": told(0.02, step=10, loss=1.0), "z": told(9.0, step=99, loss=5.0)}, node("a"))
    assert (found["step"], found["values"]) == (10, {"loss": 1.0})
    assert not found["nodes"][0]["is_straggler"]


def test_a_value_that_is_no_number_is_not_hidden_by_others() -> None:
    found = document({"a": told(0.02, loss=1.0), "b": told(0.02, loss=None)}, node("a"), node("b"))
    assert found["values"] == {"loss": None}


def test_a_document_of_a_large_job_is_bounded() -> None:
    members = [node(f"n{index}") for index in range(2 * GROUPS_MAX)]
    found = document({}, *members)
    assert [len(level["groups"]) for level in found["levels"]] == [GROUPS_MAX, 1]
    assert found["levels"][0]["num_groups"] == 2 * GROUPS_MAX


def test_a_summary_that_is_too_long_loses_its_longest_parts() -> None:
    pace = Pace()
    pace.points.extend([0.0123] * POINTS_MAX)
    workers = [WorkerSeen(index, 4711 + index, at(1, 1.0, loss=1.0)) for index in range(16)]
    made = summary(100.0, workers=workers, pace=pace, goodput_ratio=0.5, metrics_port=1)
    whole = read_summary(fitted(made, bytes_max=10_000))
    assert whole == made
    small = read_summary(fitted(made, bytes_max=500))
    assert small is not None
    assert (small["step_seconds"], small["workers"], small["step"]) == ([0.0123], [], 1)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"at_s": 1}', "[" * 100_000, '{"at_s": "x"}'])
def test_what_is_no_summary_is_ignored(text: str) -> None:
    assert read_summary(text) is None


# --- the exchange ---------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    made = EmbeddedServer("127.0.0.1", 0, run_id=GROUPS_RUN_ID, history_max=100)
    with contextlib.closing(made):
        yield made


class Agent:
    """One that tells of itself. `offer` is where it believes the store to be."""

    def __init__(self, name: str, offer: StoreOffer | None) -> None:
        self.offer = offer
        self.told = told(0.02)
        self.summaries = Summaries(
            own=lambda: self.told,
            offer=lambda: self.offer,
            known=lambda: ("a", "b"),
            node_id=lambda: name,
        )

    def sees(self) -> set[str]:
        return set(self.summaries.want())


@contextlib.contextmanager
def agents(offer: StoreOffer | None) -> Iterator[tuple[Agent, Agent]]:
    with contextlib.ExitStack() as stack:
        made = [Agent(name, offer) for name in "ab"]
        for each in made:
            stack.callback(each.summaries.close)
        yield made[0], made[1]


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries_module, "POINT_EVERY_S", 0.1)


def keys(server: EmbeddedServer) -> dict[str, str]:
    kv = EmbeddedKeyValue("127.0.0.1", server.port, run_id=GROUPS_RUN_ID)
    with contextlib.closing(kv):
        return {key: entry.value for key, entry in kv.get("").entries.items()}


def test_agents_know_of_each_other_while_somebody_looks(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries_module, "WANTED_S", 0.5)
    with agents(StoreOffer(1, "127.0.0.1", server.port)) as (a, b):
        wait_until("both have written", lambda: keys(server).keys() == {f"{PREFIX}a", f"{PREFIX}b"})
        assert a.summaries._read == {}, "nobody has looked"
        wait_until("a knows of b", lambda: a.sees() == {"a", "b"})
        b.told = told(0.02, step=77)
        wait_until("a sees what is new", lambda: a.summaries.want()["b"]["step"] == 77)
        time.sleep(1.0)
        b.told = told(0.02, step=78)
        wait_until("it is written", lambda: '"step":78' in keys(server)[f"{PREFIX}b"])
        assert a.summaries._read["b"]["step"] == 77, "nobody has looked for a while"


def test_a_store_that_fails_makes_summaries_old_and_nothing_else(server: EmbeddedServer) -> None:
    with agents(StoreOffer(1, "127.0.0.1", server.port)) as (a, b):
        wait_until("a knows of b", lambda: a.sees() == {"a", "b"})
        server.close()
        b.told = told(0.02, step=77)
        time.sleep(0.5)
        assert a.sees() == {"a", "b"}
        assert a.summaries.want()["b"]["step"] == 10
        other = EmbeddedServer("127.0.0.1", 0, run_id=GROUPS_RUN_ID)
        with contextlib.closing(other):
            # The next generation has another first node.
            a.offer = b.offer = StoreOffer(2, "127.0.0.1", other.port)
            wait_until("a sees what is new", lambda: a.summaries.want()["b"]["step"] == 77)


def test_what_others_write_is_not_trusted(server: EmbeddedServer) -> None:
    kv = EmbeddedKeyValue("127.0.0.1", server.port, run_id=GROUPS_RUN_ID)
    with contextlib.closing(kv), agents(StoreOffer(1, "127.0.0.1", server.port)) as (a, _):
        kv.write(Write({}, (Put(f"{PREFIX}x", "no summary"), Put(f"{PREFIX}y", "[]"))))
        wait_until("a knows of b", lambda: a.sees() == {"a", "b"})


def test_summaries_of_many_nodes_fit_into_one_answer() -> None:
    num_nodes = 4000
    made = summary(100.0, workers=[], pace=Pace(), goodput_ratio=0.5, metrics_port=1)
    made |= {"workers": [{"state": "training"}] * 200}
    text = fitted(made, bytes_max=FRAME_BYTES_MAX // 2 // num_nodes)
    entry = json.dumps({"key": f"{PREFIX}node-{num_nodes}", "value": text, "revision": 10**6, "lease": 2**55})
    assert len(entry) * num_nodes < FRAME_BYTES_MAX


def test_a_summary_that_cannot_be_made_is_made_the_next_time(server: EmbeddedServer) -> None:
    complaints: list[int] = []

    def own() -> Document:
        if len(complaints) < 3:
            raise RuntimeError("not now")
        return told(0.02)

    made = Summaries(
        own=own,
        offer=lambda: StoreOffer(1, "127.0.0.1", server.port),
        known=lambda: ("a",),
        node_id=lambda: "a",
        report=lambda: complaints.append(1),
    )
    with contextlib.closing(made):
        wait_until("it is written", lambda: f"{PREFIX}a" in keys(server))
    assert len(complaints) == 3


def test_close_ends_the_thread_whatever_the_store_does() -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        # One that takes connections and says nothing.
        silent = stack.enter_context(contextlib.closing(socket.create_server(("127.0.0.1", 0))))
        made = Agent("a", StoreOffer(1, "127.0.0.1", silent.getsockname()[1]))
        made.sees()
        time.sleep(0.3)
        began_s = time.monotonic()
        made.summaries.close()
        assert time.monotonic() - began_s < 10.0
    assert threading.active_count() == threads
