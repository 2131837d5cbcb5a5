"""Why an agent ended, left in a file for whoever started it: Kubernetes shows it with the pod.

Invariant: it never fails, and never makes anything else fail.
"""

import contextlib
from pathlib import Path

from elastic_hieravg.config import termination_file

# Kubernetes keeps no more of it.
MESSAGE_BYTES_MAX = 4096


def leave_message(reason: str) -> None:
    """Write the reason to the file that HIERAVG_TERMINATION_FILE names, if it names one."""
    path = termination_file()
    if not path or not reason:
        return
    # Cut anywhere, a character may be half; the rest of it is left out.
    content = reason.encode(errors="replace")[:MESSAGE_BYTES_MAX].decode(errors="ignore")
    with contextlib.suppress(OSError, ValueError):
        Path(path).write_text(content)
