"""Rules of ours about the manifests: safe pods, times that fit into each other, and names the code knows."""

import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from elastic_hieravg import config
from elastic_hieravg.agent import elastic_agent, launch, settings
from elastic_hieravg.agent.settings import RunSettings
from elastic_hieravg.cli import EXIT_USAGE, run
from elastic_hieravg.membership.etcd_client import EtcdSettings
from tests.k8s.manifests import (
    COMPONENTS,
    K8S,
    KUSTOMIZATIONS,
    Object,
    PodTemplate,
    bounds_of,
    build,
    build_with,
    name_of,
    one,
    pods,
    settings_of,
    workers,
)

pytestmark = pytest.mark.needs("kubectl", apt="kubectl (from Kubernetes' own packages; Debian's is too old)")

LABELS = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "part-of")}
VARIABLE = re.compile(r"\$\(([A-Z_]+)\)")


@pytest.fixture(scope="module", params=["everything", *(str(each.relative_to(K8S)) for each in KUSTOMIZATIONS)])
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    if request.param == "everything":
        return build_with(tmp_path_factory.mktemp("k8s") / "overlay", *COMPONENTS)
    return build(K8S / request.param)


def known_variables() -> set[str]:
    """The variables that the agent reads: of torchrun's flags, of ours, and those without a flag."""
    theirs = get_args_parser()
    ours = get_args_parser()
    run._add_flags(ours)
    names = {action.dest for action in theirs._actions}
    added = {action.dest for action in ours._actions} - names
    constants = {
        value for name, value in vars(config).items() if name.endswith("_VARIABLE") and isinstance(value, str)
    }
    return {f"PET_{name.upper()}" for name in names} | {f"HIERAVG_{name.upper()}" for name in added} | constants


# --- pods -----------------------------------------------------------------------------------------------------


def test_pods_are_restricted(objects: list[Object]) -> None:
    """What Kubernetes' pod security standard calls restricted, and a root that is read-only."""
    for pod in pods(objects):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["runAsUser"] >= 1000
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not [volume for volume in pod.spec["volumes"] if "hostPath" in volume]
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not [port for port in container.get("ports", []) if "hostPort" in port]


def test_images_have_a_version(objects: list[Object]) -> None:
    for pod in pods(objects):
        for container in pod.containers:
            _, _, tag = container["image"].partition(":")
            assert tag
            assert not tag.startswith("latest")


def test_containers_say_what_they_need(objects: list[Object]) -> None:
    for pod in pods(objects):
        for container in pod.containers:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys()
            # No limit on CPU: it would slow steps down that have cores to run on.
            assert "memory" in resources["limits"]
            assert "cpu" not in resources["limits"]


def test_only_the_init_step_sees_a_token(objects: list[Object]) -> None:
    assert one(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    for pod in pods(objects):
        tokens = {
            volume["name"]
            for volume in pod.spec["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        }
        for container in pod.spec["containers"]:
            assert not tokens & {mount["name"] for mount in container["volumeMounts"]}


def test_every_mount_has_a_volume_and_every_volume_a_mount(objects: list[Object]) -> None:
    claims = {"data"}
    for pod in pods(objects):
        mounted = {mount["name"] for each in pod.containers for mount in each["volumeMounts"]}
        assert mounted - claims == {volume["name"] for volume in pod.spec["volumes"]}


def test_what_is_mounted_from_the_cluster_is_there(objects: list[Object]) -> None:
    """ConfigMaps by name; Secrets are made by certificates.sh."""
    maps = {thing["metadata"]["name"] for thing in objects if thing["kind"] == "ConfigMap"}
    secrets = set(re.findall(r"^secret (\S+)", (K8S / "components/etcd/certificates.sh").read_text(), re.M))
    for pod in pods(objects):
        for volume in pod.spec["volumes"]:
            assert volume.get("configMap", {}).get("name") in {None, *maps}
            assert volume.get("secret", {}).get("secretName") in {None, *secrets}


# --- workers --------------------------------------------------------------------------------------------------


def test_probes_ask_the_agent(objects: list[Object]) -> None:
    agent = workers(objects).agent
    ports = {port["name"]: port["containerPort"] for port in agent["ports"]}
    assert ports["metrics"] == int(settings_of(objects)["HIERAVG_METRICS_PORT"])
    assert ports["rendezvous"] == settings.DEFAULT_PORT
    for probe, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
        assert agent[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "metrics"}
    # A machine that is busy for a minute is no reason to kill a pod.
    assert agent["livenessProbe"]["periodSeconds"] * agent["livenessProbe"]["failureThreshold"] >= 60


def test_grace_of_the_pod_is_above_the_agents_and_that_above_the_workers(objects: list[Object]) -> None:
    grace_s = float(settings_of(objects)["HIERAVG_GRACE_S"])
    assert workers(objects).spec["terminationGracePeriodSeconds"] > grace_s
    assert grace_s > elastic_agent.LEAVE_S + elastic_agent.STOP_TIMEOUT_S


def test_variables_are_those_the_agent_reads(objects: list[Object]) -> None:
    pod = workers(objects)
    given = settings_of(objects).keys() | pod.environment().keys()
    ours = {name for name in given if name.startswith(("HIERAVG_", "PET_"))}
    assert len(ours) >= 12
    assert ours <= known_variables()


def test_variables_refer_to_earlier_ones(objects: list[Object]) -> None:
    for pod in pods(objects):
        for container in pod.containers:
            known: set[str] = set()
            for each in container.get("env", []):
                assert set(VARIABLE.findall(each.get("value", ""))) <= known
                known.add(each["name"])
            for argument in container.get("args", []):
                assert set(VARIABLE.findall(argument)) <= known


def test_agent_takes_the_settings(
    objects: list[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command, with the variables a pod would have, up to where it would begin."""
    pod = workers(objects)
    variables = filled_in(pod, settings_of(objects), folder=tmp_path)
    if variables["PET_NPROC_PER_NODE"] == "gpu":
        # There is none here.
        variables["PET_NPROC_PER_NODE"] = "8"
    (tmp_path / "nnodes").write_text(one(objects, "ConfigMap", "hieravg-bounds")["data"]["nnodes"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    taken: list[RunSettings] = []

    def take(read: RunSettings, *_: object, **__: object) -> int:
        taken.append(read)
        return 0

    monkeypatch.setattr(launch, "launch", take)
    script = tmp_path / "train.py"
    script.touch()
    command = [*pod.agent["command"], *pod.agent["args"]]
    assert command[:2] == ["hieravg", "run"]
    # The pod's own script is in a volume, which is not here.
    assert run.main([str(script) if each.endswith("/train.py") else each for each in command[2:]]) == 0
    (read,) = taken
    assert (read.policy.job.nodes_min, read.policy.job.nodes_max) == bounds_of(objects)
    assert read.candidate.node_id == variables["HIERAVG_NODE_ID"]
    assert read.candidate.address == "127.0.0.1"
    assert read.candidate.labels["zone"] == "z1"
    assert isinstance(read.store, EtcdSettings) == (variables["PET_RDZV_BACKEND"] == "etcd3")


def filled_in(pod: PodTemplate, given: dict[str, str], *, folder: Path) -> dict[str, str]:
    """A pod's variables as the kubelet would fill them in; files are in one folder."""
    operator = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "hieravg-worker-0:29400", "PET_RDZV_ID": "h"}
    found = given | (operator if "PyTorchJob" in pod.owner else {})
    for each in pod.agent["env"]:
        path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        value = {"status.podIP": "127.0.0.1", None: each.get("value", "")}.get(path, f"x{len(found)}")
        found[each["name"]] = VARIABLE.sub(lambda match: found[match[1]], value)
    (folder / "labels").write_text('topology.kubernetes.io/zone="z1"\n')
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (folder / name).write_text("")
    moved = {name: re.sub(r"/etc/hieravg/\w+/", f"{folder}/", value) for name, value in found.items()}
    return moved | {"HIERAVG_TERMINATION_FILE": str(folder / "message")}


def test_exit_codes_are_those_of_the_agent() -> None:
    policy = one(build(K8S / "base"), "Job")["spec"]["podFailurePolicy"]["rules"]
    values = {rule["action"]: rule["onExitCodes"]["values"] for rule in policy if "onExitCodes" in rule}
    assert values == {
        "FailIndex": [EXIT_USAGE, elastic_agent.EXIT_DO_NOT_RETRY],
        "Ignore": [elastic_agent.EXIT_LEFT],
    }


def test_job_can_be_resized() -> None:
    for folder in (K8S / "base", *sorted((K8S / "overlays").iterdir())):
        objects = build(folder)
        job, (nodes_min, nodes_max) = one(objects, "Job")["spec"], bounds_of(objects)
        # Kubernetes lets both change only together.
        assert job["parallelism"] == job["completions"]
        assert nodes_min <= job["parallelism"] <= nodes_max
        assert job["completionMode"] == "Indexed"
        assert job["podReplacementPolicy"] == "Failed"


def test_other_controllers_have_the_same_bounds(tmp_path: Path) -> None:
    """They have fields of their own for what the bounds say."""
    nodes_min, nodes_max = bounds_of(build(K8S / "base"))
    pytorch = one(build(K8S / "integrations/pytorchjob"), "PyTorchJob")["spec"]
    assert pytorch["elasticPolicy"]["minReplicas"] == nodes_min
    assert pytorch["elasticPolicy"]["maxReplicas"] == pytorch["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert pytorch["elasticPolicy"]["rdzvPort"] == settings.DEFAULT_PORT
    volcano = one(build(K8S / "integrations/volcano"), "Job")["spec"]
    assert (volcano["minAvailable"], volcano["tasks"][0]["replicas"]) == (nodes_min, nodes_max)
    trainer = build(K8S / "integrations/trainjob")
    assert one(trainer, "TrainJob")["spec"]["trainer"]["numNodes"] == nodes_max
    assert one(trainer, "TrainingRuntime")["spec"]["mlPolicy"]["numNodes"] == nodes_max
    kueue = one(build_with(tmp_path / "overlay", K8S / "components/kueue"), "Job")
    assert kueue["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == str(nodes_min)
    assert kueue["spec"]["suspend"] is True


def test_termination_message_is_where_kubernetes_looks(objects: list[Object]) -> None:
    pod = workers(objects)
    assert pod.environment()["HIERAVG_TERMINATION_FILE"] == pod.agent["terminationMessagePath"]


def test_shared_memory_has_a_size_below_the_memory_limit(objects: list[Object]) -> None:
    pod = workers(objects)
    (mount,) = [mount for mount in pod.agent["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    limit = pod.agent["resources"]["limits"]["memory"]
    assert size_of(volume["emptyDir"]["sizeLimit"]) < size_of(limit)


def size_of(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"Ki": 10, "Mi": 20, "Gi": 30}[unit]


# --- around them ----------------------------------------------------------------------------------------------


def test_budget_has_the_minimum_of_the_bounds(objects: list[Object]) -> None:
    """Not a maximum: for the pods of a Job Kubernetes would then allow no eviction at all."""
    spec = one(objects, "PodDisruptionBudget")["spec"]
    assert spec["minAvailable"] == bounds_of(objects)[0]
    assert "maxUnavailable" not in spec


def test_selectors_find_their_pods(objects: list[Object]) -> None:
    found = pods(objects)
    for thing in objects:
        if thing["kind"] not in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
            continue
        spec = thing["spec"]
        selector = spec.get("podSelector", spec.get("selector", {}))
        wanted = selector.get("matchLabels", selector)
        chosen = [pod for pod in found if wanted.items() <= pod.metadata["labels"].items()]
        assert len(chosen) == 1, name_of(thing)


def test_workers_are_reached_by_workers_and_monitoring_only(objects: list[Object]) -> None:
    spec = one(objects, "NetworkPolicy")["spec"]
    among, monitoring = spec["ingress"]
    assert spec["policyTypes"] == ["Ingress"]
    assert among == {"from": [{"podSelector": spec["podSelector"]}]}
    assert [port["port"] for port in monitoring["ports"]] == ["metrics"]


def test_names_in_dns_are_those_of_a_service(objects: list[Object]) -> None:
    pod = workers(objects)
    if pod.owner != "Job/hieravg" or "subdomain" not in pod.spec:
        return
    services = {thing["metadata"]["name"] for thing in objects if thing["kind"] == "Service"}
    assert pod.spec["subdomain"] in services
    for endpoint in pod.environment()["PET_RDZV_ENDPOINT"].split(","):
        assert endpoint.partition(":")[0].rpartition(".")[2] in services
    for name in services:
        assert one(objects, "Service", name)["spec"]["publishNotReadyAddresses"] is True
        assert one(objects, "Service", name)["spec"]["clusterIP"] == "None"


def test_everything_has_the_common_labels(objects: list[Object]) -> None:
    for thing in objects:
        if name_of(thing).split("/")[0] in ("ClusterRole", "ClusterRoleBinding", "PrometheusRule"):
            continue
        if name_of(thing) == "ConfigMap/hieravg-dashboards":
            continue
        assert thing["metadata"].get("labels", {}).keys() >= LABELS - {"app.kubernetes.io/part-of"}, name_of(
            thing
        )
    for pod in pods(objects):
        assert pod.metadata["labels"].keys() >= LABELS


def relabelled(labels: dict[str, str], rules: list[Object]) -> dict[str, str]:
    """Prometheus' relabelling, as far as it is used here."""
    found = dict(labels)
    for rule in rules:
        text = rule.get("separator", ";").join(found.get(name, "") for name in rule["sourceLabels"])
        match = re.fullmatch(rule.get("regex", "(.*)"), text)
        if match:
            found[rule["targetLabel"]] = match.expand(rule.get("replacement", "$1").replace("$", "\\"))
    return found


@pytest.mark.parametrize(
    ("labels", "training_job", "node"),
    [
        (
            {"batch_kubernetes_io_job_name": "j7", "batch_kubernetes_io_job_completion_index": "3"},
            "team/j7",
            "j7-3",
        ),
        ({"app_kubernetes_io_instance": "j8"}, "team/j8", "j8-worker-0"),
    ],
)
def test_scrapes_carry_the_labels_that_dashboards_know(
    tmp_path: Path, labels: dict[str, str], training_job: str, node: str
) -> None:
    objects = build_with(tmp_path / "overlay", K8S / "components" / "monitoring")
    (endpoint,) = one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    meta = {"__meta_kubernetes_namespace": "team", "__meta_kubernetes_pod_name": "j8-worker-0"}
    meta |= {f"__meta_kubernetes_pod_label_{name}": value for name, value in labels.items()}
    found = relabelled(meta, endpoint["relabelings"])
    assert (found["training_job"], found["node"]) == (training_job, node)
    used = set(re.findall(r"by \(([\w, ]+)\)", (K8S.parent / "dashboards" / "rules.yaml").read_text()))
    assert any("training_job" in each for each in used)


def test_an_agent_can_be_told_where_it_is_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third way to a topology: a setting. It beats the labels of the pod."""
    found = config.read_node_labels(environment={config.LABELS_VARIABLE: "zone=z1,rack=r7"})
    assert (found["zone"], found["rack"]) == ("z1", "r7")
