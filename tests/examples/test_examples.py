"""Every example runs on two nodes of two workers: its loss falls, and all replicas end identical."""

import ast
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.examples.running import EXAMPLES, WITHIN_S, Ended, node_command, read_ended, start
from tests.membership.etcd_servers import free_ports

NUM_NODES = 2
# Where two workers of a node do nothing that two nodes would not show.
ONE_SLOT = ("image_classifier", "language_model")
NAMES = (
    "ddp_in_node",
    "fsdp_in_node",
    "huggingface_trainer",
    "image_classifier",
    "language_model",
    "lightning_module",
    "plain_loop",
)


def run(commands: Sequence[Sequence[str]], folder: Path) -> list[Ended]:
    """Run these beside each other until all are done. Nothing may be left of them, and none may fail."""
    logs = [folder / f"log-{index}" for index in range(len(commands))]
    processes = [start(command, log) for command, log in zip(commands, logs, strict=True)]
    deadline_s = time.monotonic() + WITHIN_S
    try:
        codes = [process.wait(max(0.0, deadline_s - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    printed = "\n".join(log.read_text(errors="replace") for log in logs)
    assert codes == [0] * len(commands), printed
    assert "UserWarning" not in printed, printed
    return read_ended(printed)


def check(ended: Sequence[Ended], *, num_ranks: int, steps: int) -> None:
    assert [each.rank for each in ended] == list(range(num_ranks))
    assert all(each.num_steps == steps for each in ended), ended
    assert sum(each.last_loss for each in ended) < 0.7 * sum(each.first_loss for each in ended), ended
    assert len({each.digest for each in ended}) == 1, ended


@pytest.mark.parametrize("name", NAMES)
def test_example_trains_on_two_nodes_and_its_replicas_end_identical(name: str, tmp_path: Path) -> None:
    steps, slots, (port,) = 48, 1 if name in ONE_SLOT else 2, free_ports(1)
    nodes = f"{NUM_NODES}:{NUM_NODES}"
    commands = [
        node_command(name, node=node, nodes=nodes, slots=slots, port=port, steps=steps)
        for node in "ab"[:NUM_NODES]
    ]
    check(run(commands, tmp_path), num_ranks=NUM_NODES * slots, steps=steps)


@pytest.mark.parametrize(("name", "num_ranks"), [("plain_loop", 1), ("plain_loop", 2), ("fsdp_in_node", 2)])
def test_the_same_script_runs_alone_and_under_torchrun(name: str, num_ranks: int, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    start = [sys.executable, *(torchrun if num_ranks > 1 else [])]
    # More than a global period: there is a round, and a snapshot.
    ended = run([[*start, str(EXAMPLES / f"{name}.py"), "--steps", "70"]], tmp_path)
    check(ended, num_ranks=num_ranks, steps=70)


def test_every_example_is_run_here_and_named_in_the_readme() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NAMES)
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert all(f"examples/{name}.py" in readme for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_example_is_complete_by_itself(name: str) -> None:
    """It can be copied: it imports nothing from beside it, and begins with how to start it."""
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    opening = ast.get_docstring(tree)
    assert opening is not None
    assert f"examples/{name}.py" in opening
    imported = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    imported |= {alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names}
    assert not {str(module).partition(".")[0] for module in imported} & set(NAMES)


class Place:
    """As much of a job as the data's position needs."""

    def __init__(self, step: int, rank: int, world_size: int) -> None:
        self.step, self.rank, self.world_size = step, rank, world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_of_an_epoch_share_the_data_out_and_none_sees_a_row_twice(world_size: int) -> None:
    spec = importlib.util.spec_from_file_location("plain_loop", EXAMPLES / "plain_loop.py")
    assert spec is not None
    assert spec.loader is not None
    plain_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain_loop)
    num_rows = 1000
    steps = num_rows // (plain_loop.BATCH * world_size)
    rows = torch.cat(
        [
            plain_loop.rows_of(Place(step, rank, world_size), num_rows)
            for step in range(steps, 2 * steps)
            for rank in range(world_size)
        ]
    )
    assert len(rows) == steps * world_size * plain_loop.BATCH == len(set(rows.tolist()))
