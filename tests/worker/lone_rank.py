"""One rank of a job of two nodes, in this process: the test is its agent, and speaks for the other rank.

What the rank says to others it writes into a store; what the other rank says is written there by the test.
Rounds end as the test wants them to. All else is real: the averager, the threads that make the way to a
generation, the rules of opening.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.averaging.header import Agreement
from elastic_hieravg.averaging.mesh import lost
from elastic_hieravg.averaging.rounds import Contribution
from elastic_hieravg.errors import InDoubtError, ParametersError
from elastic_hieravg.events import Outcome, RoundDone
from elastic_hieravg.membership.local import Follow, FromWorker
from elastic_hieravg.membership.memory import MemoryKeyValue
from elastic_hieravg.membership.messages import Adopted
from elastic_hieravg.membership.opening import Opening, read_opening
from elastic_hieravg.membership.proposing import plan_generation
from elastic_hieravg.membership.records import Generation, Job, Kind
from elastic_hieravg.metrics.tally import Tally
from elastic_hieravg.plan import GroupKey, Hierarchy, Node, Plan, Topology, first_keys, fit
from elastic_hieravg.rendezvous.group_store import GroupStore
from elastic_hieravg.worker import generations as generations_module
from elastic_hieravg.worker.averager import ElasticAverager
from elastic_hieravg.worker.roles import Arrival, Role

PERIOD = 4
WITHIN_S = 60.0
POLL_S = 0.005
OLD, RESULT = 1.0, 2.0

JOB = Job(nodes_min=1, nodes_max=2, hierarchy=Hierarchy.parse(f"global={PERIOD}"))
_FORMS = '{"forms": [], "of": []}'


class Fate(Enum):
    """How a round ends for the rank."""

    COMMITTED = 1
    LOST = 2
    IN_DOUBT = 3


class ScriptedGroup:
    """A group whose other rank is the test: what comes of a round is the next of the engine's fates."""

    def __init__(self, engine: "ScriptedEngine") -> None:
        self._engine = engine
        self._in_doubt: Agreement | None = None
        self.is_over = False
        self.round_index = self.committed_index = 0

    def run(self, contribution: Contribution) -> tuple[RoundDone, Agreement]:
        assert not self.is_over
        self.round_index += 1
        is_ending = contribution.is_ending or self._engine.is_other_ending
        agreement = Agreement((0.5, 0.5), contribution.step, (), contribution.trained, is_ending)
        fate = self._engine.fates.pop(0) if self._engine.fates else Fate.COMMITTED
        if fate is not Fate.COMMITTED:
            self.cut()
            self._engine.num_faults += 1
        if fate is Fate.IN_DOUBT:
            self._in_doubt = agreement
            raise InDoubtError(*lost("rank 1", "it died in its verdict").problems)
        if fate is Fate.LOST:
            raise lost("rank 1", "its connection ended")
        self._take()
        done = RoundDone("global", contribution.step, Outcome.COMMITTED, seconds=0.1, divergence_ratio=0.02)
        return done, agreement

    def take_result(self) -> Agreement:
        agreement, self._in_doubt = self._in_doubt, None
        assert agreement is not None
        self._take()
        return agreement

    def cut(self) -> None:
        self.is_over = True

    def close(self) -> None:
        self.cut()

    def _take(self) -> None:
        self.committed_index = self.round_index
        with torch.no_grad():
            for parameter in self._engine.model.parameters():
                parameter.fill_(RESULT)


class ScriptedEngine(HierarchicalAverager):
    """`fates`: how the next rounds end; all further ones are committed. `refusal`: what it says to any plan."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model = model
        self.fates: list[Fate] = []
        self.num_faults = 0
        self.is_other_ending = False
        self.refusal: ParametersError | None = None
        super().__init__(model, **settings)

    def own_keys(self, plan: Plan, *, rank: int, keys: Collection[GroupKey]) -> dict[str, GroupKey]:
        if self.refusal is not None:
            raise self.refusal
        return super().own_keys(plan, rank=rank, keys=keys)

    def build(self, *_: object, **__: object) -> ScriptedGroup:  # type: ignore[override]
        return ScriptedGroup(self)


class LoneRank:
    """Rank 0, on node a. `entered`: each generation it has entered, and the step at which it did.

    `on_entered` is called when it enters one, in the training thread; `on_told` when it tells its agent
    something.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.kv = MemoryKeyValue()
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, OLD)
        plan = fit(Hierarchy.parse("global=1"), Topology([Node("alone", 1)]))
        assert isinstance(plan, Plan)
        self.rounds: list[RoundDone] = []
        self.tally = Tally(clock=clock)
        settings = {"plan": plan, "rank": 0, "store": HashStore(), "equalize": False}
        self.engine = ScriptedEngine(self.model, observe=self._observe, **settings)
        self.told: list[FromWorker] = []
        self.entered: dict[int, int] = {}
        self.on_entered: Callable[[int], None] = lambda _: None
        self.on_told: Callable[[FromWorker], None] = lambda _: None
        self.averager = ElasticAverager(
            self.engine,
            local_rank=0,
            tell=self._tell,
            on_change=self._changed,
            tally=self.tally,
            observe=self._observe,
        )
        self.newest = 0
        self.keys: tuple[GroupKey, ...] = ()

    @property
    def value(self) -> float:
        return self.model.weight.item()

    def outcomes(self) -> list[str]:
        return [done.outcome.value for done in self.rounds]

    def begin(self) -> None:
        """It holds the model, and has entered generation 1 at step 1."""
        self.averager.hold_alone()
        self.follow(theirs=Opening(0, holds_model=True))
        self.await_entry()
        self.averager.step()
        assert self.entered == {1: 1}

    def follow(
        self,
        *,
        theirs: Opening | None,
        kind: Kind = Kind.REBUILD,
        hold: str = "",
        incarnations: Iterable[str] = ("a1", "b1"),
        keeps_group: bool = False,
    ) -> None:
        """Tell it of the next generation. The other rank has said its opening, or says it later.

        `keeps_group`: the group of the generation before lives on.
        """
        self.newest += 1
        nodes = tuple(Node(name[0], 1, incarnation=name) for name in incarnations)
        plan, _ = plan_generation(JOB, self.newest, nodes)
        addresses = {node.node_id: "127.0.0.1" for node in nodes}
        built = tuple(self.newest for _ in first_keys(plan))
        if keeps_group:
            built = tuple(key.generation for key in self.keys)
        generation = Generation(
            self.newest,
            kind,
            "told by the test",
            plan.topology.nodes,
            addresses,
            plan.digest,
            built,
            hold,
            "b1",
        )
        self.keys = generation.keys(plan)
        model = hashlib.sha256("\n".join(self.engine.tensors).encode()).hexdigest()
        keys = tuple(key.name for key in self.keys) if keeps_group else ()
        holds_model = theirs is None or theirs.holds_model
        step = 0 if theirs is None else theirs.step
        digest = hashlib.sha256(_FORMS.encode()).hexdigest()
        self._say(
            {
                "arrived/1": Arrival(holds_model, model, keys).to_json(),
                "built/1": Role(step, holds_model=holds_model).to_json(),
                # Optimizer state, if somebody asks for it: there is none.
                "state/1": f"{step} {digest}",
                f"state/forms/{digest}": _FORMS,
                "state/groups": "[]",
            }
        )
        if theirs is not None:
            self.say_opening(theirs)
        self.averager.generations.follow(Follow(JOB.to_json(), generation.to_json(), "127.0.0.1", 1, "a"))

    def say_opening(self, opening: Opening) -> None:
        self._say({"opening/1": opening.to_json()})

    def await_posted(self) -> None:
        """Until it has said where it enters the newest generation."""
        wait_for("its opening", lambda: self._is_of_newest() and self._generations.posted_step is not None)

    def await_entry(self) -> None:
        """Until it knows where all enter the newest generation."""
        wait_for("the entry", lambda: self._is_of_newest() and self._generations.entering is not None)

    def own_opening(self) -> Opening:
        """What it has said on the way to the newest generation."""
        store = GroupStore(self.kv, f"/generation/{self.newest}/")
        return read_opening(store.await_all(["opening/0"], timeout_s=WITHIN_S)[0].decode())

    def when_waiting(self, act: Callable[[], None]) -> None:
        """Do something, in another thread, once the training thread waits where it can enter a generation."""

        def run() -> None:
            wait_for("it waits", lambda: self.averager._boundary.is_waiting)
            act()

        threading.Thread(target=run, daemon=True).start()

    def close(self) -> None:
        self.averager.close()

    @property
    def _generations(self) -> generations_module.Generations:
        return self.averager.generations

    def _is_of_newest(self) -> bool:
        return self._generations.newest_number == self.newest

    def _say(self, words: Mapping[str, str]) -> None:
        store = GroupStore(self.kv, f"/generation/{self.newest}/")
        for key, word in words.items():
            store.set(key, word)

    def _tell(self, message: FromWorker) -> None:
        self.told.append(message)
        self.on_told(message)

    def _changed(self, adopted: Adopted) -> None:
        self.entered[adopted.generation.number] = self.engine.step_count
        self.on_entered(adopted.generation.number)

    def _observe(self, done: RoundDone) -> None:
        self.rounds.append(replace(done))
        self.tally.round_done(done)


@contextmanager
def lone_rank(
    monkeypatch: pytest.MonkeyPatch, *, clock: Callable[[], float] = time.perf_counter
) -> Iterator[LoneRank]:
    rank = LoneRank(clock=clock)
    monkeypatch.setattr(generations_module, "EmbeddedKeyValue", lambda *_, **__: rank.kv)
    try:
        yield rank
    finally:
        rank.close()


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(POLL_S)
