"""What it is for: a model trained on hosts with slow links, one of which is lost half-way.

Four hosts (network namespaces, links of 200 Mbit/s, for root) with two ranks each train the same model with
the same samples: gradients averaged every step by DDP, parameters averaged by torch's HierarchicalModelAverager
(both under stock torchrun), or by ours under `hieravg run`. Prints a table of loss, time, bytes and what the
loss of the host cost, and draws a picture. Exit code 1, and a line on stderr for each, if a promise is missed.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent))

from hosts import Hosts, HostsError, network
from report.running import add_flags, begin, finish
from training_jobs import NODES, NODES_MIN, OURS, SYSTEMS, TORCHRUN_CONF, Point, Run, System, judge, watch
from training_picture import draw_training
from training_worker import (
    BATCH,
    GLOBAL_STEPS,
    HELD_OUT_BATCH,
    NODE_STEPS,
    SLOTS,
    draw,
    make_model,
    read_texts,
)

PICTURE = Path(__file__).parent / "training.svg"
RATE = "200mbit"
STEPS, STEPS_QUICK = 384, 2 * GLOBAL_STEPS
# Each job, with its start; what is not done by then is shown as far as it came.
BOUND_S = 240.0


def measure(system: System, hosts: Hosts, folder: Path, *, num_steps: int) -> Run:
    # In the middle of a period: half of one is what a restart loses on average.
    kill_step = num_steps // 2 - GLOBAL_STEPS // 2
    watched = watch(system, hosts, folder, num_steps=num_steps, kill_step=kill_step, bound_s=BOUND_S)
    if not watched.steps:
        raise RuntimeError(f"{system.name} made no step: {watched.failure}")
    began_s = min(steps[0].at_s for steps in watched.steps.values())
    run = judge(system, watched, measure_losses(folder / "models", began_s=began_s), num_steps=num_steps)
    told = f"{run.done_s:.1f} s, {run.sent_bytes / 1e6:.0f} MB, standstill {run.standstill_s:.2f} s"
    print(f"{run.system}: {told}, loss {run.losses[-1][1]:.3f}", file=sys.stderr, flush=True)
    return run


@torch.no_grad()
def measure_losses(folder: Path, *, began_s: float) -> list[Point]:
    """The loss of each saved model on one fixed batch; of the untrained one first."""
    model = make_model().eval()
    _, held_out = read_texts()
    windows, following = draw(held_out, num_samples=HELD_OUT_BATCH, seed=0)
    found = [(began_s, nn.functional.cross_entropy(model(windows), following).item())]
    for path in sorted(folder.glob("*.pt")):
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        found.append((saved["at_s"], nn.functional.cross_entropy(model(windows), following).item()))
    return found


# --- tables ---------------------------------------------------------------------------------------------------


def shared_loss(runs: Sequence[Run]) -> float:
    """The lowest loss that all of them reached."""
    return max(min(loss for _, loss in run.losses) for run in runs)


def print_table(runs: Sequence[Run], *, num_parameters: int) -> None:
    print(
        f"\n## Training on {NODES} hosts with links of {RATE}\n\n{SLOTS} ranks each, a model of "
        f"{num_parameters / 1e6:.1f} M parameters, {runs[0].num_steps} steps of {BATCH} samples a rank; the "
        f"last host is killed half-way for good. Averages over the node every {NODE_STEPS} steps, over all "
        f"every {GLOBAL_STEPS}; DDP every step. torchrun: {TORCHRUN_CONF}, at least {NODES_MIN} nodes, a "
        f"checkpoint every {GLOBAL_STEPS} steps. Ours with its defaults.\n"
    )
    loss = shared_loss(runs)
    print(
        f"| | done, s | to loss {loss:.2f}, s | last loss | between hosts, MB | a step, s | a round of all, s "
        "| standstill, s | steps lost by survivors | survivors restarted | load |"
    )
    print("|---" * 11 + "|")
    # Whoever leaves ours out gets ratios to the last one.
    ours = next((run for run in runs if run.system == OURS.name), runs[-1])
    for run in runs:
        cells = (
            run.system,
            run.failure or compared(run.done_s, ours.done_s, digits=1),
            compared(run.reached_s(loss), ours.reached_s(loss), digits=1),
            f"{run.losses[-1][1]:.3f}",
            compared(run.sent_bytes / 1e6, ours.sent_bytes / 1e6, digits=0),
            f"{run.ordinary_s:.3f}",
            compared(run.round_s, ours.round_s, digits=3),
            compared(run.standstill_s, ours.standstill_s, digits=2),
            str(run.steps_lost),
            str(run.num_restarted),
            f"{run.load:.1f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def compared(value: float | None, ours: float | None, *, digits: int) -> str:
    """A figure, and how many times that of ours it is.

    >>> compared(30.0, 10.0, digits=1)
    '30.0 (3.0 times)'
    """
    if value is None:
        return ""
    return f"{value:.{digits}f}" + (f" ({value / ours:.1f} times)" if ours and ours != value else "")


def misses(runs: Sequence[Run]) -> list[str]:
    """What ours promised and did not keep."""
    found = [f"{run.system}: {run.failure}" for run in runs if run.system == OURS.name and run.failure]
    for run in runs:
        if run.system == OURS.name and run.num_restarted:
            found.append(f"{run.num_restarted} survivors restarted, promised 0")
        if run.system == OURS.name and run.steps_lost:
            found.append(f"survivors lost {run.steps_lost} steps, promised 0")
    return found


def end(number: int, _: FrameType | None) -> None:
    """Asked to end: everything that was started ends first."""
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=[each.way for each in SYSTEMS], default=None)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each rank, a multiple of {GLOBAL_STEPS}")
    add_flags(parser, quick="few steps, ours only, no picture")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the picture goes, as SVG")
    arguments = parser.parse_args()
    is_quick: bool = arguments.quick
    num_steps = STEPS_QUICK if is_quick else arguments.steps
    if num_steps < 2 * GLOBAL_STEPS or num_steps % GLOBAL_STEPS:
        parser.error(f"--steps is {num_steps}, which is not 2 or more periods of {GLOBAL_STEPS}")
    ways = ["ours"] if is_quick else arguments.ways
    systems = [each for each in SYSTEMS if ways is None or each.way in ways]
    signal.signal(signal.SIGTERM, end)
    run = begin("training", arguments)
    try:
        with tempfile.TemporaryDirectory() as folder, network(NODES, rate=RATE) as hosts:
            runs = [measure(each, hosts, Path(folder) / each.way, num_steps=num_steps) for each in systems]
    except HostsError as exc:
        print(f"training.py: {exc}", file=sys.stderr)
        return 2
    num_parameters = sum(each.numel() for each in make_model().parameters())
    print_table(runs, num_parameters=num_parameters)
    if not is_quick:
        title = f"{NODES} hosts with links of 200 Mbit/s, one of them lost half-way"
        told = (
            f"{SLOTS} ranks each, {num_parameters / 1e6:.1f} M parameters, the same {num_steps} steps for all; "
            f"averages over the node every {NODE_STEPS} steps, over all every {GLOBAL_STEPS}, DDP every step"
        )
        arguments.picture.write_text(draw_training(runs, title=title, told=told))
    figures = {"runs": [asdict(each) for each in runs], "num_parameters": num_parameters}
    return finish(run, figures=figures, missed=misses(runs))


if __name__ == "__main__":
    sys.exit(main())
