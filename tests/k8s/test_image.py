"""The image's Dockerfile: the linter's word, and its commands run in a plain folder, without a base image."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.k8s.manifests import K8S, ROOT, build, workers

DOCKERFILE = K8S / "image" / "Dockerfile"
INSTALL_TIMEOUT_S = 600.0
STEPS = 20


def stages() -> list[str]:
    """The Dockerfile with its long lines joined, stage by stage."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text()).replace("\\\n", "")
    return re.split(r"(?m)^FROM ", text)[1:]


def commands(stage: str, keyword: str) -> list[str]:
    return re.findall(rf"(?m)^{keyword} (.*)$", stage)


def test_passes_the_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    subprocess.run([hadolint, DOCKERFILE], check=True, timeout=60)


def test_base_has_a_version_and_a_place_for_a_digest() -> None:
    (base,) = re.findall(r"(?m)^ARG BASE=(\S+)$", DOCKERFILE.read_text())
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)
    assert all(stage.startswith("${BASE}") for stage in stages())


def test_last_stage_is_what_the_pods_expect() -> None:
    build_stage, last = stages()
    assert commands(last, "RUN") == []
    assert commands(last, "ENTRYPOINT") == ['["hieravg"]']
    (user,) = commands(last, "USER")
    context = workers(build(K8S / "base")).spec["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert commands(last, "COPY") == ["--from=build /opt/hieravg /opt/hieravg"]
    assert "torch==" in build_stage


def test_versions_are_those_of_the_constraints_and_the_package() -> None:
    from elastic_hieravg import __version__

    (pin,) = re.findall(r"(?m)^torch==(\S+)$", (ROOT / "constraints.txt").read_text())
    text = DOCKERFILE.read_text()
    assert f'"torch=={pin}+${{VARIANT}}"' in text
    assert f'image.version="{__version__}"' in text
    assert workers(build(K8S / "base")).agent["image"] == f"hieravg:{__version__}"


def test_commands_install_the_command(tmp_path: Path) -> None:
    """What the build stage copies and runs, with a folder in place of /opt."""
    source, prefix = tmp_path / "source", tmp_path / "opt"
    source.mkdir()
    stage = stages()[0]
    ignored = (K8S / "image" / "Dockerfile.dockerignore").read_text().splitlines()
    for copied in commands(stage, "COPY"):
        *names, _ = copied.split()
        for name in names:
            # What is copied has to be there for docker, too.
            assert f"!{name}" in ignored
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source)
    empty = tmp_path / "index"
    empty.mkdir()
    variables = {"VARIANT": "cpu", "TORCH_INDEX_URL": empty.as_uri(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # Not compiled, only to save time.
    variables["PIP_NO_COMPILE"] = "1"
    for command in commands(stage, "RUN"):
        done = subprocess.run(
            ["bash", "-euc", command.replace("/opt/hieravg", str(prefix))],
            cwd=source,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("hieravg ")
    plan = subprocess.run(
        [prefix / "bin" / "hieravg", "plan", "--hierarchy", "global=8", "--node", "a:2"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert plan.stdout.startswith("generation 1: 2 ranks on 1 node")
    # Torch is there, of the variant that was asked for; the tools that installed it are not.
    installed = {path.name for path in (prefix / "lib").glob("python3*/site-packages/*.dist-info")}
    assert [name for name in installed if re.fullmatch(r"torch-[\d.]+\+cpu\.dist-info", name)]
    assert not [name for name in installed if name.startswith(("pip-", "setuptools-"))]
    shutil.rmtree(prefix)


def test_the_bases_script_trains(tmp_path: Path) -> None:
    hieravg = Path(sys.executable).with_name("hieravg")
    run = [str(hieravg), "run", "--standalone", "--nproc-per-node=2", "--metrics-port=off"]
    trained = subprocess.run(
        [*run, str(K8S / "base" / "train.py"), f"--steps={STEPS}", "--step-s=0"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    # The first loop that ends asks for one more round of all, and both end with it.
    made = [int(steps) for steps in re.findall(r"done after (\d+) steps", trained.stdout)]
    assert len(made) == 2
    assert min(made) >= STEPS
