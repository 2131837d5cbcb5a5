"""How the demo's processes end with it, whatever ends it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_id: int | None = None) -> None:
    """Have the kernel kill this process as soon as its parent is gone, also if it is frozen then.

    `parent_id`: who the parent has to be. If it is somebody else, it went before this was called.
    """
    # Only Linux has it; elsewhere an agent that is left ends when its job does.
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_id is not None and os.getppid() != parent_id:
        sys.exit(1)
