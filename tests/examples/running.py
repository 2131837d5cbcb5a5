"""Examples as the tests run them: the command of a node, its log, and what its ranks print at their end."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
BIN = Path(sys.executable).parent
WITHIN_S = 240.0
# Small steps need no threads, and nothing is fetched: no model, no data, no news of a version.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

_ENDED = re.compile(r"rank (\d+): (\d+) steps, loss ([\d.]+) to ([\d.]+), model ([0-9a-f]{12})")


@dataclass(frozen=True, slots=True)
class Ended:
    """What a rank printed at its end."""

    rank: int
    num_steps: int
    first_loss: float
    last_loss: float
    digest: str


def node_command(
    name: str, *, node: str, nodes: str, slots: int, port: int, steps: int, metrics_port: str = "off"
) -> list[str]:
    """The command that runs an example as a node of a job whose store is at a port of this machine."""
    return [
        *(str(BIN / "hieravg"), "run", "--node-id", node, f"--nnodes={nodes}", f"--nproc-per-node={slots}"),
        *(f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=example", "--hierarchy", "node=4,global=16"),
        *("--metrics-port", metrics_port, str(EXAMPLES / f"{name}.py"), "--steps", str(steps)),
    ]


def start(command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """It ends with the tests, whatever ends them."""
    with log.open("wb") as out:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env=os.environ | ENVIRONMENT,
        )


def read_ended(printed: str) -> list[Ended]:
    """Every rank that came to its end, in order."""
    found = [Ended(int(a), int(b), float(c), float(d), e) for a, b, c, d, e in _ENDED.findall(printed)]
    assert found, printed
    return sorted(found, key=lambda ended: ended.rank)
