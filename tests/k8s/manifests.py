"""The manifests as the tests see them: built with kustomize, and the pods in them, wherever they stand."""

import functools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
K8S = ROOT / "k8s"
KUSTOMIZATIONS = (
    K8S / "base",
    *sorted((K8S / "overlays").iterdir()),
    *sorted((K8S / "integrations").iterdir()),
)
COMPONENTS = sorted((K8S / "components").iterdir())
BUILD_TIMEOUT_S = 60.0

Object = dict[str, Any]


@dataclass(frozen=True)
class PodTemplate:
    """A pod as some object asks for it; `owner` names the object."""

    owner: str
    metadata: Object
    spec: Object

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def is_worker(self) -> bool:
        return bool(self.metadata["labels"]["app.kubernetes.io/component"] == "worker")

    @property
    def agent(self) -> Object:
        """The container of the agent, which each kind of job calls otherwise."""
        found: list[Object] = [
            each for each in self.spec["containers"] if each["command"] == ["hieravg", "run"]
        ]
        (agent,) = found
        return agent

    def environment(self) -> dict[str, str]:
        """The agent's variables, except those that a ConfigMap gives; what the kubelet fills in is empty."""
        return {each["name"]: each.get("value", "") for each in self.agent["env"]}


@functools.cache
def build_text(folder: Path) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A field that is deprecated is a warning here.
    assert not done.stderr, done.stderr
    return done.stdout


def build(folder: Path) -> list[Object]:
    return list(yaml.safe_load_all(build_text(folder)))


def build_with(
    folder: Path, *components: Path, base: Path = K8S / "base", extra: Object | None = None
) -> list[Object]:
    """The base with some components, as somebody's own overlay would have it. `folder` has to be new."""
    folder.mkdir()
    kustomization = {
        "resources": [os.path.relpath(base, folder)],
        "components": [os.path.relpath(component, folder) for component in components],
        **(extra or {}),
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return build(folder)


def name_of(thing: Object) -> str:
    return f"{thing['kind']}/{thing['metadata']['name']}"


def one(objects: list[Object], kind: str, name: str = "hieravg") -> Object:
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def pods(objects: list[Object]) -> list[PodTemplate]:
    return [
        PodTemplate(name_of(thing), template["metadata"], template["spec"])
        for thing in objects
        for template in _templates(thing.get("spec", {}))
    ]


def workers(objects: list[Object]) -> PodTemplate:
    (found,) = [pod for pod in pods(objects) if pod.is_worker]
    return found


def settings_of(objects: list[Object]) -> dict[str, str]:
    data: dict[str, str] = one(objects, "ConfigMap", "hieravg-settings")["data"]
    return data


def bounds_of(objects: list[Object]) -> tuple[int, int]:
    nodes_min, _, nodes_max = one(objects, "ConfigMap", "hieravg-bounds")["data"]["nnodes"].partition(":")
    return int(nodes_min), int(nodes_max)


def _templates(value: Any) -> Iterator[Object]:
    """Templates of pods below a value: what has containers below its spec."""
    if isinstance(value, list):
        for each in value:
            yield from _templates(each)
    elif isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and "containers" in spec:
            yield value
        else:
            for each in value.values():
                yield from _templates(each)
