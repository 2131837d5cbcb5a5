"""How the ranks of a group meet: a barrier that carries a small record from everybody to everybody.

Every pair has a connection of its own: a Unix socket without a name in the file system between ranks of
one node, TCP between nodes. Addresses are exchanged through a torch store, with a token that the caller
must present. A peer's death is seen as the end of its connection, or by its process handle if a forked
child still holds the connection. Invariant: after an error a mesh is never used again.
"""

import contextlib
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store

from elastic_hieravg.errors import PeerLostError, Problem
from elastic_hieravg.plan import Plan

LOOPBACK = "127.0.0.1"
RECORD_BYTES = 256
# After one peer has hung up, what others sent before may still be on its way.
HANG_UP_GRACE_S = 0.02

_POLL_HANG_UP = getattr(select, "POLLRDHUP", 0x2000)
_TOKEN_BYTES = 16
_FILE_MARK = b"f"
_MESHES: "weakref.WeakSet[Mesh]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of a group: how messages name it, its node, and the address its node is reached at."""

    name: str
    node_id: str
    address: str


def peers_of(plan: Plan, ranks: Sequence[int], addresses: Mapping[str, str]) -> tuple[Peer, ...]:
    """Ranks of a plan; the loopback where a node has no address."""
    return tuple(
        Peer(
            f"rank {seat.rank} ({seat.node_id}/{seat.local_rank})",
            seat.node_id,
            addresses.get(seat.node_id, LOOPBACK),
        )
        for seat in map(plan.seat, ranks)
    )


def lost(who: str, why: str) -> PeerLostError:
    return PeerLostError(
        Problem(f"{who} is lost to its group: {why}", "make a new group without that rank: this one has ended")
    )


def read_key(store: Store, key: str, *, of: str, deadline_s: float) -> bytes:
    """What `of` wrote under a key; `PeerLostError` if nothing is there by the deadline."""
    try:
        store.wait([key], timedelta(seconds=_left(deadline_s)))
        return bytes(store.get(key))
    except RuntimeError as exc:
        raise lost(of, f"it wrote no {key}") from exc


class Mesh:
    """One rank's connections to the others of its group; `index` is its place among `peers`."""

    def __init__(self, store: Store, *, index: int, peers: tuple[Peer, ...], timeout_s: float) -> None:
        """Meet the others under keys of `store` that nobody else uses; all within `timeout_s`."""
        self.index = index
        self.peers = peers
        self._is_cut = False
        self._sockets: dict[int, socket.socket] = {}
        self._unread: dict[int, bytes] = dict.fromkeys(range(len(peers)), b"")
        self._processes: dict[int, int] = {}
        try:
            self._meet(store, deadline_s=time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise
        self._by_descriptor = {sock.fileno(): peer for peer, sock in self._sockets.items()}
        self._by_descriptor |= {handle: peer for peer, handle in self._processes.items()}
        _MESHES.add(self)

    def gather(self, record: bytes, *, timeout_s: float) -> list[bytes]:
        """Everybody's record, in order. `PeerLostError` if somebody died, cut, or did not come in time."""
        assert len(record) <= RECORD_BYTES
        record = record.ljust(RECORD_BYTES, b"\0")
        found: dict[int, bytes] = {self.index: record}
        for peer, sock in self._sockets.items():
            try:
                num_sent = sock.send(record)
                assert num_sent == RECORD_BYTES, "a connection's buffer holds more than one record"
            except OSError as exc:
                # It is gone, but may have sent its record before; if so the round is whole without ours.
                if not self._receive(peer, found):
                    raise lost(self.peers[peer].name, str(exc)) from exc
        missing = {peer for peer in self._sockets if peer not in found and not self._receive(peer, found)}
        self._wait(missing, found, deadline_s=time.monotonic() + timeout_s)
        return [found[peer] for peer in range(len(self.peers))]

    def share_file(self, descriptor: int, *, timeout_s: float) -> list[int]:
        """Everybody's descriptor, in order; the caller closes those of the others. Within one node only."""
        for sock in self._sockets.values():
            socket.send_fds(sock, [_FILE_MARK], [descriptor])
        found = {self.index: descriptor}
        for peer, sock in self._sockets.items():
            sock.settimeout(timeout_s)
            try:
                _, received, _, _ = socket.recv_fds(sock, len(_FILE_MARK), 1)
            except OSError as exc:
                raise lost(self.peers[peer].name, str(exc)) from exc
            finally:
                sock.setblocking(False)
            if not received:
                raise lost(self.peers[peer].name, "it hung up while passing memory")
            os.set_inheritable(received[0], False)
            found[peer] = received[0]
        return [found[peer] for peer in range(len(self.peers))]

    def has_hung_up(self) -> bool:
        """Whether somebody is gone, or has cut; without waiting, and outside of `gather` only."""
        poll = select.poll()
        for sock in self._sockets.values():
            poll.register(sock, select.POLLRDHUP)
        return self._is_cut or bool(poll.poll(0))

    def cut(self) -> None:
        """End every wait, here and at the peers. Any thread may call it, at any time."""
        self._is_cut = True
        for sock in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self.drop()
        _MESHES.discard(self)

    def drop(self) -> None:
        """Close the descriptors without a word to the peers: a forked child shares the connections."""
        for sock in self._sockets.values():
            sock.close()
        for handle in self._processes.values():
            with contextlib.suppress(OSError):
                os.close(handle)
        self._processes = {}

    def _wait(self, missing: set[int], found: dict[int, bytes], *, deadline_s: float) -> None:
        hung_up: set[int] = set()
        while missing:
            poll = select.poll()
            for peer in self._sockets.keys() - hung_up:
                # From those that have arrived only a hang-up matters: it means that they cut the group.
                poll.register(self._sockets[peer], select.POLLIN if peer in missing else _POLL_HANG_UP)
            for peer in missing & self._processes.keys():
                poll.register(self._processes[peer], select.POLLIN)
            events = poll.poll(_left(deadline_s) * 1000)
            if self._is_cut:
                raise lost(self.peers[self.index].name, "it cut the group itself")
            if not events:
                late = ", ".join(self.peers[peer].name for peer in sorted(missing))
                raise lost(late, "another rank hung up first" if hung_up else "it did not arrive in time")
            for descriptor, _ in events:
                peer = self._by_descriptor[descriptor]
                if peer in found:
                    hung_up.add(peer)
                    deadline_s = min(deadline_s, time.monotonic() + HANG_UP_GRACE_S)
                elif self._receive(peer, found):
                    missing.discard(peer)
                elif descriptor == self._processes.get(peer):
                    raise lost(self.peers[peer].name, "its process ended")

    def _receive(self, peer: int, found: dict[int, bytes]) -> bool:
        """Take the peer's record if it is there; False if it is not yet, or not yet whole."""
        unread = self._unread[peer]
        for _ in range(2):
            try:
                part = self._sockets[peer].recv(RECORD_BYTES - len(unread))
            except BlockingIOError:
                return False
            except ConnectionResetError:
                # May be reported before data that is still queued: read once more.
                continue
            except OSError as exc:
                # Its machine is gone without a word.
                raise lost(self.peers[peer].name, str(exc)) from exc
            if not part:
                who = self.peers[self.index if self._is_cut else peer].name
                raise lost(who, "its connection ended")
            if len(unread) + len(part) < RECORD_BYTES:
                self._unread[peer] = unread + part
                return False
            found[peer], self._unread[peer] = unread + part, b""
            return True
        raise lost(self.peers[peer].name, "its connection was reset")

    def _meet(self, store: Store, *, deadline_s: float) -> None:
        me = self.peers[self.index]
        token = os.urandom(_TOKEN_BYTES)
        with contextlib.ExitStack() as listeners:
            listening = []
            for is_local in sorted({peer.node_id == me.node_id for peer in self.peers[self.index + 1 :]}):
                listener, where = _listen(me.address, is_local=is_local, backlog=len(self.peers))
                listeners.enter_context(listener)
                listening.append(listener)
                store.set(f"mesh/{self.index}/{'unix' if is_local else 'tcp'}", (token + where.encode()).hex())
            for peer in range(self.index):
                kind = "unix" if self.peers[peer].node_id == me.node_id else "tcp"
                key, name = f"mesh/{peer}/{kind}", self.peers[peer].name
                invitation = read_key(store, key, of=name, deadline_s=deadline_s)
                self._connect(peer, bytes.fromhex(invitation.decode()), deadline_s=deadline_s)
            while len(self._sockets) < len(self.peers) - 1:
                self._accept(listening, token, deadline_s=deadline_s)
        for peer, sock in self._sockets.items():
            sock.setblocking(False)
            if sock.family == socket.AF_UNIX:
                # In another process namespace there is no handle; the connection's end has to do.
                with contextlib.suppress(OSError):
                    self._processes[peer] = os.pidfd_open(_credentials(sock)[0])

    def _connect(self, peer: int, invitation: bytes, *, deadline_s: float) -> None:
        token, where = invitation[:_TOKEN_BYTES], invitation[_TOKEN_BYTES:].decode()
        is_local = where.startswith("\0")
        sock = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET, socket.SOCK_STREAM)
        self._sockets[peer] = sock
        sock.settimeout(_left(deadline_s))
        host, _, port = where.rpartition(":")
        try:
            sock.connect(where if is_local else (host, int(port)))
            if not is_local:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(token + struct.pack("<i", self.index))
        except OSError as exc:
            raise lost(self.peers[peer].name, str(exc)) from exc

    def _accept(self, listening: list[socket.socket], token: bytes, *, deadline_s: float) -> None:
        ready, _, _ = select.select(listening, [], [], _left(deadline_s))
        if not ready:
            missing = [peer.name for i, peer in enumerate(self.peers) if i not in {self.index, *self._sockets}]
            raise lost(", ".join(missing), "it did not connect in time")
        sock, _ = ready[0].accept()
        sock.settimeout(_left(deadline_s))
        with contextlib.suppress(OSError):
            greeting = sock.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            is_mine = sock.family != socket.AF_UNIX or _credentials(sock)[1] == os.getuid()
            if is_mine and len(greeting) == _TOKEN_BYTES + 4 and greeting[:_TOKEN_BYTES] == token:
                (peer,) = struct.unpack("<i", greeting[_TOKEN_BYTES:])
                if sock.family == socket.AF_INET:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets[peer] = sock
                return
        # A stranger, or a peer that died at the door: the deadline decides.
        sock.close()


def _listen(address: str, *, is_local: bool, backlog: int) -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET, socket.SOCK_STREAM)
    if is_local:
        # An abstract name vanishes with the process.
        where = f"\0hieravg-{os.urandom(16).hex()}"
        listener.bind(where)
    else:
        listener.bind((address, 0))
        where = f"{address}:{listener.getsockname()[1]}"
    listener.listen(backlog)
    return listener, where


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process_id, user_id, group_id = struct.unpack("3i", packed)
    return process_id, user_id, group_id


def _left(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())


def _drop_in_child() -> None:
    # A forked child (a data loader's worker) must not keep the connections open when its parent dies.
    for mesh in list(_MESHES):
        mesh.drop()


os.register_at_fork(after_in_child=_drop_in_child)
