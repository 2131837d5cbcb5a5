"""Where the workers of a node keep their snapshots, whose they are, and when they are of no use any more.

A file's name says which run and which agent it belongs to, so that a worker that starts anew finds what its
agent's workers left, and nobody takes another job's. What is in a file is the worker's affair. Invariant: only
the files of agents that are gone are removed by strangers.
"""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

FOLDER = Path("/dev/shm")  # noqa: S108 - memory that outlives a process is what is wanted
PREFIX = "hieravg-snapshot"
# A file of another process namespace: whether its agent lives cannot be seen, so its age has to do.
FOREIGN_AGE_S = 3600.0
# A file that is being made has this at the end of its name.
UNFINISHED = ".new"

_STARTED_FIELD = 19
_RUN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Owner:
    """An agent, for as long as it lives: process ids are used again, start times are not."""

    namespace: int
    process_id: int
    started: int

    def __str__(self) -> str:
        return f"{self.namespace}.{self.process_id}.{self.started}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            return None
        return cls(*map(int, parts))

    @classmethod
    def of_process(cls, process_id: int) -> Self | None:
        """A process of this machine; None if there is none."""
        started = _started(process_id)
        return None if started is None else cls(_namespace(), process_id, started)

    @property
    def is_here(self) -> bool:
        """Whether it runs, or would, where this process can see it."""
        return self.namespace == _namespace()

    @property
    def is_alive(self) -> bool:
        """Only for one that `is_here`."""
        return _started(self.process_id) == self.started


def find_agent(*, mark: str, depth_max: int = 64) -> Owner:
    """The agent of this worker: the nearest process above it that was not itself started as a worker.

    `mark`: a variable that an agent gives its workers. A wrapper between the two has it as well.
    """
    process_id, found = os.getppid(), None
    for _ in range(depth_max):
        found = Owner.of_process(process_id)
        if found is None or not _has_variable(process_id, mark):
            break
        process_id = _parent(process_id)
    owner = found or Owner.of_process(os.getppid())
    assert owner is not None, "a process has a parent"
    return owner


def path_of(*, run_id: str, owner: Owner, local_rank: int) -> Path:
    return FOLDER / f"{_prefix(run_id, owner)}{local_rank}"


def paths_of(*, run_id: str, owner: Owner) -> list[Path]:
    """What this agent's workers keep, in the order of their local ranks."""
    found = {path: path.name.removeprefix(_prefix(run_id, owner)) for path in _paths(_prefix(run_id, owner))}
    return sorted((path for path in found if found[path].isdecimal()), key=lambda path: int(found[path]))


def remove_of(owner: Owner) -> int:
    """Remove everything of this agent; how many files there were."""
    return sum(_remove(path) for path in _paths(PREFIX) if _owner_of(path) == owner)


def remove_stale(now_s: float) -> int:
    """Remove what agents that are gone have left, whatever the run; how many files that were.

    `now_s`: seconds since the epoch, as files have them.
    """
    return sum(_remove(path) for path in _paths(PREFIX) if _is_stale(path, now_s))


def _is_stale(path: Path, now_s: float) -> bool:
    owner = _owner_of(path)
    if owner is None:
        return False
    if owner.is_here:
        return not owner.is_alive
    with contextlib.suppress(OSError):
        return now_s - path.stat().st_mtime > FOREIGN_AGE_S
    return False


def _prefix(run_id: str, owner: Owner) -> str:
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:_RUN_DIGITS]
    return f"{PREFIX}-{digest}-{owner}-"


def _paths(prefix: str) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return [path for path in FOLDER.iterdir() if path.name.startswith(f"{prefix}")]
    return []


def _owner_of(path: Path) -> Owner | None:
    parts = path.name.removeprefix(f"{PREFIX}-").split("-")
    return Owner.parse(parts[1]) if len(parts) == 3 else None


def _remove(path: Path) -> bool:
    # Another user's are not ours to remove, and somebody else may be quicker.
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - the link's target is wanted


def _stat_fields(process_id: int) -> list[str] | None:
    with contextlib.suppress(OSError):
        # The name of the program is in parentheses, and may hold anything.
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return None


def _started(process_id: int) -> int | None:
    """When a process started, in ticks since the machine did; None if it has ended, waited for or not."""
    fields = _stat_fields(process_id)
    return None if fields is None or fields[0] in "ZX" else int(fields[_STARTED_FIELD])


def _parent(process_id: int) -> int:
    fields = _stat_fields(process_id)
    return int(fields[1]) if fields else 0


def _has_variable(process_id: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
        return any(variable.startswith(f"{name}=".encode()) for variable in variables)
    return False
