"""Real pods of the built manifests, run by podman; the tests do what the Job's controller and the kubelet do.

The controller's part: a pod's name, hostname and labels. The kubelet's: variables out of fields, volumes, the
file for the termination message, names in DNS (as entries of each pod's hosts file), and the probes, which the
tests call. The image is empty; the machine's Python and the repository are mounted into it. What is podman's
is in one folder and one network of its own. Invariant: whatever a test does, nothing of it is left at the end.
"""

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.manifests import ROOT, Object, bounds_of, one, settings_of, workers

WITHIN_S = 120.0
POLL_S = 0.1
COMMAND_TIMEOUT_S = 60.0
LOG_SHOWN = 3000
IMAGE = "hieravg:0.1.0"
# Root has no right to raise limits on some machines, and crun does not run with every kind of control groups.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_config_dir = "{folder}/networks"
"""
# What the empty image lacks, at the same place as on the machine.
MACHINE = ("/usr", "/lib", "/lib64")
_VARIABLE = re.compile(r"\$\(([A-Z_]+)\)")


@dataclass
class Pod:
    """One pod; `folder` holds what the kubelet would mount, `/lines` what its workers write."""

    name: str
    index: int
    address: str
    folder: Path
    spec: Object = field(default_factory=dict)
    is_removed: bool = False

    @property
    def container(self) -> str:
        return f"{self.name}-agent"

    @property
    def termination_message(self) -> str:
        return (self.folder / "termination-log").read_text()


class Podman:
    """podman with a storage, a network and a configuration of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = f"hieravg-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
        self._subnet = f"10.{os.getpid() % 200 + 20}.{time.monotonic_ns() % 250}"
        (folder / "containers.conf").write_text(CONFIGURATION.format(folder=folder))
        (folder / "Dockerfile").write_text("FROM scratch\nLABEL made-for=tests\n")
        self.run("build", "--quiet", "--tag", IMAGE, str(folder))
        self.run("network", "create", "--subnet", f"{self._subnet}.0/24", "--disable-dns", self.network)

    def address(self, number: int) -> str:
        return f"{self._subnet}.{number}"

    def run(self, *arguments: str, is_checked: bool = True) -> str:
        storage = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]
        done = subprocess.run(
            ["podman", *storage, *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            env=os.environ
            | {"CONTAINERS_CONF": str(self.folder / "containers.conf"), "TMPDIR": str(self.folder)},
        )
        assert done.returncode == 0 or not is_checked, f"podman {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def logs(self, container: str) -> str:
        """What a container has printed, of both kinds."""
        log = self.inspect(container)["HostConfig"]["LogConfig"]["Path"]
        return Path(log).read_text(errors="replace") if Path(log).exists() else ""

    def inspect(self, container: str) -> Any:
        return json.loads(self.run("container", "inspect", container))[0]

    def close(self) -> None:
        self.run("pod", "rm", "--all", "--force", "--time", "0", is_checked=False)
        self.run("network", "rm", "--force", self.network, is_checked=False)
        self.run("rmi", "--all", "--force", is_checked=False)
        # Mounts of the storage itself, if any are left.
        for line in Path("/proc/mounts").read_text().splitlines()[::-1]:
            place = line.split()[1]
            if place.startswith(str(self.folder)):
                subprocess.run(["umount", "--lazy", place], check=False, timeout=COMMAND_TIMEOUT_S)


class PodJob:
    """The Job of some built manifests: its pods are started, preempted and killed by index."""

    def __init__(self, podman: Podman, objects: list[Object], folder: Path, *, num_names: int) -> None:
        self.podman = podman
        self.folder = folder
        self._objects = objects
        self._num_names = num_names
        self._numbers = itertools.count(10)
        self._next_names = itertools.count()
        self._addresses: dict[int, str] = {}
        self.pods: list[Pod] = []
        self.lines = folder / "lines"
        for name in ("lines", "orders", "logs"):
            (folder / name).mkdir()
            (folder / name).chmod(0o777)
        folder.chmod(0o755)

    # --- pods -------------------------------------------------------------------------------------------------

    def start(self, index: int) -> Pod:
        """What the controller does for an index that has no pod."""
        # An address for each index: the names of all are in every pod's hosts file before the others are there.
        for each in range(self._num_names):
            self._addresses.setdefault(each, self.podman.address(next(self._numbers)))
        name = f"hieravg-{index}-{next(self._next_names):05d}"
        pod = Pod(name, index, self._addresses[index], self.folder / "pods" / name)
        pod.folder.mkdir(parents=True)
        pod.spec = self._manifest(pod)
        path = pod.folder / "pod.yaml"
        path.write_text(yaml.safe_dump(pod.spec))
        self.podman.run("play", "kube", "--network", self.podman.network, "--ip", pod.address, str(path))
        self.pods.append(pod)
        return pod

    def preempt(self, pod: Pod) -> int:
        """SIGTERM, and SIGKILL after the pod's own grace time, as the kubelet does; the exit code."""
        grace_s = pod.spec["spec"]["terminationGracePeriodSeconds"]
        self.podman.run("kill", "--signal", "TERM", pod.container)
        deadline_s = time.monotonic() + grace_s
        while self.exit_code(pod) is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        assert self.exit_code(pod) is not None, (
            f"{pod.name} did not leave within {grace_s} s\n{self.describe()}"
        )
        return self.await_exit(pod)

    def kill(self, pod: Pod) -> int:
        self.podman.run("kill", "--signal", "KILL", pod.container)
        return self.await_exit(pod)

    def remove(self, pod: Pod) -> None:
        """What is left of a pod that ended; its index may have another one then."""
        self.podman.run("pod", "rm", "--force", "--time", "0", pod.name)
        pod.is_removed = True

    def exit_code(self, pod: Pod) -> int | None:
        state = self.podman.inspect(pod.container)["State"]
        return int(state["ExitCode"]) if state["Status"] in ("exited", "stopped") else None

    def await_exit(self, pod: Pod) -> int:
        self.wait_for(f"{pod.name} exits", lambda: self.exit_code(pod) is not None)
        code = self.exit_code(pod)
        assert code is not None
        return code

    # --- what the kubelet does --------------------------------------------------------------------------------

    def probe(self, pod: Pod, probe: str) -> int:
        """The status that a probe of the manifest gets; 0 if nobody answers in its time."""
        agent = workers(self._objects).agent
        asked = agent[f"{probe}Probe"]
        ports = {port["name"]: port["containerPort"] for port in agent["ports"]}
        request = asked["httpGet"]
        connection = http.client.HTTPConnection(
            pod.address, ports[request["port"]], timeout=float(asked.get("timeoutSeconds", 1))
        )
        with contextlib.closing(connection):
            try:
                connection.request("GET", request["path"])
                return connection.getresponse().status
            except OSError:
                return 0

    def await_ready(self, pod: Pod) -> None:
        for probe in ("startup", "readiness", "liveness"):
            self.wait_for(f"{probe} probe of {pod.name}", lambda probe=probe: self.probe(pod, probe) == 200)  # type: ignore[misc]

    def change_bounds(self, text: str) -> None:
        """A ConfigMap that has changed reaches the pods: by a link that is replaced."""
        for pod in self.pods:
            write_mounted(pod.folder / "bounds", {"nnodes": text})

    # --- what they tell ---------------------------------------------------------------------------------------

    def told(self) -> list[Object]:
        """All lines that the workers have written; one that is half written is not there yet."""
        found = []
        for path in sorted(self.lines.iterdir()):
            found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return found

    def steps(self, pod: Pod) -> list[Object]:
        return [line for line in self.told() if line["event"] == "step" and line["node"] == pod.name]

    def await_together(self, *pods: Pod) -> None:
        """Until exactly these pods have had a global round from now on, all with the same result."""
        before = len(self.told())
        names, since_s = {pod.name for pod in pods}, time.monotonic()

        def is_met() -> bool:
            rounds: dict[tuple[int, int], list[Object]] = {}
            for line in self.told():
                if line["event"] == "step" and "digest" in line and line["at_s"] > since_s:
                    rounds.setdefault((line["generation"], line["step"]), []).append(line)
            for lines in rounds.values():
                if {line["node"] for line in lines} == names and len(lines) == lines[0]["world"]:
                    assert len({line["digest"] for line in lines}) == 1, f"replicas differ: {lines}"
                    return True
            return False

        self.wait_for(f"{sorted(names)} have a global round after line {before}", is_met)

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {WITHIN_S:.0f} s: {what}\n{self.describe()}")
            time.sleep(POLL_S)

    def describe(self) -> str:
        logs = [
            f"===== {pod.name}\n{self.podman.logs(pod.container)[-LOG_SHOWN:]}"
            for pod in self.pods
            if not pod.is_removed
        ]
        return "\n".join([self.podman.run("ps", "--all", is_checked=False), *logs])

    # --- inside -----------------------------------------------------------------------------------------------

    def _manifest(self, pod: Pod) -> Object:
        """The pod as the controller would make it, with what podman cannot do done here."""
        template = workers(self._objects)
        labels = {
            **template.metadata["labels"],
            "batch.kubernetes.io/job-name": "hieravg",
            "batch.kubernetes.io/controller-uid": "5b0c0f3e",
            "batch.kubernetes.io/job-completion-index": str(pod.index),
        }
        spec = json.loads(json.dumps(template.spec))
        (agent,) = spec["containers"]
        fields = {f"metadata.labels['{key}']": value for key, value in labels.items()}
        fields |= {"status.podIP": pod.address, "metadata.name": pod.name}
        agent["env"] = self._variables(agent, fields)
        del agent["envFrom"]
        # Probes are called from outside, as the kubelet does; podman would call them inside, and publish ports.
        for name in ("startupProbe", "livenessProbe", "readinessProbe", "ports"):
            del agent[name]
        agent["args"] += ["--folder", "/job-folder", "--name", pod.name]
        self._mount_machine(spec, agent)
        self._make_volumes(pod, spec, agent, labels)
        spec["hostname"] = f"hieravg-{pod.index}"
        spec["hostAliases"] = [
            {"ip": address, "hostnames": [f"hieravg-{index}.{spec['subdomain']}"]}
            for index, address in self._addresses.items()
        ]
        metadata = {"name": pod.name, "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _variables(self, agent: Object, fields: dict[str, str]) -> list[Object]:
        found = dict(settings_of(self._objects))
        for each in agent["env"]:
            path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = fields[path] if path else each["value"]
            found[each["name"]] = _VARIABLE.sub(lambda match: found[match[1]], value)
        found["PATH"] = f"{Path(sys.prefix) / 'bin'}:/usr/bin:/bin"
        # Written by the tests' own process, as root, and not to be written here.
        found["PYTHONDONTWRITEBYTECODE"] = "1"
        return [{"name": name, "value": value} for name, value in found.items()]

    def _mount_machine(self, spec: Object, agent: Object) -> None:
        places = dict.fromkeys([*MACHINE, sys.base_prefix, sys.prefix, str(ROOT)])
        for number, place in enumerate(places):
            spec["volumes"].append({"name": f"machine-{number}", "hostPath": {"path": place}})
            agent["volumeMounts"].append({"name": f"machine-{number}", "mountPath": place, "readOnly": True})
        spec["volumes"].append({"name": "job-folder", "hostPath": {"path": str(self.folder)}})
        agent["volumeMounts"].append({"name": "job-folder", "mountPath": "/job-folder"})

    def _make_volumes(self, pod: Pod, spec: Object, agent: Object, labels: dict[str, str]) -> None:
        """Volumes that the kubelet makes are folders here."""
        for volume in spec["volumes"]:
            if "hostPath" in volume:
                continue
            name, folder = volume["name"], pod.folder / volume["name"]
            folder.mkdir()
            if "emptyDir" in volume:
                folder.chmod(0o777)
            elif "configMap" in volume:
                write_mounted(folder, one(self._objects, "ConfigMap", volume["configMap"]["name"])["data"])
            else:
                text = "".join(f'{key}="{value}"\n' for key, value in labels.items())
                write_mounted(folder, {volume["downwardAPI"]["items"][0]["path"]: text})
            volume.clear()
            volume |= {"name": name, "hostPath": {"path": str(folder)}}
        path = pod.folder / "termination-log"
        path.touch()
        path.chmod(0o666)
        spec["volumes"].append({"name": "termination-log", "hostPath": {"path": str(path), "type": "File"}})
        mount = {"name": "termination-log", "mountPath": agent["terminationMessagePath"]}
        agent["volumeMounts"].append(mount)


def write_mounted(folder: Path, files: dict[str, str]) -> None:
    """Files as the kubelet mounts them: links through a link to a folder, which is replaced as a whole."""
    version = folder / f"..{time.monotonic_ns()}"
    version.mkdir()
    for name, text in files.items():
        (version / name).write_text(text)
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(f"..data/{name}")
    (folder / "..data_tmp").symlink_to(version.name)
    (folder / "..data_tmp").rename(folder / "..data")


@contextlib.contextmanager
def pod_job(objects: list[Object], *, num_names: int) -> Iterator[PodJob]:
    """`num_names`: how many of the pods have a name in DNS, whether they are there or not."""
    # Short, and not below a folder that only root may enter.
    folder = Path(tempfile.mkdtemp(prefix="hieravg-pods-", dir="/var/tmp"))
    folder.chmod(0o755)
    podman: Podman | None = None
    try:
        podman = Podman(folder)
        job_folder = folder / "job"
        job_folder.mkdir()
        assert bounds_of(objects)
        yield PodJob(podman, objects, job_folder, num_names=num_names)
    finally:
        if podman is not None:
            podman.close()
        shutil.rmtree(folder, ignore_errors=True)
        assert not folder.exists(), f"{folder} is left"
