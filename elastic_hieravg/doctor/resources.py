"""Whether a machine has enough for a node of the job: cores, memory, /dev/shm, limits. Pure."""

from collections.abc import Iterator

from elastic_hieravg.doctor.findings import Finding, absent, note, ok, problem, warning
from elastic_hieravg.doctor.machine import Machine

# In float32: the parameters, and with AdamW two more of the same.
MODEL_BYTES_PER_PARAM = 4
KEPT_BYTES_PER_PARAM = 12
# Those, the gradients, and the copy that a round works on.
WORKER_BYTES_PER_PARAM = 20
# A snapshot is written beside the one before it.
SNAPSHOTS = 2
# What container runtimes give if nobody asks for more.
RUNTIME_SHARED_BYTES = 64 * 1024 * 1024
SHARED_BYTES_MIN = 128 * 1024 * 1024
# Python, torch and logs, and a few connections between every two ranks of a group.
OPEN_FILES_BASE = 256
OPEN_FILES_PER_RANK = 8
LOCKED_BYTES_MIN = 64 * 1024 * 1024


def check_resources(
    machine: Machine,
    *,
    slots: int,
    num_ranks: int,
    params: int | None,
    is_restarting: bool,
    has_accelerator: bool,
    threads: str,
) -> Iterator[Finding]:
    """`params`: of the model, None if not known. `threads`: OMP_NUM_THREADS, empty if it is not set."""
    yield _cores(machine, slots=slots)
    yield _threads(machine, slots=slots, threads=threads)
    yield _memory(machine, slots=slots, params=params)
    yield _shared_memory(machine, slots=slots, params=params, is_restarting=is_restarting)
    yield _open_files(machine, num_ranks=num_ranks)
    yield _locked(machine, has_accelerator=has_accelerator)


def bytes_text(number: float) -> str:
    """A size, as people say it.

    >>> bytes_text(1.5e9), bytes_text(64 * 1024 * 1024)
    ('1.5 GB', '67.1 MB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def _counted(number: float, word: str) -> str:
    return f"{number:g} {word}{'' if number == 1 else 's'}"


def _workers(slots: int) -> str:
    return _counted(slots, "worker")


def _cores(machine: Machine, *, slots: int) -> Finding:
    found = f"{_counted(machine.cores, 'core')} for {_workers(slots)}"
    if slots > machine.cores:
        return warning("cores", found, "start fewer workers (--nproc-per-node), or give the node more cores")
    return ok("cores", found)


def _threads(machine: Machine, *, slots: int, threads: str) -> Finding:
    if not threads:
        default = "torch takes all cores" if slots == 1 else "hieravg run sets 1 for each worker"
        return ok("OMP_NUM_THREADS", f"not set: {default}")
    number = int(threads) if threads.isascii() and threads.isdecimal() and len(threads) < 10 else 0
    if number < 1:
        return warning("OMP_NUM_THREADS", f"{threads!r}", "give a number of threads, or do not set it")
    if number * slots > machine.cores:
        share = max(1, int(machine.cores // slots))
        found = f"{number} threads for each of {_workers(slots)} on {_counted(machine.cores, 'core')}"
        return warning(
            "OMP_NUM_THREADS", found, f"set it to {share}: threads that wait for a core slow all down"
        )
    return ok("OMP_NUM_THREADS", f"{number}")


def _memory(machine: Machine, *, slots: int, params: int | None) -> Finding:
    total, available = machine.memory_bytes, machine.available_bytes
    if total is None or available is None:
        return absent("memory", "not known")
    found = f"{bytes_text(available)} of {bytes_text(total)} free"
    if params is None:
        return ok("memory", f"{found}; --params says for which model")
    need = slots * params * WORKER_BYTES_PER_PARAM
    asked = f"{found}; {_workers(slots)} with AdamW need about {bytes_text(need)}"
    if need > total:
        return problem("memory", asked, "take a machine with more memory, fewer workers or a smaller model")
    if need > available:
        return warning("memory", asked, "end what else uses memory here")
    return ok("memory", asked)


def _shared_memory(machine: Machine, *, slots: int, params: int | None, is_restarting: bool) -> Finding:
    mount = machine.shared_memory
    advice = "give /dev/shm twice the size of model and optimizer: --shm-size, or an emptyDir of medium Memory"
    judge = problem if is_restarting else warning
    if mount is None or not mount.kind:
        return judge("shared memory", "there is none", advice)
    found = f"{bytes_text(mount.free_bytes)} of {bytes_text(mount.size_bytes)} free, {mount.kind}"
    if params is None:
        if mount.size_bytes <= RUNTIME_SHARED_BYTES:
            return warning("shared memory", f"{found}: what a container gets if nobody asks for more", advice)
        return ok("shared memory", f"{found}; --params says for which model")
    # Where all workers start anew each keeps its own; else one of a node that is alone does.
    need = params * KEPT_BYTES_PER_PARAM * SNAPSHOTS * (slots if is_restarting else 1)
    asked = f"{found}; snapshots with AdamW need {bytes_text(need)}"
    if need > mount.free_bytes:
        lost = (
            "workers that start anew begin at step 0" if is_restarting else "a node that is alone keeps nothing"
        )
        return judge("shared memory", f"{asked}: {lost}", advice)
    return ok("shared memory", asked)


def _open_files(machine: Machine, *, num_ranks: int) -> Finding:
    need = OPEN_FILES_BASE + OPEN_FILES_PER_RANK * num_ranks
    if machine.open_files_max is None:
        return ok("open files", "unlimited")
    found = f"{machine.open_files_max} for up to {_counted(num_ranks, 'rank')}; about {need} are needed"
    if machine.open_files_max < need:
        return warning("open files", found, f"ulimit -n {2 * need}, or LimitNOFILE= of the service")
    return ok("open files", found)


def _locked(machine: Machine, *, has_accelerator: bool) -> Finding:
    if not has_accelerator:
        return absent("locked memory", "no accelerator")
    if machine.locked_bytes_max is None:
        return ok("locked memory", "unlimited")
    found = bytes_text(machine.locked_bytes_max)
    if machine.locked_bytes_max < LOCKED_BYTES_MIN:
        return note("locked memory", found, "RDMA needs more: ulimit -l unlimited")
    return ok("locked memory", found)
