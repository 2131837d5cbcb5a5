"""Memory that several processes of one host see: anonymous files, passed by descriptor.

Nothing here has a name in a file system, so nothing is ever left behind, and the size of /dev/shm does not
matter. Invariant: memory is reserved when it is made; touching it later cannot fail.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000

# Limit and use of memory of this container, in the second and the first version of control groups.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def page_aligned(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def create_file(num_bytes: int) -> int:
    """A descriptor of fresh shared memory, all zeros; `OSError` if there is not that much."""
    require_memory(num_bytes)
    descriptor = os.memfd_create("hieravg", os.MFD_CLOEXEC)
    try:
        # Reserved now: an error here can be handled, a SIGBUS at the first touch cannot.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def require_memory(num_bytes: int) -> None:
    """`OSError` if the machine or the container has less than that."""
    available_bytes = min(_available_bytes(), default=num_bytes)
    if num_bytes > available_bytes:
        # Asking for more than there is would not fail: the kernel would kill a process to make room.
        raise OSError(errno.ENOMEM, f"only {available_bytes} bytes of memory are available")


def map_file(descriptor: int, num_bytes: int) -> torch.Tensor:
    """A file as a tensor of bytes; the mapping lives as long as any tensor made from it."""
    pages = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | _MAP_POPULATE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _available_bytes() -> Iterator[int]:
    """What the machine and the container have left, as far as they say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    for limit, used in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):
            yield int(Path(limit).read_text()) - int(Path(used).read_text())


class Mapping:
    """Several files mapped one behind the other, as one tensor of bytes.

    Consecutive addresses let one kernel read all ranks' copies as the rows of a matrix. `close` may only
    be called when no tensor made from `memory` is alive.
    """

    def __init__(self, files: Sequence[tuple[int, int, bool]]) -> None:
        """`files`: descriptor, bytes (whole pages), and whether this process may write."""
        self.num_bytes = sum(num_bytes for _, num_bytes, _ in files)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = _map(None, self.num_bytes, _PROT_NONE, flags, -1)
        start = self.address
        for descriptor, num_bytes, may_write in files:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if may_write else 0)
            _map(start, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE, descriptor)
            start += num_bytes
        buffer = (ctypes.c_char * self.num_bytes).from_address(self.address)
        self.memory = torch.frombuffer(buffer, dtype=torch.uint8)

    def close(self) -> None:
        del self.memory
        _libc.munmap(self.address, self.num_bytes)


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    assert isinstance(found, int)
    return found
