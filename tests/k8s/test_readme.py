"""The README's Kubernetes section: what it tells people to type is what the tests build, and works on it."""

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.manifests import (
    COMPONENTS,
    K8S,
    KUSTOMIZATIONS,
    ROOT,
    bounds_of,
    build,
    one,
    settings_of,
    workers,
)
from tests.k8s.test_manifests import check

pytestmark = pytest.mark.needs("kubectl", apt="kubectl (from Kubernetes' own packages; Debian's is too old)")


def section() -> str:
    match = re.search(r"(?ms)^## Kubernetes\n(.*?)^## ", (ROOT / "README.md").read_text())
    assert match
    return match[1]


def commands() -> list[list[str]]:
    """Everything that begins with a program of ours, in blocks, tables and sentences."""
    blocks = re.findall(r"(?m)^    ((?:kubectl|docker|kind) .*)$", section())
    spans = [text.replace("\n", " ") for text in re.findall(r"`((?:kubectl|docker) [^`]*)`", section())]
    return [shlex.split(text.replace("\\|", "|")) for text in (*blocks, *spans)]


def merged(value: Any, patch: Any) -> Any:
    """A merge patch, as kubectl applies it."""
    if not isinstance(patch, dict) or not isinstance(value, dict):
        return patch
    return value | {key: merged(value.get(key), each) for key, each in patch.items()}


def test_there_are_commands() -> None:
    assert len(commands()) >= 14


def test_what_is_applied_is_what_was_built() -> None:
    applied = {ROOT / words[3] for words in commands() if words[:3] == ["kubectl", "apply", "-k"]}
    assert applied <= set(KUSTOMIZATIONS)
    assert {path for path in KUSTOMIZATIONS if path.parent.name == "integrations"} <= applied


def test_every_overlay_and_component_is_named() -> None:
    for folder in (*(K8S / "overlays").iterdir(), *COMPONENTS):
        assert re.search(rf"(?m)^\| `{folder.name}` \|", section()), folder.name


def test_patches_resize_the_job_and_its_bounds() -> None:
    objects = build(K8S / "base")
    kinds = {"job": "Job", "configmap": "ConfigMap"}
    patched = copy.deepcopy(objects)
    count = 0
    for words in commands():
        if words[:2] != ["kubectl", "patch"]:
            continue
        assert words[4:6] == ["--type", "merge"]
        thing = one(patched, kinds[words[2]], words[3])
        patched[patched.index(thing)] = merged(thing, json.loads(words[words.index("--patch") + 1]))
        count += 1
    assert count == 2
    check(patched)
    spec = one(patched, "Job")["spec"]
    assert spec["parallelism"] == spec["completions"] == bounds_of(patched)[1]
    # Nothing but what Kubernetes lets change while a Job runs.
    before = one(objects, "Job")["spec"]
    assert {key for key in spec if spec[key] != before[key]} == {"parallelism", "completions"}


def test_overlay_of_ones_own_builds_and_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"(?ms)^    (apiVersion: kustomize.*?)^\S", section())
    text = re.sub(r"(?m)^    ", "", block)
    for path in set(re.findall(r"k8s/[\w/-]+", text)):
        assert (ROOT / path).is_dir()
    (tmp_path / "k8s").symlink_to(K8S)
    (tmp_path / "dashboards").symlink_to(ROOT / "dashboards")
    (tmp_path / "kustomization.yaml").write_text(text)
    objects = build(tmp_path)
    check(objects)
    pod = workers(objects)
    assert pod.agent["image"] == "registry.example.com/team/train:7"
    assert pod.agent["args"] == ["/app/train.py", "--epochs=3"]
    assert settings_of(objects)["PET_NPROC_PER_NODE"] == "8"
    assert {each["metadata"].get("namespace") for each in objects if each["kind"] != "ClusterRole"} == {
        "training"
    }
    assert yaml.safe_load(text)["kind"] == "Kustomization"


def test_files_and_names_it_speaks_of_are_there() -> None:
    text = section()
    for path in set(re.findall(r"k8s/[\w./-]+[\w]", text)):
        assert (ROOT / path).exists(), path
    spec = one(build(K8S / "base"), "Job")["spec"]
    assert f"`backoffLimitPerIndex` ({spec['backoffLimitPerIndex']})" in text
    mounts = {mount["mountPath"] for mount in workers(build(K8S / "base")).agent["volumeMounts"]}
    assert "/etc/hieravg/pod" in mounts
