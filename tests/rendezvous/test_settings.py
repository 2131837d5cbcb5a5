"""torchrun's rendezvous flags: what they become, and what is refused, all at once and with a way out."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_hieravg.config import LABEL_VARIABLE, LABELS_VARIABLE, host_name
from elastic_hieravg.errors import UsageError
from elastic_hieravg.membership.etcd_client import EtcdSettings
from elastic_hieravg.membership.records import Mode
from elastic_hieravg.membership.service import LEASE_TTL_S
from elastic_hieravg.rendezvous.handler import create_handler
from elastic_hieravg.rendezvous.settings import (
    IGNORED,
    JOIN_TIMEOUT_S,
    KEYS,
    LAST_CALL_TIMEOUT_S,
    REPLACED,
    Settings,
    address_towards,
    read_settings,
)

SECRET = "correct horse"


def read(**changes: Any) -> Settings:
    flags = {
        "run_id": "job7",
        "endpoint": "127.0.0.1:2379",
        "nodes_min": 2,
        "nodes_max": 4,
        "local_address": None,
        "conf": {},
    }
    return read_settings(**{**flags, **changes})


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{SECRET}\n")
    return path


def test_little_has_to_be_given() -> None:
    settings = read()
    assert settings.run_id == "job7"
    assert settings.etcd == EtcdSettings(("127.0.0.1:2379",))
    assert settings.lease_ttl_s == LEASE_TTL_S
    job = settings.policy.job
    assert (job.nodes_min, job.nodes_max, job.mode) == (2, 4, Mode.RESTART)
    assert settings.policy.pause_s == JOIN_TIMEOUT_S
    assert settings.policy.join_settle_s == LAST_CALL_TIMEOUT_S


def test_every_key_arrives_where_it_belongs(password_file: Path) -> None:
    # torchrun passes everything as text, and adds `timeout` by itself.
    conf = {
        "cacert": "ca.pem",
        "cert": "client.pem",
        "key": "client.key",
        "user": "trainer",
        "password_file": str(password_file),
        "lease_ttl_s": "5",
        "join_timeout": "30.5",
        "last_call_timeout": "0",
        "node_id": "node-7",
    }
    assert sorted(conf) == sorted(KEYS)
    settings = read(conf={**conf, "timeout": 900})
    assert settings.etcd == EtcdSettings(
        ("127.0.0.1:2379",), Path("ca.pem"), Path("client.pem"), Path("client.key"), "trainer", SECRET
    )
    assert settings.lease_ttl_s == 5.0
    assert settings.policy.pause_s == 30.5
    assert settings.policy.join_settle_s == 0.0
    assert settings.candidate.node_id == "node-7"
    assert SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("h1", ("h1:2379",)),
        ("h1:1234", ("h1:1234",)),
        ("h1:1,h2, h3:3 ,", ("h1:1", "h2:2379", "h3:3")),
        ("[::1]", ("[::1]:2379",)),
        ("[fd00::7]:1234,h2", ("[fd00::7]:1234", "h2:2379")),
    ],
)
def test_reads_endpoints(text: str, endpoints: tuple[str, ...]) -> None:
    assert read(endpoint=text, local_address="127.0.0.1").etcd.endpoints == endpoints


@pytest.mark.parametrize(
    "text", ["h1:etcd", "h1:0", "h1:65536", ":2379", "::1", "fd00::7:2379", "http://h1:2379", "https://h1"]
)
def test_rejects_what_is_not_an_endpoint(text: str) -> None:
    with pytest.raises(UsageError, match=r"--rdzv-endpoint has .*\n\nhint: write host:port") as error:
        read(endpoint=text, local_address="127.0.0.1")
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["", " , ,"])
def test_rejects_a_missing_endpoint(text: str) -> None:
    with pytest.raises(UsageError, match="there is no --rdzv-endpoint"):
        read(endpoint=text)


@pytest.mark.parametrize("run_id", ["", "none"])
def test_rejects_a_missing_run_id(run_id: str) -> None:
    # torchrun calls a run "none" that was given no name.
    with pytest.raises(UsageError, match=r"the run id is .*\n\nhint: .*--rdzv-id=job7"):
        read(run_id=run_id)


def test_each_key_is_known_or_replaced_or_ignored() -> None:
    assert not {*KEYS} & {*REPLACED}
    assert not {*KEYS, *REPLACED} & {*IGNORED}


@pytest.mark.parametrize("key", sorted(REPLACED))
def test_rejects_the_keys_of_other_backends_with_what_to_do_instead(key: str) -> None:
    with pytest.raises(UsageError) as error:
        read(conf={key: SECRET})
    (problem,) = error.value.problems
    assert problem.message == f"--rdzv-conf has {key}, which the backend etcd3 does not have"
    assert problem.hint == REPLACED[key]
    assert SECRET not in str(error.value)


def test_rejects_an_unknown_key_with_those_there_are() -> None:
    with pytest.raises(UsageError) as error:
        read(conf={"lease_ttl": "3"})
    (problem,) = error.value.problems
    assert problem.message == "--rdzv-conf has lease_ttl, which is unknown"
    assert all(key in problem.hint for key in KEYS)


@pytest.mark.parametrize(
    ("key", "text", "at_least"),
    [
        ("lease_ttl_s", "1.9", "2"),
        ("lease_ttl_s", "three", "2"),
        ("lease_ttl_s", "nan", "2"),
        ("lease_ttl_s", "inf", "2"),
        ("lease_ttl_s", "", "2"),
        ("join_timeout", "0.5", "1"),
        ("join_timeout", "-3", "1"),
        ("last_call_timeout", "-0.1", "0"),
        ("last_call_timeout", "inf", "0"),
    ],
)
def test_rejects_times_that_are_none(key: str, text: str, at_least: str) -> None:
    with pytest.raises(UsageError) as error:
        read(conf={key: text})
    (problem,) = error.value.problems
    assert problem.message == f"{key} in --rdzv-conf is {text!r}"
    assert problem.hint == f"give a number of seconds, {at_least} or more"


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"cert": "c.pem", "cacert": "ca.pem"}, "--rdzv-conf has cert and no key"),
        ({"key": "c.key", "cacert": "ca.pem"}, "--rdzv-conf has key and no cert"),
        ({"cert": "c.pem", "key": "c.key"}, "--rdzv-conf has cert and no cacert"),
        ({"user": "trainer", "cacert": "ca.pem"}, "--rdzv-conf has user and no password_file"),
        (
            {"user": "trainer", "cacert": "ca.pem", "password_file": ""},
            "--rdzv-conf has user and no password_file",
        ),
    ],
)
def test_rejects_settings_that_contradict_each_other(conf: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        read(conf=conf)
    (problem,) = error.value.problems
    assert problem.message == message
    assert problem.hint


def test_rejects_a_password_without_a_user(password_file: Path) -> None:
    with pytest.raises(UsageError, match="--rdzv-conf has password_file and no user"):
        read(conf={"cacert": "ca.pem", "password_file": str(password_file)})


def test_rejects_a_user_without_tls_and_shows_no_secret(password_file: Path) -> None:
    with pytest.raises(
        UsageError, match=r"and no cacert, without which there is no TLS\n\nhint: give cacert"
    ) as error:
        read(conf={"user": "trainer", "password_file": str(password_file)})
    assert SECRET not in f"{error.value} {error.value!r}"


def test_rejects_a_password_file_that_is_missing_or_empty(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path, message in ((tmp_path / "missing", "cannot be read: No such file"), (empty, "is empty")):
        with pytest.raises(UsageError, match=message):
            read(conf={"cacert": "ca.pem", "user": "trainer", "password_file": str(path)})


@pytest.mark.parametrize(
    ("nodes_min", "nodes_max", "message"),
    [(3, 2, "the minimum of nodes is 3, more than the maximum of 2"), (0, 2, "the minimum of nodes is 0")],
)
def test_rejects_numbers_of_nodes_that_are_none(nodes_min: int, nodes_max: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(nodes_min=nodes_min, nodes_max=nodes_max)


def test_reports_everything_wrong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LABELS_VARIABLE, "zone")
    conf = {"is_host": "1", "ttl": "3", "lease_ttl_s": "0", "join_timeout": "soon", "key": "k.pem"}
    with pytest.raises(UsageError) as error:
        read(run_id="none", endpoint="h1:http", nodes_min=5, conf=conf)
    found = [problem.message for problem in error.value.problems]
    wanted = [
        "--rdzv-conf has is_host",
        "--rdzv-conf has ttl",
        "the run id is 'none'",
        "lease_ttl_s in --rdzv-conf is '0'",
        "join_timeout in --rdzv-conf is 'soon'",
        "--rdzv-endpoint has 'h1:http'",
        "--rdzv-conf has key and no cert",
        "'zone' in 'HIERAVG_LABELS=zone' is not a label",
        "the minimum of nodes is 5",
    ]
    assert len(found) == len(wanted), found
    assert all(message.startswith(start) for message, start in zip(found, wanted, strict=True)), found


def test_takes_the_name_and_the_labels_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LABELS_VARIABLE, "zone=z1,rack=r7")
    candidate = read().candidate
    assert candidate.labels == {"host": host_name(), "zone": "z1", "rack": "r7"}
    assert (candidate.node_id, candidate.may_rename) == (host_name(), True)
    monkeypatch.setenv(LABEL_VARIABLE, "zone=z9,row=4")
    assert read().candidate.labels == {"host": host_name(), "zone": "z1", "rack": "r7", "row": "4"}
    # A name that was given is meant: two nodes of one name are an error, not two names.
    named = read(conf={"node_id": "node-7"}).candidate
    assert (named.node_id, named.may_rename) == ("node-7", False)


@pytest.mark.parametrize("node_id", ["", "a/b", "node 7", "x" * 500])
def test_rejects_a_name_that_is_none(node_id: str) -> None:
    with pytest.raises(UsageError, match=r"is not a name\n\nhint: use 1 to"):
        read(conf={"node_id": node_id})


def test_its_address_is_the_one_given_or_the_one_towards_etcd() -> None:
    assert read(local_address="10.1.2.3").candidate.address == "10.1.2.3"
    assert read(endpoint="127.0.0.1:9").candidate.address == "127.0.0.1"
    assert address_towards("localhost:2379") in ("127.0.0.1", "::1")
    assert address_towards("[::1]:2379") == "::1"


def test_rejects_an_endpoint_that_no_way_leads_to() -> None:
    with pytest.raises(
        UsageError, match=r"--rdzv-endpoint nowhere\.invalid:2379 cannot be found.*\n\nhint: .*--local-addr"
    ):
        read(endpoint="nowhere.invalid")
    # With an address given, nobody has to be asked for the way.
    assert read(endpoint="nowhere.invalid", local_address="127.0.0.1").etcd.endpoints


def test_torch_is_told_of_wrong_settings_with_its_own_kind_of_error() -> None:
    parameters = RendezvousParameters("etcd3", "127.0.0.1:9", "job7", 1, 1, lease_ttl_s="1")
    with pytest.raises(
        ValueError, match=r"lease_ttl_s in --rdzv-conf is '1'\n\nhint: give a number of seconds, 2 or more"
    ):
        create_handler(parameters)
