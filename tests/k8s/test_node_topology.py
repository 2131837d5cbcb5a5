"""The init step that reads a machine's labels, against an API server that speaks TLS and checks the token."""

import functools
import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from elastic_hieravg.config import LABELS_FILE_VARIABLE, read_node_labels
from tests.k8s.manifests import K8S, build_with, one, workers

SCRIPT = K8S / "components" / "node-topology" / "node_topology.py"
TOKEN = "pod's own"
LABELS = {
    "topology.kubernetes.io/region": "r1",
    "topology.kubernetes.io/zone": "z1",
    "example.com/rack": "k7",
    "kubernetes.io/hostname": "m1",
}


class ApiServer(http.server.BaseHTTPRequestHandler):
    """Answers as Kubernetes does, as far as the step asks; `answers` come first, one by one."""

    def __init__(self, answers: list[int], *arguments: Any) -> None:
        self._answers = answers
        super().__init__(*arguments)

    def do_GET(self) -> None:
        code = self._answers.pop(0) if self._answers else 200
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            code = 401
        elif self.path != "/api/v1/nodes/m1":
            code = 404
        content = json.dumps({"kind": "Node", "metadata": {"name": "m1", "labels": LABELS}}).encode()
        self.send_response(code)
        self.end_headers()
        self.wfile.write(content if code == 200 else b"{}")

    def log_message(self, *_: object) -> None:
        return


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.answers: list[int] = []
        self.folder = folder
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(ApiServer, self.answers)
        )
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        authority.cert_pem.write_to_path(folder / "ca.crt")
        (folder / "token").write_text(f"{TOKEN}\n")
        self.path = folder / "labels"

    def run(self, node: str = "m1", **variables: str) -> "subprocess.CompletedProcess[str]":
        given = {
            "NODE_NAME": node,
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._server.server_address[1]),
            "ACCOUNT_FOLDER": str(self.folder),
            "TOPOLOGY_FILE": str(self.path),
            "TOPOLOGY_LABELS": "topology.kubernetes.io/zone=zone,example.com/rack=rack,example.com/row=row",
        }
        return subprocess.run(
            [sys.executable, SCRIPT],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | given | variables,
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    opened = Cluster(tmp_path)
    yield opened
    opened.close()


def test_writes_the_labels_that_are_asked_for_as_the_agent_reads_them(cluster: Cluster) -> None:
    done = cluster.run()
    assert (done.returncode, done.stdout) == (0, "")
    assert cluster.path.read_text() == 'rack="k7"\nzone="z1"\n'
    found = read_node_labels(environment={LABELS_FILE_VARIABLE: str(cluster.path)})
    assert (found["zone"], found["rack"]) == ("z1", "k7")


def test_tries_again_when_the_server_is_busy(cluster: Cluster) -> None:
    cluster.answers += [503]
    assert cluster.run().returncode == 0
    assert cluster.answers == []


@pytest.mark.parametrize(
    ("node", "token", "found"), [("m2", TOKEN, "404 Not Found"), ("m1", "x", "401 Unauthorized")]
)
def test_says_at_once_what_is_wrong(cluster: Cluster, node: str, token: str, found: str) -> None:
    (cluster.folder / "token").write_text(token)
    done = cluster.run(node)
    assert done.returncode == 1
    assert f"the labels of node {node} cannot be read: {found}" in done.stderr
    assert "hint:" in done.stderr
    assert not cluster.path.exists()


@pytest.mark.needs("kubectl", apt="kubectl (from Kubernetes' own packages; Debian's is too old)")
def test_the_component_gives_the_step_what_it_reads_and_no_more_rights_than_that(tmp_path: Path) -> None:
    objects = build_with(tmp_path / "overlay", SCRIPT.parent)
    (step,) = workers(objects).spec["initContainers"]
    names = {each["name"] for each in step["env"]}
    assert names == {"NODE_NAME", "TOPOLOGY_LABELS", "TOPOLOGY_FILE"}
    assert step["command"] == ["python", f"/scripts/{SCRIPT.name}"]
    assert one(objects, "ConfigMap", "hieravg-node-topology")["data"] == {SCRIPT.name: SCRIPT.read_text()}
    agent = workers(objects).environment()
    assert agent["HIERAVG_LABELS_FILE"] == next(
        each["value"] for each in step["env"] if each["name"] == "TOPOLOGY_FILE"
    )
    (rule,) = one(objects, "ClusterRole", "hieravg-node-topology")["rules"]
    assert rule == {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
