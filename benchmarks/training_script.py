"""What torchrun runs in `rendezvous.py`: a tiny all-reduce every 50 ms, and a line for everything that happens.

Lines go to the file that is named on the command line. The time is the machine's monotonic clock, which all
of its processes share.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

STEP_S = 0.05
PR_SET_PDEATHSIG = 1


def main() -> None:
    # The worker of an agent that is killed goes with it, as on a machine that is lost.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    say("started")
    # Only now: how long torch takes to be imported is no part of a rendezvous.
    import torch  # noqa: PLC0415 - see above
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    say("ready", rank=rank)
    while True:
        count = torch.ones(1)
        dist.all_reduce(count)
        if rank == 0:
            # Counted by the ranks themselves, so that all of them took part.
            say("step", num_ranks=int(count.item()))
        time.sleep(STEP_S)


def say(told: str, **facts: int) -> None:
    line = {"told": told, "at_s": time.monotonic(), "pid": os.getpid(), "agent_pid": os.getppid(), **facts}
    with Path(sys.argv[1]).open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
