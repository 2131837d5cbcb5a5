"""The etcd component: three real members with the manifest's own flags and certificates, and a client."""

import base64
import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastic_hieravg.membership.etcd import EtcdKeyValue
from elastic_hieravg.membership.kv import Put, Write
from elastic_hieravg.rendezvous.settings import etcd_settings
from tests.k8s.manifests import K8S, ROOT, Object, build, one, pods, settings_of, workers
from tests.membership.etcd_servers import PROGRAMS, free_ports

pytestmark = pytest.mark.needs("kubectl", apt="kubectl (from Kubernetes' own packages; Debian's is too old)")

CERTIFICATES = K8S / "components" / "etcd" / "certificates.sh"
MEMBERS = 3
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return build(K8S / "overlays" / "etcd")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Secrets that the script prints, as pods would have them mounted: a folder each."""
    folder = tmp_path_factory.mktemp("secrets")
    done = subprocess.run([CERTIFICATES], capture_output=True, text=True, check=True, timeout=60)
    for secret in yaml.safe_load_all(done.stdout):
        mounted = folder / secret["metadata"]["name"]
        mounted.mkdir()
        for name, content in secret["data"].items():
            (mounted / name).write_bytes(base64.b64decode(content))
    return folder


class Cluster:
    """The StatefulSet's members on this machine: their names are ports, the rest is as in the manifest."""

    def __init__(self, objects: list[Object], secrets: Path, folder: Path) -> None:
        stateful = one(objects, "StatefulSet", "hieravg-etcd")["spec"]
        assert stateful["replicas"] == MEMBERS
        (container,) = stateful["template"]["spec"]["containers"]
        self._ports = free_ports(3 * MEMBERS)
        self.clients = self._ports[:MEMBERS]
        self._args = container["args"]
        self._secrets = secrets
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        for index in range(MEMBERS):
            with (folder / f"log-{index}").open("wb") as log:
                command = ["setpriv", "--pdeathsig", "KILL", str(PROGRAMS / "etcd"), *self._flags(index)]
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _flags(self, index: int) -> list[str]:
        name = f"hieravg-etcd-{index}"
        found = []
        for flag in self._args:
            text = self.at_home(flag.replace("$(POD_NAME)", name))
            text = text.replace("/var/lib/etcd/data", str(self._folder / name))
            for place, port in zip(("2379", "2380", "2381"), self._ports[index::MEMBERS], strict=True):
                text = text.replace(f"0.0.0.0:{place}", f"127.0.0.1:{port}")
            found.append(text)
        return found

    def at_home(self, text: str) -> str:
        """A text of the manifest with this machine's addresses and folders."""
        for index in range(MEMBERS):
            for number, port in enumerate(("2379", "2380")):
                here = f"127.0.0.1:{self._ports[index + number * MEMBERS]}"
                text = text.replace(f"hieravg-etcd-{index}.hieravg-etcd:{port}", here)
        text = re.sub(r"/etc/etcd/(\w+)", rf"{self._secrets}/hieravg-etcd-\1", text)
        return text.replace("/etc/hieravg/etcd", f"{self._secrets}/hieravg-etcd-client")

    def control(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [PROGRAMS / "etcdctl", *arguments], capture_output=True, text=True, timeout=WITHIN_S, check=False
        )

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(
    objects: list[Object], secrets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    opened = Cluster(objects, secrets, tmp_path_factory.mktemp("etcd"))
    with contextlib.closing(opened):
        yield opened


def test_members_meet_and_an_agent_is_let_in(objects: list[Object], cluster: Cluster) -> None:
    """With the endpoints and the rendezvous settings that the pods of the job have."""
    texts = dict(pair.split("=", 1) for pair in settings_of(objects)["PET_RDZV_CONF"].split(","))
    here = {key: cluster.at_home(value) for key, value in texts.items()}
    endpoints = cluster.at_home(workers(objects).environment()["PET_RDZV_ENDPOINT"])
    deadline_s = time.monotonic() + WITHIN_S
    with contextlib.closing(EtcdKeyValue(etcd_settings(endpoints, here))) as kv:
        while True:
            try:
                revision = kv.write(Write({}, (Put("/hieravg/test", "x", kv.grant(60.0)),)))
                break
            except Exception:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)
        assert revision
        assert kv.get("/hieravg/test").entries["/hieravg/test"].value == "x"


def test_nobody_is_let_in_without_a_certificate(cluster: Cluster, secrets: Path) -> None:
    endpoint = f"--endpoints=https://127.0.0.1:{cluster.clients[0]}"
    cacert = f"--cacert={secrets / 'hieravg-etcd-client' / 'ca.crt'}"
    done = cluster.control(
        endpoint, cacert, "--dial-timeout=1s", "--command-timeout=2s", "get", "/hieravg/test"
    )
    assert done.returncode != 0


def test_defragmentation_does_all_members(objects: list[Object], cluster: Cluster) -> None:
    (pod,) = [pod for pod in pods(objects) if pod.owner.startswith("CronJob/")]
    (container,) = pod.containers
    done = cluster.control(*(cluster.at_home(argument) for argument in container["args"]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Finished defragmenting") == MEMBERS


def test_probes_ask_where_metrics_are_served(objects: list[Object]) -> None:
    (pod,) = [pod for pod in pods(objects) if pod.owner == "StatefulSet/hieravg-etcd"]
    (container,) = pod.containers
    assert "--listen-metrics-urls=http://0.0.0.0:2381" in container["args"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"client": 2379, "peer": 2380, "metrics": 2381}
    for probe in ("startup", "liveness", "readiness"):
        assert container[f"{probe}Probe"]["httpGet"]["port"] == "metrics"


def test_members_and_budget_keep_a_majority(objects: list[Object]) -> None:
    assert one(objects, "PodDisruptionBudget", "hieravg-etcd")["spec"]["maxUnavailable"] == 1
    spec = one(objects, "StatefulSet", "hieravg-etcd")["spec"]
    assert spec["podManagementPolicy"] == "Parallel"
    assert any(
        flag.startswith("--quota-backend-bytes=") for flag in spec["template"]["spec"]["containers"][0]["args"]
    )


@pytest.mark.needs("shellcheck", apt="shellcheck")
def test_script_passes_shellcheck() -> None:
    subprocess.run(["shellcheck", CERTIFICATES], check=True, timeout=60, cwd=ROOT)
