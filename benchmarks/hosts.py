"""Hosts on one machine: network namespaces, each with one link of a given rate to a bridge.

Made of nothing but `ip` and `tc`, for root. The names hold the process id of who made them. Invariant: they are
gone with the block that made them; what a process that was killed has left is cleared by the next one.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hieravg-bench"
DEVICE = "veth0"
BURST, QUEUE = "64kb", "50ms"
# The kernel does each of these at once; a machine may be busy.
COMMAND_S = 60.0
# `ip netns exec` shows what is in here as the host's own /etc.
ETC = Path("/etc/netns")


class HostsError(Exception):
    """There can be no hosts here, and the message says why."""


@dataclass(frozen=True, slots=True)
class Hosts:
    owner_id: int
    num_hosts: int

    @property
    def hub(self) -> str:
        return f"{PREFIX}-{self.owner_id}-hub"

    def namespace(self, index: int) -> str:
        return f"{PREFIX}-{self.owner_id}-h{index}"

    def address(self, index: int) -> str:
        return f"10.77.0.{10 + index}"

    def on(self, index: int) -> list[str]:
        """What stands before a command so that it runs on a host, under its name. It stays one process."""
        named = f'hostname h{index}; exec "$@"'
        return ["ip", "netns", "exec", self.namespace(index), "unshare", "--uts", "sh", "-c", named, "sh"]

    def sent_bytes(self) -> int:
        """What the hosts have sent to each other, each byte once, as the kernel counted it at the bridge."""
        told = run("ip", "-netns", self.hub, "-statistics", "-json", "link", "show", "type", "veth")
        return sum(int(link["stats64"]["rx"]["bytes"]) for link in json.loads(told))


@contextlib.contextmanager
def network(num_hosts: int, *, rate: str) -> Iterator[Hosts]:
    """So many hosts, named h0, h1, ... ; `rate` as `tc` writes it, for each link and each way."""
    refuse_if_impossible()
    clear_leftovers()
    hosts = Hosts(os.getpid(), num_hosts)
    try:
        run("ip", "netns", "add", hosts.hub)
        run("ip", "-netns", hosts.hub, "link", "add", "br0", "type", "bridge")
        run("ip", "-netns", hosts.hub, "link", "set", "br0", "up")
        for index in range(num_hosts):
            add_host(hosts, index, rate=rate)
        yield hosts
    finally:
        for name in (*map(hosts.namespace, range(num_hosts)), hosts.hub):
            remove(name)


def add_host(hosts: Hosts, index: int, *, rate: str) -> None:
    name, port = hosts.namespace(index), f"p{index}"
    folder = ETC / name
    folder.mkdir(parents=True)
    lines = [f"{hosts.address(each)} h{each}" for each in range(hosts.num_hosts)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    run("ip", "netns", "add", name)
    run("ip", "link", "add", DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", hosts.hub)
    run("ip", "-netns", name, "address", "add", f"{hosts.address(index)}/24", "dev", DEVICE)
    run("ip", "-netns", hosts.hub, "link", "set", port, "master", "br0")
    for namespace, device in ((name, "lo"), (name, DEVICE), (hosts.hub, port)):
        run("ip", "-netns", namespace, "link", "set", device, "up")
    for namespace, device in ((name, DEVICE), (hosts.hub, port)):
        shape = ("root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
        run("tc", "-netns", namespace, "qdisc", "add", "dev", device, *shape)


def remove(name: str) -> None:
    """End what still runs on the host, and the host. The kernel takes its links away. There may be none."""
    listed = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False, timeout=COMMAND_S
    )
    for process_id in map(int, listed.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=COMMAND_S)
    shutil.rmtree(ETC / name, ignore_errors=True)
    # Only if it is empty: it may be somebody else's, too.
    with contextlib.suppress(OSError):
        ETC.rmdir()


def refuse_if_impossible() -> None:
    missing = [program for program in ("ip", "tc", "unshare", "setpriv") if shutil.which(program) is None]
    if missing:
        raise HostsError(
            f"hosts need {', '.join(missing)}\n\nhint: apt-get install iproute2 util-linux hostname"
        )
    if os.geteuid() != 0:
        raise HostsError("hosts are network namespaces, which only root may make\n\nhint: run it with sudo")


def clear_leftovers() -> None:
    """Take away what is named like ours and whose maker has ended."""
    names = run("ip", "netns", "list").split()
    if ETC.is_dir():
        names += [path.name for path in ETC.iterdir()]
    for name in sorted(set(names)):
        found = re.fullmatch(rf"{PREFIX}-(\d+)-(hub|h\d+)", name)
        if found is not None and is_running(int(found[1])):
            print(f"{name} is in use: who measures now is slower for it", file=sys.stderr)
        elif found is not None:
            print(f"clearing {name}: the process that made it has ended", file=sys.stderr)
            remove(name)


def is_running(process_id: int) -> bool:
    """Whether it is a benchmark: a number is used again by other programs."""
    try:
        command = Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return False
    return process_id != os.getpid() and b"python" in command


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    if done.returncode != 0:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
