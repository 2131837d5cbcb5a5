"""Every kustomization builds with plain kubectl, and every object is what its schema asks for, strictly."""

import copy
import json
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from tests.k8s.manifests import (
    COMPONENTS,
    K8S,
    KUSTOMIZATIONS,
    Object,
    build,
    build_with,
    name_of,
    one,
    pods,
    workers,
)

pytestmark = pytest.mark.needs("kubectl", apt="kubectl (from Kubernetes' own packages; Debian's is too old)")

SCHEMAS = Path(__file__).with_name("schemas")
# The oldest that is supported, and the newest there is.
VERSIONS = ("1.34", "1.37")
CUSTOM = {
    "monitoring.coreos.com/v1/PodMonitor": "PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule": "PrometheusRule",
    "jobset.x-k8s.io/v1alpha2/JobSet": "JobSet",
    "trainer.kubeflow.org/v1alpha1/TrainJob": "TrainJob",
    "trainer.kubeflow.org/v1alpha1/TrainingRuntime": "TrainingRuntime",
    "kubeflow.org/v1/PyTorchJob": "PyTorchJob",
    "batch.volcano.sh/v1alpha1/Job": "VolcanoJob",
}


def check(objects: list[Object]) -> None:
    """Everything against its schema; pods inside of custom objects against Kubernetes' own."""
    for thing in objects:
        schema = CUSTOM.get(f"{thing['apiVersion']}/{thing['kind']}")
        if schema is None:
            check_kubernetes(thing)
            continue
        jsonschema.validate(thing, json.loads((SCHEMAS / f"{schema}.json").read_text()))
        for pod in pods([thing]):
            template = {"metadata": pod.metadata, "spec": pod.spec}
            check_kubernetes(
                {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
            )
        for job in thing["spec"].get("replicatedJobs", []):
            check_kubernetes(
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": {"name": "x"},
                    "spec": job["template"]["spec"],
                }
            )


def check_kubernetes(thing: Object) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: str(folder.relative_to(K8S)))
def test_kustomization_builds_and_is_valid(folder: Path) -> None:
    objects = build(folder)
    assert len(objects) >= 6
    check(objects)


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda folder: folder.name)
def test_component_alone_builds_and_is_valid(tmp_path: Path, component: Path) -> None:
    plain = build(K8S / "base")
    objects = build_with(tmp_path / "overlay", component)
    assert objects != plain
    check(objects)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_all_components_go_together_in_any_order(tmp_path: Path, is_reversed: bool) -> None:
    components = COMPONENTS[::-1] if is_reversed else COMPONENTS
    objects = build_with(tmp_path / "overlay", *components, extra={"namespace": "training"})
    check(objects)
    pod = workers(objects)
    # None of them took away what another one had added.
    assert len({each["key"] for each in pod.spec["tolerations"]}) == 3
    assert {each["name"] for each in pod.spec["volumes"]} >= {"etcd-client", "topology", "token", "bounds"}
    assert {each["image"] for each in pod.containers} == {"hieravg:0.1.0-cu130"}
    assert one(objects, "ClusterRoleBinding", "hieravg-node-topology")["subjects"][0]["namespace"] == "training"


@pytest.mark.parametrize("kind", sorted(CUSTOM.values()))
def test_schemas_of_custom_objects_find_a_wrong_field_and_a_wrong_type(tmp_path: Path, kind: str) -> None:
    """A schema that accepts everything would be no test."""
    built = [build(folder) for folder in KUSTOMIZATIONS]
    built.append(build_with(tmp_path / "overlay", K8S / "components" / "monitoring"))
    keys = {key for key, schema in CUSTOM.items() if schema == kind}
    thing = next(
        thing for objects in built for thing in objects if f"{thing['apiVersion']}/{thing['kind']}" in keys
    )
    misspelt = copy.deepcopy(thing)
    misspelt["spec"]["misspelt"] = 1
    wrong = copy.deepcopy(thing)
    first = next(name for name, value in wrong["spec"].items() if isinstance(value, dict | list))
    wrong["spec"][first] = 7
    for broken in (misspelt, wrong):
        with pytest.raises(jsonschema.ValidationError):
            check([broken])


def test_strict_validation_finds_a_wrong_field() -> None:
    job = one(build(K8S / "base"), "Job")
    job["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        check([job])


def test_names_of_objects_are_unique() -> None:
    for folder in KUSTOMIZATIONS:
        names = [f"{thing['apiVersion']} {name_of(thing)}" for thing in build(folder)]
        assert len(names) == len(set(names))
