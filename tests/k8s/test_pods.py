"""Real pods of the laptop overlay under faults: one preempted, one killed, one added; nothing is lost."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastic_hieravg.agent.elastic_agent import EXIT_LEFT
from tests.elastic.jobs import SCRIPT, children_of
from tests.k8s.manifests import K8S, Object, build
from tests.k8s.pods import Pod, PodJob, pod_job

KILLED = 137

# Not a skip in CI: `.ci/run` installs podman, and a machine without it would show nothing.
pytestmark = [
    pytest.mark.needs("kubectl", apt="kubectl (from Kubernetes' own packages; Debian's is too old)"),
    pytest.mark.needs("podman", apt="podman runc catatonit netavark iptables"),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """The laptop's manifests with a script of the tests', which tells what it does, line by line."""
    folder = tmp_path_factory.mktemp("overlay")
    shutil.copy(SCRIPT, folder / "train.py")
    kustomization = {
        "resources": [os.path.relpath(K8S / "overlays" / "laptop", folder)],
        "configMapGenerator": [
            {
                "name": "hieravg-script",
                "behavior": "replace",
                "files": ["train.py"],
                "options": {"disableNameSuffixHash": True},
            },
            {
                "name": "hieravg-settings",
                "behavior": "merge",
                "literals": ["HIERAVG_HIERARCHY=node=4,global=16", "PET_NPROC_PER_NODE=2", "OMP_NUM_THREADS=1"],
                "options": {"disableNameSuffixHash": True},
            },
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return build(folder)


@pytest.fixture
def job(objects: list[Object]) -> Iterator[PodJob]:
    with pod_job(objects, num_names=3) as opened:
        yield opened


def check_restricted(job: PodJob, pod: Pod) -> None:
    """The security context of the manifest holds in the container that runs."""
    found = job.podman.inspect(pod.container)
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{found['State']['Pid']}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert set(status["Uid"].split()) == {"65532"}
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert status["NSpid"].split()[-1] == "1"
    assert found["HostConfig"]["ReadonlyRootfs"] is True
    assert found["HostConfig"]["Memory"] == 1536 << 20


def check_steps(job: PodJob, pod: Pod) -> None:
    """Every worker of a pod made each of its steps once, one after the other."""
    by_process: dict[int, list[int]] = {}
    for line in job.steps(pod):
        by_process.setdefault(line["pid"], []).append(line["step"])
    assert len(by_process) == 2
    for steps in by_process.values():
        assert steps == list(range(steps[0], steps[0] + len(steps)))


def check_all_taken_along(job: PodJob, *, leaver: Pod, witness: Pod) -> None:
    """The others went on from a round that held everything the leaver did: it made no step after it."""
    made = re.findall(r"generation (\d+), round: ", job.podman.logs(witness.container))
    together = [line["step"] for line in job.told() if line["generation"] == int(made[-1]) and "digest" in line]
    assert max(line["step"] for line in job.steps(leaver)) == min(together) - 1


def test_pods_are_preempted_killed_and_added_and_nothing_is_lost(job: PodJob) -> None:
    first, second = job.start(0), job.start(1)
    job.await_ready(first)
    job.await_ready(second)
    check_restricted(job, first)
    job.await_together(first, second)

    # The Job is resized: a third pod, and room for it.
    third = job.start(2)
    job.change_bounds("1:3")
    job.await_together(first, second, third)
    job.await_ready(third)

    # Preempted: its work is in the others' models, and it is not taken for finished.
    assert job.preempt(second) == EXIT_LEFT
    assert second.termination_message == "left on SIGTERM; what this node did is in the others' models"
    job.await_together(first, third)
    check_all_taken_along(job, leaver=second, witness=first)
    job.remove(second)

    # Killed: another one of the same index takes its place, as the same node.
    assert job.kill(third) == KILLED
    job.remove(third)
    fourth = job.start(2)
    job.await_together(first, fourth)

    # The one that hosts the store of the rendezvous is preempted too; the next finds the job where it is now.
    assert job.preempt(first) == EXIT_LEFT
    job.remove(first)
    fifth = job.start(0)
    job.await_together(fourth, fifth)

    (job.folder / "stop").touch()
    assert [job.await_exit(pod) for pod in (fourth, fifth)] == [0, 0]
    assert [pod.termination_message for pod in (fourth, fifth)] == ["training is done"] * 2
    ends = [line for line in job.told() if line["event"] == "end"]
    assert {line["node"] for line in ends} == {fourth.name, fifth.name}
    assert len({line["digest"] for line in ends}) == 1
    for pod in (first, second, third, fourth, fifth):
        check_steps(job, pod)


def test_nothing_of_podmans_is_left(objects: list[Object]) -> None:
    before = interfaces()
    with pod_job(objects, num_names=1) as job:
        folder = job.podman.folder
        # It has a network and a process of its own, and ends on SIGTERM before it has begun to train. Only the
        # kernel's rule for a first process that has not set its handlers yet is stronger.
        pod = job.start(0)
        first = job.podman.inspect(pod.container)["State"]["Pid"]
        job.wait_for("the command runs below the first process", lambda: bool(children_of(first)))
        assert interfaces() != before
        assert job.preempt(pod) == EXIT_LEFT
    assert interfaces() == before
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert not folder.exists()


def interfaces() -> set[str]:
    done = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True, timeout=60)
    return {line.split()[0].partition("@")[0] for line in done.stdout.splitlines()}
