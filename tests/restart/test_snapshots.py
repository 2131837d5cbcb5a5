"""Snapshots: what is written comes back, and what was not written to its end never does."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from elastic_hieravg.errors import ParametersError
from elastic_hieravg.membership import snapshot_files
from elastic_hieravg.worker import snapshots
from elastic_hieravg.worker.snapshots import (
    Kept,
    Moment,
    Snapshot,
    SnapshotFile,
    Spec,
    State,
    read_newest,
    read_snapshots,
)
from elastic_hieravg.worker.trees import decode_tree, encode_tree

MOMENT = Moment(16, 3, "there")
KILLS = 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot"


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.99), amsgrad=True),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "groups": lambda: torch.optim.Adam(
            [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(model.parameters())]
        ),
        "lbfgs": lambda: torch.optim.LBFGS(model.parameters(), max_iter=3),
    }
    return makers[kind]()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3) -> None:
    def loss() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = (model(torch.linspace(-1, 1, 32).view(4, 8)) - 1).square().mean()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    for _ in range(steps):
        optimizer.step(loss)  # type: ignore[arg-type]


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    tensors: list[Tensor] = []
    tree = encode_tree(optimizer.state_dict(), tensors, where="it")
    return [tree, [tensor.tolist() for tensor in (*model.state_dict().values(), *tensors)]]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum", "groups", "lbfgs"])
def test_model_and_optimizer_come_back_to_the_last_bit(path: Path, kind: str) -> None:
    model = make_model()
    optimizer = make_optimizer(kind, model)
    train(model, optimizer)
    kept = Kept(model, optimizer)
    SnapshotFile(path).write(*kept.state(MOMENT))
    wanted = values_of(model, optimizer)

    other = make_model()
    other_optimizer = make_optimizer(kind, other)
    restored = Kept(other, other_optimizer)
    found = read_newest(path)
    assert found is not None
    assert found.state.moment == MOMENT
    assert found.state.signature == restored.signature
    restored.restore(found)
    assert values_of(other, other_optimizer) == wanted
    # They go on alike, and what they do does not reach the snapshot.
    train(model, optimizer)
    train(other, other_optimizer)
    assert values_of(other, other_optimizer) == values_of(model, optimizer)
    assert found.is_whole()


def test_every_type_and_layout_comes_back(path: Path) -> None:
    tensors = [
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.tensor(7),
        torch.tensor([True, False, True]),
        torch.randn(3, dtype=torch.complex64),
        torch.empty(0, 3),
        torch.arange(5, dtype=torch.int16),
    ]
    kept = Kept([tensor.clone() for tensor in tensors], None)
    SnapshotFile(path).write(*kept.state(MOMENT))
    found = read_newest(path)
    assert found is not None
    for before, after in zip(tensors, found.tensors(), strict=True):
        assert torch.equal(before, after)


def test_the_newest_is_read_and_the_one_before_is_still_there(path: Path) -> None:
    tensor = torch.zeros(1000)
    file, kept = SnapshotFile(path), Kept([tensor], None)
    for step in range(1, 6):
        tensor.fill_(step)
        file.write(*kept.state(Moment(step, 1, "there")))
        assert [each.state.moment.step for each in read_snapshots(path)] == [step, step - 1][: min(step, 2)]
        assert [float(each.tensors()[0][0]) for each in read_snapshots(path)] == [step, step - 1][
            : min(step, 2)
        ]
    # Another process goes on in the same file.
    SnapshotFile(path).write(*kept.state(Moment(6, 2, "here")))
    assert [each.state.moment.step for each in read_snapshots(path)] == [6, 5]


def test_a_state_that_grew_gets_a_larger_file(path: Path) -> None:
    model = make_model()
    optimizer = make_optimizer("adamw", model)
    file, kept = SnapshotFile(path), Kept(model, optimizer)
    file.write(*kept.state(Moment(1, 1, "there")))
    before = path.stat().st_size
    train(model, optimizer)
    file.write(*kept.state(Moment(2, 1, "there")))
    assert path.stat().st_size > before
    assert read_newest(path).state.moment.step == 2  # type: ignore[union-attr]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_only_its_owner_may_read_it(path: Path) -> None:
    before = os.umask(0)
    try:
        SnapshotFile(path).write(*Kept([torch.zeros(3)], None).state(MOMENT))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


# --- what is not whole --------------------------------------------------------------------------------------


def write_for_ever(path: Path, reached: int) -> None:
    """What a training process does, only faster: each step's snapshot holds nothing but the step."""
    torch.set_num_threads(1)
    tensors = [torch.zeros(50_000), torch.zeros(3, 1000)]
    file, kept = SnapshotFile(path), Kept(tensors, None)
    newest = read_newest(path)
    step = newest.state.moment.step if newest else 0
    while True:
        step += 1
        for tensor in tensors:
            tensor.fill_(step)
        file.write(*kept.state(Moment(step, 1, "there")))
        os.pwrite(reached, step.to_bytes(8, "little"), 0)


def test_a_write_that_was_cut_short_is_never_taken(path: Path) -> None:
    """SIGKILL at random moments; whoever comes next goes on in the same file."""
    seed = int(os.environ.get("SEED", "5"))
    print(f"seed {seed}: replay with SEED={seed}")  # noqa: T201 - pytest shows it if the test fails
    random_s = random.Random(seed)
    num_kills, num_torn, last = 0, 0, 0
    with (path.parent / "reached").open("w+b") as reached:
        for _ in range(KILLS):
            child = os.fork()
            if child == 0:
                write_for_ever(path, reached.fileno())
            deadline_s = time.monotonic() + 60
            while int.from_bytes(os.pread(reached.fileno(), 8, 0), "little") < last + 2:
                assert time.monotonic() < deadline_s
            time.sleep(random_s.random() * 0.003)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            num_kills += 1
            written = int.from_bytes(os.pread(reached.fileno(), 8, 0), "little")
            found = read_newest(path)
            assert found is not None
            last = found.state.moment.step
            # Nothing that was written is lost, and what is read is one step's, all of it.
            assert written <= last <= written + 1
            assert all(bool((tensor == last).all()) for tensor in found.tensors())
            num_torn += len(read_snapshots(path)) < 2
    assert num_kills == KILLS
    assert num_torn > 0, "no kill hit a write; make the snapshots larger"


def spoil(path: Path, found: Snapshot) -> None:
    """Change one byte of a snapshot's values."""
    content = bytearray(path.read_bytes())
    at = found._written.begin + found._written.num_bytes - 200
    content[at] ^= 1
    path.write_bytes(content)


def test_a_snapshot_with_a_wrong_checksum_is_not_taken_but_the_one_before(path: Path) -> None:
    tensor = torch.zeros(1000)
    file, kept = SnapshotFile(path), Kept([tensor], None)
    for step in (1, 2):
        tensor.fill_(step)
        file.write(*kept.state(Moment(step, 1, "there")))
    newest, before = read_snapshots(path)
    spoil(path, newest)
    found = read_newest(path)
    assert found is not None
    assert found.state.moment.step == 1
    # The next one takes the spoilt one's place, not that of the only good one.
    SnapshotFile(path).write(*kept.state(Moment(3, 1, "there")))
    assert [each.state.moment.step for each in read_snapshots(path) if each.is_whole()] == [3, 1]
    for each in read_snapshots(path):
        spoil(path, each)
    assert read_newest(path) is None
    assert before.state.moment.step == 1


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 12_288, 13_000])
def test_half_a_file_is_no_snapshot(path: Path, size: int) -> None:
    SnapshotFile(path).write(*Kept([torch.ones(2000)], None).state(MOMENT))
    os.truncate(path, size)
    assert read_newest(path) is None
    # And it is no hindrance either.
    SnapshotFile(path).write(*Kept([torch.ones(2000)], None).state(MOMENT))
    assert read_newest(path) is not None


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    SnapshotFile(tmp_path / "elsewhere").write(*Kept([torch.ones(20)], None).state(MOMENT))
    path.symlink_to(tmp_path / "elsewhere")
    assert read_newest(path) is None


def test_another_model_or_optimizer_is_told_by_its_signature() -> None:
    model = make_model()
    signatures = {
        Kept(model, None).signature,
        Kept(model, make_optimizer("sgd", model)).signature,
        Kept(model, make_optimizer("adamw", model)).signature,
        Kept(model, make_optimizer("groups", model)).signature,
        Kept(nn.Linear(8, 16), None).signature,
    }
    assert len(signatures) == 5


def test_no_room_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SnapshotFile(path)
    file.write(*Kept([torch.zeros(10)], None).state(Moment(1, 1, "there")))

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots, "require_memory", refuse)
    with pytest.raises(OSError, match="No space left"):
        file.write(*Kept([torch.zeros(100_000)], None).state(Moment(2, 1, "there")))
    found = read_newest(path)
    assert found is not None
    assert found.state.moment.step == 1


def test_an_optimizer_with_something_that_is_no_data_is_left_out_with_the_reason(path: Path) -> None:
    model = make_model()
    optimizer = make_optimizer("sgd", model)
    optimizer.param_groups[0]["schedule"] = lambda step: step
    kept = Kept(model, optimizer)
    SnapshotFile(path).write(*kept.state(MOMENT))
    assert kept.left_out.startswith("the optimizer's state['param_groups'][0]['schedule'] is a function")
    found = read_newest(path)
    assert found is not None
    assert found.state.optimizer is None


# --- trees --------------------------------------------------------------------------------------------------


def test_a_tree_comes_back_as_what_it_was() -> None:
    tensor = torch.ones(2)
    value = {
        "state": {0: {"step": tensor, "pair": (1, 2.5, None)}, 7: [True, "text", float("inf"), -0.0]},
        "groups": [{"betas": (0.9, 0.999), "dict": {}, "tensor": []}],
    }
    tensors: list[Tensor] = []
    document = encode_tree(value, tensors, where="it")
    assert State(MOMENT, "x", (), 0, document).to_json()
    assert decode_tree(document, tensors) == value
    assert decode_tree(document, tensors)["state"][0]["step"] is tensor


@pytest.mark.parametrize("value", [{1.5: 1}, {"x": {1, 2}}, object(), [lambda: 1], torch.float32])
def test_what_is_no_data_is_refused(value: object) -> None:
    with pytest.raises(ParametersError, match="cannot be kept as plain data"):
        encode_tree(value, [], where="it")


def test_a_tree_without_end_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ParametersError, match="cannot be kept"):
        encode_tree(endless, [], where="it")


def test_a_type_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ParametersError, match="cannot be kept"):
        Spec.of(torch.zeros(3).to(torch.float8_e4m3fn))


# --- whose files --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(snapshot_files, "FOLDER", tmp_path)
    return tmp_path


def touch(owner: snapshot_files.Owner, *, run_id: str = "run", local_rank: int = 0) -> Path:
    path = snapshot_files.path_of(run_id=run_id, owner=owner, local_rank=local_rank)
    path.touch()
    return path


def test_files_of_agents_that_are_gone_are_removed_and_no_others(folder: Path) -> None:
    alive = snapshot_files.Owner.of_process(os.getpid())
    assert alive is not None
    # The same process id, used again.
    dead = snapshot_files.Owner(alive.namespace, alive.process_id, alive.started - 1)
    foreign = snapshot_files.Owner(alive.namespace + 1, alive.process_id, alive.started)
    now_s = time.time()
    kept = [
        touch(alive),
        touch(alive, run_id="other"),
        touch(foreign),
        folder / "hieravg-snapshot-x",
        folder / "y",
    ]
    kept[-1].touch()
    kept[-2].touch()
    gone = [touch(dead), touch(dead, run_id="other", local_rank=3)]
    unfinished = gone[0].with_name(gone[0].name + snapshot_files.UNFINISHED)
    unfinished.touch()
    assert snapshot_files.remove_stale(now_s) == 3
    assert sorted(folder.iterdir()) == sorted(kept)
    # Nobody can see whether that agent lives; after an hour without a snapshot it does not.
    assert snapshot_files.remove_stale(now_s + snapshot_files.FOREIGN_AGE_S + 60) == 1
    assert snapshot_files.remove_of(alive) == 2
    assert sorted(folder.iterdir()) == sorted(kept[-2:])


def test_a_worker_finds_what_its_own_agents_workers_left(folder: Path) -> None:
    alive = snapshot_files.Owner.of_process(os.getpid())
    assert alive is not None
    wanted = [touch(alive, local_rank=rank) for rank in (0, 2, 10)]
    touch(alive, run_id="other")
    touch(snapshot_files.Owner(alive.namespace, alive.process_id, alive.started + 1))
    wanted[0].with_name(wanted[0].name + snapshot_files.UNFINISHED).touch()
    assert snapshot_files.paths_of(run_id="run", owner=alive) == wanted


def test_the_agent_is_found_behind_a_wrapper() -> None:
    me = snapshot_files.Owner.of_process(os.getpid())
    code = (
        "from elastic_hieravg.membership.snapshot_files import find_agent; print(find_agent(mark='TEST_MARK'))"
    )
    inner = f"{sys.executable} -c {shlex.quote(code)}; true"
    for command in (["sh", "-c", inner], ["sh", "-c", f"sh -c {shlex.quote(inner)}; true"]):
        said = subprocess.run(command, env={**os.environ, "TEST_MARK": "1"}, check=True, capture_output=True)
        assert said.stdout.decode().strip() == str(me)
