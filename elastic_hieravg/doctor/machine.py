"""What this machine, or this container of it, has: read from the kernel, as values. Nothing is judged here."""

import contextlib
import fcntl
import os
import resource
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where snapshots are
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 256
_ADDRESS = slice(20, 24)
_UNLIMITED_TEXT = "max"


@dataclass(frozen=True, slots=True)
class Interface:
    """`speed_mbits`: None if nobody says."""

    name: str
    addresses: tuple[str, ...]
    speed_mbits: int | None = None


@dataclass(frozen=True, slots=True)
class Mount:
    """`kind`: of the file system; empty if there is none."""

    kind: str
    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """None where the kernel does not say, or sets no limit.

    `cores`: those this process may use, a container's share of them included. `root_process`: what process 1
    was called with. `unwritable`: folders that should take files and do not, and why.
    """

    host_name: str
    cores: float
    memory_bytes: int | None
    available_bytes: int | None
    shared_memory: Mount | None
    open_files_max: int | None
    locked_bytes_max: int | None
    ephemeral_ports: tuple[int, int] | None
    interfaces: tuple[Interface, ...]
    root_process: tuple[str, ...] = ()
    is_root_writable: bool = False
    unwritable: tuple[str, ...] = ()

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(address for each in self.interfaces for address in each.addresses)

    def interface_of(self, address: str) -> Interface | None:
        return next((each for each in self.interfaces if address in each.addresses), None)


def read_machine() -> Machine:
    memory, available = _memory()
    return Machine(
        host_name=os.uname().nodename,
        cores=_cores(),
        memory_bytes=memory,
        available_bytes=available,
        shared_memory=_mount(SHARED_MEMORY),
        open_files_max=_limit(resource.RLIMIT_NOFILE),
        locked_bytes_max=_limit(resource.RLIMIT_MEMLOCK),
        ephemeral_ports=_ephemeral_ports(),
        interfaces=_interfaces(),
        root_process=tuple(part for part in _text("/proc/1/cmdline").split("\0") if part),
        is_root_writable=os.access("/", os.W_OK) and not os.statvfs("/").f_flag & os.ST_RDONLY,
        unwritable=tuple(why for folder in _folders() if (why := _why_unwritable(folder))),
    )


def _folders() -> tuple[str, ...]:
    return "/tmp", SHARED_MEMORY  # noqa: S108 - asked whether they are there


def _why_unwritable(folder: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"hieravg")
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    return ""


def _cores() -> float:
    allowed = float(len(os.sched_getaffinity(0)))
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        return min(allowed, int(quota) / int(period))
    return allowed


def _memory() -> tuple[int | None, int | None]:
    """All there is and what is left of it, of the machine or of the container."""
    told = {}
    for line in _text("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.strip().removesuffix(" kB")
        if number.isdecimal():
            told[name] = int(number) * 1024
    total, available = told.get("MemTotal"), told.get("MemAvailable")
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit != _UNLIMITED_TEXT and limit.isdecimal() and (total is None or int(limit) < total):
        left = int(limit) - (int(used) if used.isdecimal() else 0)
        return int(limit), left if available is None else min(left, available)
    return total, available


def _mount(folder: str) -> Mount | None:
    kinds = [line.split()[2] for line in _text("/proc/mounts").splitlines() if line.split()[1:2] == [folder]]
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Mount(kinds[-1] if kinds else "", found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _ephemeral_ports() -> tuple[int, int] | None:
    parts = _text("/proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else None


def _interfaces() -> tuple[Interface, ...]:
    sixth: dict[str, list[str]] = {}
    for line in _text("/proc/net/if_inet6").splitlines():
        number, *_, name = line.split()
        with contextlib.suppress(ValueError, OSError):
            sixth.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    names = [name for _, name in socket.if_nameindex()]
    found = [Interface(name, (*_fourth(name), *sixth.get(name, ())), _speed_mbits(name)) for name in names]
    return tuple(each for each in found if each.addresses)


def _fourth(name: str) -> tuple[str, ...]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        told = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack(f"{_NAME_BYTES}s", name.encode()))
        return (socket.inet_ntoa(told[_ADDRESS]),)
    return ()


def _speed_mbits(name: str) -> int | None:
    text = _text(f"/sys/class/net/{name}/speed").strip()
    return int(text) if text.isdecimal() and int(text) else None


def _text(path: str) -> str:
    """A file of the kernel's; nothing if there is none, or if it has nothing to say."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text()
    return ""
