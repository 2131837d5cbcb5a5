"""One attempt, seen from a rank: what a lost peer looks like, and what is kept when."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from elastic_hieravg.averaging.averager import HierarchicalAverager
from elastic_hieravg.averaging.header import Agreement
from elastic_hieravg.averaging.mesh import lost
from elastic_hieravg.errors import InputError, MembershipError, PeerLostError
from elastic_hieravg.events import Outcome, RoundDone
from elastic_hieravg.metrics import catalogue as names
from elastic_hieravg.metrics.tally import Tally
from elastic_hieravg.plan import Hierarchy, Node, Plan, PlannedLevel, Topology, fit
from elastic_hieravg.worker.attempt import RestartedAverager
from elastic_hieravg.worker.restarted import _check_same
from elastic_hieravg.worker.snapshots import Kept, SnapshotFile, read_newest

PERIOD = 4
MakeAverager = Callable[..., RestartedAverager]


class LonelyEngine(HierarchicalAverager):
    """A rank of two whose peer never comes: building groups is left out, and every round finds it lost."""

    def _build_missing(self, plan: Plan, *_: object) -> dict:  # type: ignore[type-arg]
        return {}

    def run(self, level: PlannedLevel, **_: object) -> RoundDone | None:
        raise lost("rank 1 (b/0)", "its connection ended")


class SociableEngine(HierarchicalAverager):
    """A rank of two whose peer always comes."""

    def _build_missing(self, plan: Plan, *_: object) -> dict:  # type: ignore[type-arg]
        return {}

    def run(
        self, level: PlannedLevel, *, holds_model: bool = True, is_ending: bool = False
    ) -> RoundDone | None:
        self.agreed = Agreement((0.5, 0.5), self.step_count, (), self._trained, is_ending)
        self._done(level, self.agreed)
        return RoundDone(level.name, self.step_count, Outcome.COMMITTED)


@pytest.fixture
def make(tmp_path: Path) -> MakeAverager:
    def make_averager(
        *node_ids: str,
        engine: type[HierarchicalAverager] = HierarchicalAverager,
        agent_wait_s: float = 0.0,
        tally: Tally | None = None,
    ) -> RestartedAverager:
        model = nn.Linear(3, 2)
        plan = fit(Hierarchy.parse(f"global={PERIOD}"), Topology([Node(node_id, 1) for node_id in node_ids]))
        return RestartedAverager(
            engine(model, plan=plan, rank=0, store=HashStore(), equalize=False),
            kept=Kept(model, torch.optim.SGD(model.parameters(), lr=0.1)),
            file=SnapshotFile(tmp_path / "snapshot"),
            name="there",
            addresses={},
            period_steps=PERIOD,
            agent_wait_s=agent_wait_s,
            tally=tally or Tally(),
        )

    return make_averager


def test_a_lost_peer_is_an_exception_that_says_what_comes_next(make: MakeAverager) -> None:
    averager = make("a", "b", engine=LonelyEngine)
    for _ in range(PERIOD - 1):
        averager.step()
    with pytest.raises(PeerLostError) as error:
        averager.step()
    (problem,) = error.value.problems
    assert (
        problem.message == "a peer is lost at step 4: rank 1 (b/0) is lost to its group: its connection ended"
    )
    assert "let this end the process: all workers are started anew, and go on from the snapshot" in problem.hint


def test_the_agent_has_the_time_to_end_the_worker_first(make: MakeAverager) -> None:
    averager = make("a", "b", engine=LonelyEngine, agent_wait_s=0.3)
    for _ in range(PERIOD - 1):
        averager.step()
    started_s = time.monotonic()
    with pytest.raises(PeerLostError, match="a peer is lost"):
        averager.step()
    assert time.monotonic() - started_s >= 0.3


def test_a_rank_that_is_alone_keeps_snapshots_too(make: MakeAverager, tmp_path: Path) -> None:
    averager = make("a")
    for _ in range(2 * PERIOD + 1):
        averager.step()
    found = read_newest(tmp_path / "snapshot")
    assert found is not None
    assert found.state.moment.step == 2 * PERIOD
    averager.finish()
    found = read_newest(tmp_path / "snapshot")
    assert found is not None
    assert found.state.moment.step == 2 * PERIOD + 1


def test_no_room_is_told_once_and_training_goes_on(
    make: MakeAverager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    averager = make("a")
    (tmp_path / "snapshot.new").mkdir()
    (tmp_path / "snapshot.new" / "in the way").touch()
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * PERIOD):
            averager.step()
    assert averager.step_count == 3 * PERIOD
    assert caplog.text.count("no snapshot of step 4 can be kept") == 1
    assert caplog.text.count("can be kept") == 1


@pytest.mark.parametrize("node_ids", ["a", "ab"])
def test_a_step_over_no_number_of_samples_is_refused(make: MakeAverager, node_ids: str) -> None:
    averager = make(*node_ids, engine=LonelyEngine)
    for num_samples in (-1, float("nan"), float("inf")):
        with pytest.raises(MembershipError, match="give a number of samples"):
            averager.step(num_samples)


def test_empty_steps_lead_to_the_end_and_are_not_counted_as_work(make: MakeAverager) -> None:
    tally = Tally()
    averager = make("a", "b", engine=SociableEngine, tally=tally)
    averager.step(8)
    before = tally.samples(rank=0, generation=0, step=0, state="", values={}).counters
    averager.finish()
    assert averager.is_ended
    assert averager._engine.step_count == PERIOD
    assert averager.step_count == 1
    after = tally.samples(rank=0, generation=0, step=0, state="", values={}).counters
    for name in (names.STEPS, names.SAMPLES, names.PRODUCTIVE_SECONDS):
        assert after[name, ()] == before[name, ()] > 0


def test_workers_go_on_from_one_checkpoint_only() -> None:
    _check_same(["500", "500"])
    with pytest.raises(InputError, match=r"different steps: 0, 500, 1000\n\nhint: load the same checkpoint"):
        _check_same(["500", "1000", "0"])
