"""torch's elastic agent, with workers that keep running while the membership changes.

All overrides of torch's private methods are in this file; torch is called with keyword arguments. The tests
fail loudly when what is overridden changes. Checked against torch 2.13.
"""

import contextlib
import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from elastic_hieravg.agent.joins import LATE_S
from elastic_hieravg.agent.node import InPlaceNode
from elastic_hieravg.agent.telemetry import Telemetry
from elastic_hieravg.agent.warm_pool import WarmPool
from elastic_hieravg.membership.records import Closing
from elastic_hieravg.metrics.catalogue import RestartReason

EXIT_DONE, EXIT_FAILED = 0, 1
# Starting it again is of no use; from a worker, and from an agent.
EXIT_DO_NOT_RETRY = 78
# Never 0: Kubernetes would take the pod for finished and not replace it.
EXIT_LEFT = 143
# How long a worker has to end by itself when its node starts anew.
STOP_TIMEOUT_S = 3
# So much of the grace time is for the last write.
LEAVE_S = 2.0
# What a script does after its training loop may take so long once another node has ended.
END_WAIT_S = 3600.0
# How long a worker that hangs has to tell its stacks.
STACKS_S = 1.0
STACKS_SIGNAL = signal.SIGUSR2
POLL_S = 0.05
LOOPBACK = "127.0.0.1"

_log = logging.getLogger(__name__)


class NoRendezvous(RendezvousHandler):
    """torch's agent wants one; ours meets the others through the membership."""

    def __init__(self, run_id: str, backend: str) -> None:
        self._run_id = run_id
        self._backend = backend

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        raise AssertionError("workers start without a rendezvous")

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class WarmHandler(SubprocessHandler):
    """Starts a worker in a process that waits for it, if there is one."""

    def __init__(self, pool: WarmPool, **arguments: Any) -> None:
        self._pool = pool
        self._slot: int = arguments["local_rank_id"]
        super().__init__(**arguments)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        warm = self._pool.start(self._slot, args, env, stdout=self._stdout, stderr=self._stderr)
        return warm or super()._popen(args=args, env=env)


@contextlib.contextmanager
def starting_warm(pool: WarmPool) -> Iterator[None]:
    """Have torch's agent start its workers out of a pool, for the time of a block."""
    before = multiprocessing_api.get_subprocess_handler
    multiprocessing_api.get_subprocess_handler = functools.partial(WarmHandler, pool)
    try:
        yield
    finally:
        multiprocessing_api.get_subprocess_handler = before


class InPlaceAgent(LocalElasticAgent):
    """`exit_code` and `reason` say how it ended, once `run` has returned. `is_alone`: nobody else can join."""

    def __init__(
        self,
        node: InPlaceNode,
        *,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str,
        log_line_prefix_template: str | None,
        grace_s: float,
        is_alone: bool = False,
    ) -> None:
        super().__init__(
            spec=spec,
            logs_specs=logs_specs,
            start_method=start_method,
            log_line_prefix_template=log_line_prefix_template,
            shutdown_timeout=STOP_TIMEOUT_S,
        )
        self.exit_code = EXIT_FAILED
        self.reason = ""
        self._node = node
        self._grace_s = grace_s
        self._is_alone = is_alone
        self._has_started = False
        self._signals: list[int] = []
        self._last_raised = ""
        self._has_hung = False

    # --- what torch's agent calls -----------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Workers start with a world of their own node; the job's ranks reach them with each generation."""
        group: Any = worker_group
        size = group.spec.local_world_size
        group.workers = [
            Worker(local_rank=rank, global_rank=rank, role_rank=rank, world_size=size, role_world_size=size)
            for rank in range(size)
        ]
        group.store = HashStore()
        group.group_rank, group.group_world_size = 0, 1
        group.master_addr, group.master_port = LOOPBACK, _free_port()
        self._node.workers_start(is_first=not self._has_started)
        self._has_started = True

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._take_signals()
        return started

    def _take_signals(self) -> None:
        # torch has just set handlers that raise wherever the agent is; ours only take note.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: self._signals.append(received))

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._node.workers_stop()
        self._shutdown(death_sig=signal.SIGTERM, timeout=STOP_TIMEOUT_S)

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            return self._run_workers()
        except SignalException as exc:
            # It came while torch's own handlers were in place: in the moment in which workers start.
            self._take_signals()
            self._signals.append(exc.sigval)
            self._leave()
            self._stop_workers(self._worker_group)
            self._tell_end()
            return RunResult(state=WorkerState.UNHEALTHY)

    def _run_workers(self) -> RunResult:
        group: Any = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            result: RunResult = self._monitor_workers(group)
            self._node.telemetry.looked()
            group.state = result.state
            if self._is_over(result) or (self._signals and self._leave()):
                self._stop_workers(group)
                self._tell_end()
                is_done = result.state is WorkerState.SUCCEEDED
                # To torch, workers that were stopped in the middle are unhealthy ones.
                return result if is_done else RunResult(state=WorkerState.UNHEALTHY)
            if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
                if not self._may_restart(result):
                    self._stop_workers(group)
                    return result
                self._restart_workers(group)
            else:
                self._warn_of_late()
                self._end_hang()

    # --- how it ends ------------------------------------------------------------------------------------------

    def _is_over(self, result: RunResult) -> bool:
        status = self._node.status
        if status.error is not None:
            self._stop_workers(self._worker_group)
            raise status.error
        ended = status.ended
        if result.state is WorkerState.SUCCEEDED and (ended is None or ended.is_success):
            if not self._node.has_joined:
                self._end_unjoined()
                return True
            self._node.finish(Closing(True, "training is done"))
            self.exit_code, self.reason = EXIT_DONE, "training is done"
            return True
        if ended is None:
            return False
        is_running = result.state is WorkerState.HEALTHY
        if (
            is_running
            and ended.is_success
            and self._node.is_done
            and time.monotonic() < self._node.done_s + END_WAIT_S
        ):
            # The loops are over here too; what the script does after them is its own affair.
            return False
        self.reason = f"the job is over: {ended.reason}"
        _log.warning("%s", self.reason)
        if ended.is_success and (is_running or not self._node.is_done):
            self.exit_code = EXIT_DONE
        elif ended.is_success:
            self.reason = f"the script failed after its training loop: {_exits(result)}"
            _log.error("%s", self.reason)
        else:
            self.exit_code = EXIT_DO_NOT_RETRY if ended.is_hopeless else EXIT_FAILED
        return True

    def _end_unjoined(self) -> None:
        """The workers have ended well, and were never in the job: what they did is in nobody else's model."""
        if self._is_alone or self._node.nodes_max == 1:
            self._node.finish(Closing(True, "training is done"))
            self.exit_code = EXIT_DONE
            self.reason = "the script ended without calling eh.join(): nothing was averaged"
            _log.warning("%s", self.reason)
            return
        self._give_up(
            "the script ended without calling eh.join(): every node has trained by itself; "
            "call eh.join() in the script, or start a script without it with torchrun",
            is_hopeless=True,
        )

    def _tell_end(self) -> None:
        """The last word, once the workers have ended. What went wrong was told when it did."""
        if self.exit_code == EXIT_LEFT:
            _log.info("%s; exit code %s", self.reason, EXIT_LEFT)
        elif self.exit_code == EXIT_DONE and self._node.has_joined:
            self._node.telemetry.log_end()

    def _leave(self) -> bool:
        """Go on purpose. What the node did since the last global round goes along if there is time for it."""
        self.exit_code = EXIT_LEFT
        deadline_s = time.monotonic() + self._grace_s - LEAVE_S - STOP_TIMEOUT_S
        signal_name = signal.Signals(self._signals[0]).name
        _log.warning("%s received: this node leaves the job, after one more round with the others", signal_name)
        self._node.drain()
        while not self._node.is_drained and time.monotonic() < deadline_s and len(self._signals) < 2:
            self._node.telemetry.looked()
            time.sleep(POLL_S)
        self.reason = f"left on {signal_name}; {self._what_is_left()}"
        self._node.leave(timeout_s=LEAVE_S)
        return True

    def _what_is_left(self) -> str:
        """What becomes of this node's work, as it leaves."""
        node = self._node
        if node.is_shared:
            return "what this node did is in the others' models"
        if not node.is_draining:
            return "it was not training with the others"
        if node.is_drained:
            return "no other node has what this node did since its last round with them"
        num_steps = node.telemetry.steps_since_round()
        why = f"no time for one more round in --grace-s ({self._grace_s:g} s); steps lost: {num_steps}"
        _log.warning("%s", why)
        return why

    def _may_restart(self, result: RunResult) -> bool:
        """Whether the workers start anew. Progress gives back what failures took, unless they are all alike."""
        codes = [failure.exitcode for failure in result.failures.values()]
        exits = _exits(result)
        if self._node.is_done:
            # Its training is done and in everybody's model: starting anew would train once more.
            return self._give_up(f"the script failed after its training loop: {exits}", is_hopeless=False)
        raised, spec = self._node.raised, self._worker_group.spec
        is_same = bool(raised) and raised == self._last_raised
        if self._node.has_stepped and not is_same:
            self._remaining_restarts = spec.max_restarts
        self._last_raised = raised
        if EXIT_DO_NOT_RETRY in codes:
            return self._give_up(f"{exits}; {EXIT_DO_NOT_RETRY} means: do not retry", is_hopeless=True)
        if self._remaining_restarts <= 0:
            # A script that never got as far as to join fails by itself; a node may have its own reasons.
            is_early = not raised and all(code > 0 for code in codes) and self._node.status.newest_number == 0
            what = raised or f"{exits}; see what was printed above"
            return self._give_up(what, is_hopeless=is_same or is_early)
        self._remaining_restarts -= 1
        _log.warning(
            "%s; all workers of this node start anew (restarts left without progress: %s of --max-restarts %s)",
            exits,
            self._remaining_restarts,
            spec.max_restarts,
        )
        why = RestartReason.RAISED if raised else _reason(codes)
        self._node.telemetry.restarted(RestartReason.HUNG if self._has_hung else why)
        self._has_hung = False
        return True

    def _give_up(self, why: str, *, is_hopeless: bool) -> bool:
        """This node cannot go on. A script that fails in the same way every time fails everywhere, unless it is
        that of a newcomer: others train, and it is this node that differs.
        """
        self.exit_code = EXIT_DO_NOT_RETRY if is_hopeless else EXIT_FAILED
        _log.error("this node stops with exit code %s: %s", self.exit_code, why.strip())
        self.reason = f"this node stopped: {last_sentence(why)}"
        if is_hopeless and not self._node.is_newcomer:
            self._node.finish(Closing(False, why, is_hopeless=True))
        else:
            self._node.leave(timeout_s=LEAVE_S)
        return False

    def _warn_of_late(self) -> None:
        late = self._node.late_to_join()
        if late:
            _log.warning(
                "worker %s has run for %.0f s without calling eh.join(): until all workers have, this node is "
                "not in the job; a script that never calls it trains on every node by itself",
                ", ".join(map(str, late)),
                LATE_S,
            )

    def _end_hang(self) -> None:
        """Kill a worker that hangs, after it has told where; what follows is as with any dead worker."""
        hung = self._node.hung_worker()
        if hung is None:
            return
        local_rank, process_id, seconds = hung
        self._has_hung = True
        _log.error(
            "worker %s (process %s) made no step for %.0f s: "
            "it prints where it stands and is killed (--hang-timeout-s)",
            local_rank,
            process_id,
            seconds,
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, STACKS_SIGNAL)
            time.sleep(STACKS_S)
            os.kill(process_id, signal.SIGKILL)


class RestartingAgent(LocalElasticAgent):
    """torch's own agent, as it is; `telemetry` is told what it does."""

    def __init__(self, telemetry: Telemetry, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._telemetry = telemetry
        self._last_seen: RunResult | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._telemetry.workers_start()
        with self._telemetry.meeting():
            super()._rendezvous(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._telemetry.looked()
        self._last_seen = super()._monitor_workers(worker_group)
        return self._last_seen

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        seen = self._last_seen
        if seen is None or seen.state is WorkerState.HEALTHY:
            self._telemetry.restarted(RestartReason.MEMBERSHIP)
        else:
            self._telemetry.restarted(_reason([failure.exitcode for failure in seen.failures.values()]))
        super()._restart_workers(worker_group)


def last_sentence(text: str) -> str:
    """What a traceback says at its end; all of a text that is none.

    >>> last_sentence("Traceback (most recent call last):\\n  File ...\\nOurError: it broke\\n\\nhint: mend it")
    'OurError: it broke; hint: mend it'
    """
    lines = [line for line in text.strip().splitlines() if line.strip()]
    frames = [index for index, line in enumerate(lines) if line.startswith("  ")]
    is_traceback = any(line.startswith("Traceback") for line in lines)
    told = lines[frames[-1] + 1 :] if is_traceback and frames else lines
    return "; ".join(told or lines[-1:])


def _exits(result: RunResult) -> str:
    """How workers ended, for people."""
    found = [
        f"worker {rank} {_exit_text(failure.exitcode)}" for rank, failure in sorted(result.failures.items())
    ]
    return ", ".join(found) or "the workers ended"


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _reason(codes: list[int]) -> RestartReason:
    return RestartReason.RAISED if any(code > 0 for code in codes) else RestartReason.KILLED


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
