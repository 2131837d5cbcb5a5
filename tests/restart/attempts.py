"""A job whose workers start anew with every change, as the tests hold it, under one launcher or another."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_hieravg.membership.snapshot_files import FOLDER, PREFIX
from tests.membership.etcd_servers import EtcdCluster, free_ports
from tests.rendezvous.torchruns import PATIENCE_S, TORCHRUN, TorchrunNode, wait_for

SCRIPT = Path(__file__).with_name("train.py")
HIERAVG = (str(Path(sys.executable).with_name("hieravg")), "run")
PERIOD = 8
HIERARCHY = f"node=2,global={PERIOD}"
# No test passes by waiting for a lease to end.
LEASE_S = 10 * PATIENCE_S
SLOTS = 2

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Launcher:
    """How a node is started. `is_ours`: by `hieravg run`."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    is_ours: bool
    variables: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, node_id: str) -> list[str]:
        if self.is_ours:
            own = ["--node-id", node_id, "--lease-ttl-s", str(LEASE_S), "--hierarchy", HIERARCHY]
            return [*self.flags, *own]
        return [flag.replace("NODE", node_id) for flag in self.flags]


def torchrun_etcd3(etcd: EtcdCluster, run_id: str) -> Launcher:
    conf = f"--rdzv-conf=node_id=NODE,lease_ttl_s={LEASE_S},last_call_timeout=0.2,join_timeout={PATIENCE_S}"
    store = ("--rdzv-backend=etcd3", f"--rdzv-endpoint={','.join(etcd.endpoints)}", f"--rdzv-id={run_id}", conf)
    return Launcher(TORCHRUN, store, False, {"HIERAVG_HIERARCHY": HIERARCHY})


def torchrun_c10d(run_id: str, *, is_shared: bool) -> Launcher:
    """`is_shared`: with torch's default, a store that outlives the attempts."""
    store = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}", f"--rdzv-id={run_id}")
    cure = {} if is_shared else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Launcher(TORCHRUN, store, False, {"HIERAVG_HIERARCHY": HIERARCHY, **cure})


def hieravg_embedded(run_id: str, *flags: str, membership: str = "restart") -> Launcher:
    store = (f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}", f"--rdzv-id={run_id}")
    own = ("--membership", membership, "--rdzv-conf=last_call_timeout=0.2", *flags)
    return Launcher(HIERAVG, (*store, *own), True)


class RestartJob:
    """Nodes of one run, and what their workers wrote. `num_faults` counts what was done to them."""

    def __init__(self, folder: Path, launcher: Launcher, *, nodes: str) -> None:
        self.folder = folder
        self.live: dict[str, TorchrunNode] = {}
        self.num_faults = 0
        self._launcher = launcher
        self._flags = [f"--nnodes={nodes}", f"--nproc-per-node={SLOTS}", "--max-restarts=100"]
        self._nodes: list[TorchrunNode] = []

    def start(self, node_id: str) -> TorchrunNode:
        node = TorchrunNode(
            [*self._flags, *self._launcher.arguments(node_id), str(SCRIPT), str(self.folder)],
            node_id=node_id,
            folder=self.folder,
            labels="zone=z",
            launcher=self._launcher.command,
            variables=self._launcher.variables,
        )
        self._nodes.append(node)
        self.live[node_id] = node
        return node

    def agent_pid(self, node_id: str) -> int:
        """`setpriv` becomes the agent."""
        return self.live[node_id].process.pid

    def lines(self, event: str | None = None) -> list[Line]:
        with contextlib.suppress(FileNotFoundError):
            whole, _, _ = (self.folder / "steps.jsonl").read_text().rpartition("\n")
            found: list[Line] = [json.loads(line) for line in whole.splitlines()]
            return [line for line in found if event in (None, line["event"])]
        return []

    def await_attempt(self, *node_ids: str, after_s: float = 0.0) -> list[Line]:
        """Until exactly these nodes have begun after that time and had a global round; how they began."""
        size, begun = SLOTS * len(node_ids), []

        def has_begun() -> bool:
            nonlocal begun
            lines = [line for line in self.lines() if line["at_s"] > after_s]
            newest = max((line["generation"] for line in lines), default=0)
            of_it = [line for line in lines if line["generation"] == newest]
            begun = [line for line in of_it if line["event"] == "begin"]
            rounds = {line["pid"] for line in of_it if line["event"] == "step" and line["step"] % PERIOD == 0}
            is_whole = {line["node_id"] for line in begun} == set(node_ids) and len(begun) == size
            return is_whole and len(rounds) == size

        try:
            wait_for(has_begun, what=f"{node_ids} have not begun")
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {begun}\n{self.said()}") from None
        assert all(line["world_size"] == size and line["neighbours"] == SLOTS for line in begun)
        return sorted(begun, key=lambda line: line["rank"])

    def kill_worker(self, pid: int) -> float:
        """When it was killed."""
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.num_faults += 1
        return killed_s

    def lose_node(self, node_id: str) -> float:
        """The whole machine: its agent, its workers, and what they kept in memory. When it was lost."""
        lost_s = time.monotonic()
        node = self.live.pop(node_id)
        node.kill()
        for path in kept_by([node]):
            path.unlink()
        self.num_faults += 1
        return lost_s

    def check_goes_on(self, begun: Sequence[Line], *, lost_s: float) -> int:
        """That everybody began with what all had after the last global round before that time; its step."""
        before = [line for line in self.lines("step") if line["at_s"] < lost_s]
        last = {line["pid"]: line["step"] for line in before if line["generation"] == before[-1]["generation"]}
        steps, digests = {line["step"] for line in begun}, {line["digest"] for line in begun}
        assert len(steps) == len(digests) == 1, f"they begin differently: {begun}"
        step, digest = steps.pop(), digests.pop()
        assert step >= min(last.values()) // PERIOD * PERIOD > 0, (
            f"{step} is older than the last round of {last}"
        )
        kept = {
            line["digest"]
            for line in self.lines("step")
            if line["step"] == step and line["at_s"] < begun[0]["at_s"]
        }
        assert digest in kept, f"nobody had {digest} after step {step}: {kept}"
        return int(step)

    def finish(self) -> None:
        """End it; all replicas are alike, every agent exits with 0, and no snapshot is left."""
        (self.folder / "finish").touch()
        codes = {node_id: node.exit_code() for node_id, node in self.live.items()}
        assert codes == dict.fromkeys(codes, 0), self.said()
        ends = self.lines("end")
        assert len(ends) == SLOTS * len(codes)
        assert len({line["digest"].partition(" ")[0] for line in ends}) == 1, f"replicas differ: {ends}"
        assert len({line["step"] for line in ends}) == 1
        assert not self.kept()

    def kept(self) -> list[Path]:
        """The snapshots of all nodes that were ever started."""
        return kept_by(self._nodes)

    def said(self) -> str:
        return "\n".join(f"--- {node.node_id}\n{node.said[-4000:]}" for node in self._nodes)

    def close(self) -> None:
        for node in self._nodes:
            node.kill()
        # Of agents that were killed here: nobody came after them to remove it.
        for path in self.kept():
            path.unlink()


@contextlib.contextmanager
def restart_job(folder: Path, launcher: Launcher, *, nodes: str) -> Iterator[RestartJob]:
    job = RestartJob(folder, launcher, nodes=nodes)
    try:
        yield job
    finally:
        job.close()


def kept_by(nodes: Sequence[TorchrunNode]) -> list[Path]:
    found = [path for path in FOLDER.iterdir() if path.name.startswith(PREFIX)]
    return [path for path in found if any(f".{node.process.pid}." in path.name for node in nodes)]
