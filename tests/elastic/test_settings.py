"""What `hieravg run` was told: tables of what is read, and of what is refused, all at once."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from elastic_hieravg.agent.settings import Embedded, RunSettings, read_run_settings
from elastic_hieravg.errors import UsageError
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.records import Mode
from elastic_hieravg.plan import Hierarchy

FLAGS = {
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "127.0.0.1:29500",
    "rdzv_id": "job7",
    "standalone": False,
    "local_addr": None,
    "hierarchy": "node=4,global=16",
    "membership": "in-place",
    "on_misfit": "repair",
    "node_id": None,
    "lease_ttl_s": "3",
    "hang_timeout_s": None,
    "grace_s": "25",
    "warmup_steps": "0",
    "warm": None,
    "label": [],
    "nnodes_file": None,
    "metrics_port": None,
    "metrics_host": None,
}


def read(conf: dict[str, str] | None = None, *, nodes_max: int = 4, **flags: Any) -> RunSettings:
    return read_run_settings(
        Namespace(**FLAGS | flags), nodes_min=1, nodes_max=nodes_max, slots=2, conf=conf or {}
    )


def test_reads_the_defaults() -> None:
    settings = read()
    assert settings.run_id == "job7"
    assert settings.store == Embedded("127.0.0.1", 29500)
    assert settings.policy.job.hierarchy == Hierarchy.parse("node=4,global=16")
    assert settings.policy.job.mode is Mode.IN_PLACE
    assert (settings.lease_ttl_s, settings.grace_s, settings.hang_timeout_s) == (3.0, 25.0, None)
    assert (settings.candidate.slots, settings.candidate.may_rename) == (2, True)
    assert settings.candidate.address == "127.0.0.1"


def test_a_file_of_bounds_goes_before_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "nnodes"
    path.write_text("2:8\n")
    settings = read(nnodes_file=str(path))
    assert settings.nnodes_file == path
    assert (settings.policy.job.nodes_min, settings.policy.job.nodes_max) == (2, 8)
    assert settings.policy.follows_bounds
    assert not read().policy.follows_bounds


@pytest.mark.parametrize(
    ("content", "flags", "found"),
    [
        ("2-8", {}, "has '2-8'"),
        ("8:2", {}, "the minimum of nodes is 8, more than the maximum of 2"),
        (None, {}, "cannot be read"),
        ("2:8", {"membership": "restart"}, "--nnodes-file cannot be used with --membership restart"),
    ],
)
def test_a_file_of_bounds_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str | None, flags: dict[str, Any], found: str
) -> None:
    path = tmp_path / "nnodes"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=found):
        read(nnodes_file=str(path), **flags)


@pytest.mark.parametrize(
    ("endpoint", "store"),
    [
        ("127.0.0.1", Embedded("127.0.0.1", 29400)),
        ("127.0.0.1:7", Embedded("127.0.0.1", 7)),
        ("[::1]:7", Embedded("::1", 7)),
    ],
)
def test_reads_the_endpoint(endpoint: str, store: Embedded) -> None:
    assert read(rdzv_endpoint=endpoint, local_addr="127.0.0.1").store == store


def test_alone_needs_no_endpoint() -> None:
    assert read(rdzv_endpoint="", nodes_max=1).store == Embedded("127.0.0.1", 0)
    assert read(standalone=True).store == Embedded("127.0.0.1", 0)


def test_every_run_without_a_name_has_another() -> None:
    names = {read(rdzv_id=name, standalone=True).run_id for name in ("none", "", "none")}
    assert len(names) == 3


def test_reads_etcd_and_what_is_said_of_it() -> None:
    settings = read({"last_call_timeout": "2", "join_timeout": "30"}, rdzv_backend="etcd3")
    assert isinstance(settings.store, EtcdSettings)
    assert settings.store.endpoints == ("127.0.0.1:29500",)
    assert (settings.policy.join_settle_s, settings.policy.pause_s) == (2.0, 30.0)


def test_reads_what_a_node_is() -> None:
    settings = read(node_id="a", label=["zone=z1"], hang_timeout_s="7")
    assert (settings.candidate.node_id, settings.candidate.may_rename) == ("a", False)
    assert settings.candidate.labels["zone"] == "z1"
    assert settings.hang_timeout_s == 7.0


def test_every_level_that_is_a_label_has_to_be_one_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIERAVG_LABELS", raising=False)
    with pytest.raises(UsageError, match=r"node a has none; its labels: host=.*, rack=r1") as raised:
        read(hierarchy="node=4,zone=8,region=16,global=32", node_id="a", label=["rack=r1"])
    assert [problem.message.split()[1] for problem in raised.value.problems] == ["region", "zone"]
    for way in ("--label zone=", "HIERAVG_LABELS=zone=", "HIERAVG_LABELS_FILE"):
        assert way in raised.value.problems[1].hint
    # The host's name is a label that every node has.
    read(hierarchy="node=4,zone=8,host=16,global=32", label=["zone=z1"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"rdzv_backend": "static"}, "--rdzv-backend is static"),
        ({"rdzv_endpoint": "host:"}, "--rdzv-endpoint"),
        ({"rdzv_endpoint": ":7"}, "--rdzv-endpoint"),
        ({"rdzv_endpoint": "host:70000"}, "--rdzv-endpoint"),
        ({"rdzv_endpoint": ""}, "--rdzv-endpoint"),
        ({"rdzv_backend": "etcd3", "rdzv_id": "none"}, "no run id"),
        ({"hierarchy": "node=4"}, "global"),
        ({"membership": "both"}, "--membership is both"),
        ({"on_misfit": "maybe"}, "--on-misfit is maybe"),
        ({"warmup_steps": "-1"}, "--warmup-steps"),
        ({"warmup_steps": "many"}, "--warmup-steps"),
        ({"lease_ttl_s": "1"}, "--lease-ttl-s is '1'"),
        ({"grace_s": "-1"}, "--grace-s is '-1'"),
        ({"grace_s": "nan"}, "--grace-s is 'nan'"),
        ({"hang_timeout_s": "0"}, "--hang-timeout-s is '0'"),
        ({"label": ["zone"]}, "zone"),
        ({"label": ["zone=a", "zone=b"]}, "twice"),
        ({"node_id": "a b"}, "a b"),
    ],
)
def test_refuses(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read(**flags)


@pytest.mark.parametrize(
    ("conf", "told"),
    [
        ({"lease_ttl_s": "3"}, "--lease-ttl-s"),
        ({"node_id": "a"}, "--node-id"),
        ({"password": "secret"}, "password_file"),
        ({"wrong": "1"}, "wrong"),
        ({"join_timeout": "soon"}, "join_timeout in --rdzv-conf is 'soon'"),
    ],
)
def test_refuses_rdzv_conf(conf: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read(conf)


def test_tells_everything_at_once() -> None:
    flags: dict[str, Any] = {
        "rdzv_backend": "etcd3",
        "rdzv_id": "",
        "rdzv_endpoint": "",
        "membership": "x",
        "on_misfit": "y",
    }
    wrong: dict[str, Any] = {
        "hierarchy": "node",
        "warmup_steps": "z",
        "grace_s": "soon",
        "label": ["k"],
        "lease_ttl_s": "0",
    }
    with pytest.raises(UsageError) as raised:
        read({"wrong": "1"}, **flags, **wrong)
    told = " ".join(problem.message for problem in raised.value.problems)
    words = [
        "run id",
        "endpoint",
        "--membership",
        "--on-misfit",
        "--warmup-steps",
        "--grace-s",
        "--lease-ttl-s",
    ]
    assert [word for word in [*words, "wrong", "label", "'node'"] if word not in told] == []
