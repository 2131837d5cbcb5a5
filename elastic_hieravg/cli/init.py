"""The first process of a container: it passes signals on, and collects processes that nobody else waits for.

The kernel hands orphans to process 1, and ignores signals to it that it does not handle; Python does neither's
work. So the command runs in a child, and what is left of the process only waits. Invariant: its exit code is
the child's, and when it ends, the kernel ends everything else in the container.
"""

import contextlib
import os
import signal
from types import FrameType

FIRST = 1
PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# A command that a signal ended, as shells tell it.
SIGNAL_EXIT = 128


def fork_below_init() -> int | None:
    """None in the process that goes on; in process 1 its exit code, once it has ended.

    To be called before there are threads.
    """
    if os.getpid() != FIRST:
        return None
    # Between the fork and the handlers no signal may be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    child = os.fork()
    if child == 0:
        # A terminal's signals reach the first process, which passes them on, once.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None

    def pass_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _wait_for(child)


def _wait_for(child: int) -> int:
    """Collect whoever ends, until the child does: that is the bound."""
    ended, status = os.wait()
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    return SIGNAL_EXIT - code if code < 0 else code
