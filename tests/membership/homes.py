"""The homes of the key-value seam, each as the contract suite needs it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic_hieravg.membership.embedded import EmbeddedKeyValue, EmbeddedServer
from elastic_hieravg.membership.etcd import EtcdKeyValue
from elastic_hieravg.membership.failover import FailoverKeyValue
from elastic_hieravg.membership.kv import KeyValue
from elastic_hieravg.membership.memory import MemoryKeyValue
from tests.membership.etcd_servers import Certificates, EtcdCluster

NAMES = ("memory", "embedded", "failover", "etcd", "etcd-3", "etcd-tls", "etcd-users")


@dataclass
class Home:
    """`open` gives a client of the one store; `compact` has the store forget its history.

    `ttl_s`: a short lease, as short as the store makes them.
    """

    name: str
    ttl_s: float
    open: Callable[[], KeyValue]
    compact: Callable[[], None]


@contextmanager
def home(name: str, folder: Path) -> Iterator[Home]:
    with ExitStack() as stack:
        if name == "memory":
            store = MemoryKeyValue()
            yield Home(name, 0.5, lambda: store, store.compact)
        elif name == "embedded":
            server = EmbeddedServer("127.0.0.1", 0, run_id="contract")
            stack.callback(server.close)
            # Only its owner may reach into the server, and only here.
            yield Home(
                name,
                0.5,
                lambda: EmbeddedKeyValue("127.0.0.1", server.port, run_id="contract"),
                server._ledger.compact,
            )
        elif name == "failover":
            first = FailoverKeyValue([("127.0.0.1", 0)], run_id="contract", address="127.0.0.1")
            stack.callback(first.close)
            hosted = first._steward.hosted
            assert hosted is not None
            (server,) = first._steward._bound.values()
            yield Home(
                name,
                0.5,
                lambda: FailoverKeyValue([hosted.where], run_id="contract", address="127.0.0.1"),
                server._ledger.compact,
            )
        else:
            cluster = _cluster(name, folder)
            stack.callback(cluster.close)
            yield Home(name, 2.0, lambda: EtcdKeyValue(cluster.settings()), lambda: _compact(cluster))


def _cluster(name: str, folder: Path) -> EtcdCluster:
    certificates = Certificates.make(folder) if name in ("etcd-tls", "etcd-users") else None
    num_members = 3 if name in ("etcd-3", "etcd-users") else 1
    return EtcdCluster(
        folder, num_members=num_members, certificates=certificates, has_users=name == "etcd-users"
    )


def _compact(cluster: EtcdCluster) -> None:
    client = EtcdKeyValue(cluster.settings())
    revision = client.get("/hieravg/").revision
    client.close()
    as_user = "root:rootpass" if cluster.has_users else None
    cluster.control("compaction", str(revision), as_user=as_user)
