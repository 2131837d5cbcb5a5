"""Flags and files: what is read, and what is refused."""

import os
from pathlib import Path

import pytest

from elastic_hieravg.config import (
    LABELS_FILE_BYTES_MAX,
    NODES_FILE_BYTES_MAX,
    SECRET_BYTES_MAX,
    environment_with,
    host_name,
    read_node,
    read_node_labels,
    read_nodes,
    read_nodes_file,
    read_params,
    read_secret,
)
from elastic_hieravg.errors import InputError, UsageError
from elastic_hieravg.plan import Node


def test_reads_a_node() -> None:
    assert read_node("a:4") == Node("a", 4)
    assert read_node("c:2:zone=z2,rack=r7") == Node("c", 2, {"zone": "z2", "rack": "r7"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "'' is not a node"),
        ("a", "'a' is not a node"),
        ("a:", "'a:' is not a node"),
        (":4", "':4' is not a node"),
        ("a:four", "'a:four' is not a node"),
        ("a:0", "node a has 0 slots"),
        ("a:-2", "node a has -2 slots"),
        ("a:4:", "'' in 'a:4:' is not a label"),
        ("a:4:zone", "'zone' in 'a:4:zone' is not a label"),
        ("a:4:zone=", "'zone=' in 'a:4:zone=' is not a label"),
        ("a:4:=z1", "'=z1' in 'a:4:=z1' is not a label"),
        ("a:4:zone=z1,zone=z2", "'a:4:zone=z1,zone=z2' has the label zone twice: z1 and z2"),
        ("a:4:node=x", "has a label node"),
    ],
)
def test_rejects_what_is_not_a_node(text: str, found: str) -> None:
    with pytest.raises(InputError) as error:
        read_node(text)
    assert found in error.value.problems[0].message


def test_reports_all_wrong_nodes_together() -> None:
    with pytest.raises(UsageError, match="2 problems"):
        read_nodes(["a", "b:2", "c:0"])


def test_reads_a_nodes_file(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text('[{"node_id": "a", "slots": 4, "labels": {"zone": "z1"}}, {"node_id": "b", "slots": 1}]')
    assert read_nodes_file(path) == [Node("a", 4, {"zone": "z1"}), Node("b", 1)]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is not JSON: Expecting value"),
        (b"nodes:\n- a", "is not JSON"),
        (b"\xff\xfe", "is not text"),
        (b'{"node_id": "a", "slots": 4}', "does not hold a list of nodes"),
        (b'["a"]', 'nodes.json, node 1 is "a", text, not an object'),
        (b'[{"node_id": "a"}]', "node 1 has no 'slots'"),
        (b'[{"slots": 1}]', "node 1 has no 'node_id'"),
        (b'[{"node_id": "a", "slots": "4"}]', 'slots is "4", text, not a whole number'),
        (b'[{"node_id": "a", "slots": 1.5}]', "slots is 1.5, a number, not a whole number"),
        (b'[{"node_id": "a", "slots": 1, "zone": "z1"}]', "node 1 has 'zone', which is not known here"),
        (b'[{"node_id": "a", "slots": 1, "labels": ["z1"]}]', 'labels is ["z1"], a list, not an object'),
        (b'[{"node_id": "a", "slots": 0}]', "node a has 0 slots"),
        (b'[{"node_id": "a", "node_id": "b", "slots": 1}]', "the key 'node_id' is written twice"),
    ],
)
def test_rejects_a_nodes_file_that_is_something_else(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_nodes_file(path)
    assert found in error.value.problems[0].message
    assert error.value.problems[0].hint


def test_reports_all_wrong_entries_of_a_nodes_file(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text('[{"node_id": "a"}, {"node_id": "b", "slots": 1}, {"node_id": "c", "slots": 0}]')
    with pytest.raises(UsageError, match="2 problems"):
        read_nodes_file(path)


def test_rejects_a_nodes_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_nodes_file(tmp_path / "missing.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_nodes_file(tmp_path)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(NODES_FILE_BYTES_MAX + 1)
    with pytest.raises(UsageError, match="is larger than"):
        read_nodes_file(huge)


@pytest.mark.parametrize(
    ("text", "params"), [("7", 7), ("350k", 350_000), ("1.3B", 1_300_000_000), ("0.5M", 500_000)]
)
def test_reads_a_number_of_parameters(text: str, params: int) -> None:
    assert read_params(text) == params


@pytest.mark.parametrize("text", ["", "M", "0", "0.0001K", "-3M", "1e6", "125MB", "9999T", "1,000"])
def test_rejects_what_is_not_a_number_of_parameters(text: str) -> None:
    with pytest.raises(UsageError, match="--params is"):
        read_params(text)


# --- labels -------------------------------------------------------------------------------------------------


def labels_file(tmp_path: Path, content: str) -> dict[str, str]:
    """The environment that names a file of labels."""
    path = tmp_path / "labels"
    path.write_text(content)
    return {"HIERAVG_LABELS_FILE": str(path)}


def test_a_node_has_its_host_as_a_label() -> None:
    assert read_node_labels(environment={}) == {"host": host_name()}
    assert read_node_labels(environment={"HIERAVG_LABELS": "", "HIERAVG_LABELS_FILE": ""}) == {
        "host": host_name()
    }


def test_flags_win_over_the_environment_over_the_file_over_the_host(tmp_path: Path) -> None:
    file = labels_file(tmp_path, 'host="file"\nzone="file"\nrack="file"\nrow="file"\n')
    assert read_node_labels(environment=file)["host"] == "file"
    environment = {**file, "HIERAVG_LABELS": "zone=variable,rack=variable,hall=variable"}
    assert read_node_labels(["zone=flag", "floor=flag"], environment=environment) == {
        "host": "file",
        "row": "file",
        "rack": "variable",
        "hall": "variable",
        "zone": "flag",
        "floor": "flag",
    }


def test_labels_come_from_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIERAVG_LABELS", "zone=z7")
    assert read_node_labels()["zone"] == "z7"


def test_a_flag_may_hold_several_labels_and_say_the_same_twice() -> None:
    found = read_node_labels(["zone=z1,rack=r1", "zone=z1"], environment={})
    assert (found["zone"], found["rack"]) == ("z1", "r1")


def test_rejects_a_label_that_is_given_twice() -> None:
    with pytest.raises(UsageError, match=r"--label gives zone twice: z1 and z2\n\nhint: give every label once"):
        read_node_labels(["zone=z1", "zone=z2"], environment={})
    with pytest.raises(UsageError, match="has the label zone twice: z1 and z2"):
        read_node_labels(environment={"HIERAVG_LABELS": "zone=z1,zone=z2"})


@pytest.mark.parametrize("text", ["zone", "zone=", "=z1", "zone=z1,", ",zone=z1"])
def test_rejects_flags_and_variables_that_are_no_labels(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a label\n\nhint: write key=value"):
        read_node_labels([text], environment={})
    with pytest.raises(UsageError, match=r"in 'HIERAVG_LABELS=.*' is not a label"):
        read_node_labels(environment={"HIERAVG_LABELS": text})


@pytest.mark.parametrize(
    ("content", "zone", "region"),
    [
        ('topology.kubernetes.io/zone="eu-1a"\ntopology.kubernetes.io/region="eu-1"\n', "eu-1a", "eu-1"),
        # The file's own words count before Kubernetes'.
        ('zone="z1"\ntopology.kubernetes.io/zone="eu-1a"\n', "z1", None),
        ('topology.kubernetes.io/zone="eu-1a"\nregion="r1"', "eu-1a", "r1"),
        # Kubernetes writes what it does not know as nothing.
        ('topology.kubernetes.io/zone=""\n', None, None),
        # By hand, without quotes, with empty lines and spaces around.
        ("\n  zone=z1  \n\n", "z1", None),
        ("", None, None),
    ],
)
def test_reads_a_file_of_the_downward_api(
    tmp_path: Path, content: str, zone: str | None, region: str | None
) -> None:
    found = read_node_labels(environment=labels_file(tmp_path, content))
    assert (found.get("zone"), found.get("region")) == (zone, region)


def test_keeps_the_labels_that_kubernetes_adds_by_itself(tmp_path: Path) -> None:
    content = 'app.kubernetes.io/name="trainer"\npod-template-hash="5d4f"\n'
    found = read_node_labels(environment=labels_file(tmp_path, content))
    assert found["app.kubernetes.io/name"] == "trainer"
    # All of them can be a node's.
    assert Node("a", 1, found).labels["pod-template-hash"] == "5d4f"


@pytest.mark.parametrize("line", ["zone", '="z1"', 'zone="z1', 'zone="', 'zone="a"b"', 'zone="a\\"b"'])
def test_rejects_lines_that_are_no_labels(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match=r"line 2 of .*labels is .*, not a label\n\nhint: write key=\"value\""):
        read_node_labels(environment=labels_file(tmp_path, f'rack="r1"\n{line}\n'))


def test_rejects_a_file_of_labels_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read: No such file.*\n\nhint: .*file of labels"):
        read_node_labels(environment={"HIERAVG_LABELS_FILE": str(tmp_path / "missing")})
    with pytest.raises(UsageError, match="is larger than"):
        read_node_labels(environment=labels_file(tmp_path, "x" * (LABELS_FILE_BYTES_MAX + 1)))
    (tmp_path / "labels").write_bytes(b"zone=\xff")
    with pytest.raises(UsageError, match="is not text"):
        read_node_labels(environment={"HIERAVG_LABELS_FILE": str(tmp_path / "labels")})


# --- secrets and the environment ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "secret"),
    [("word", "word"), ("word\n", "word"), ("word\r\n", "word"), (" two words \n", " two words "), ("ö", "ö")],
)
def test_reads_a_secret_without_the_end_of_its_line(tmp_path: Path, content: str, secret: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content.encode())
    assert read_secret(path) == secret


def test_rejects_a_secret_that_is_missing_empty_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read: No such file.*\n\nhint: .*file with a password"):
        read_secret(tmp_path / "missing")
    path = tmp_path / "secret"
    for content in ("", "\n"):
        path.write_text(content)
        with pytest.raises(UsageError, match=r"is empty\n\nhint: write the password into it"):
            read_secret(path)
    path.write_text("hunter2" * SECRET_BYTES_MAX)
    with pytest.raises(UsageError, match="is larger than") as error:
        read_secret(path)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("before", [None, "before"])
def test_a_variable_is_there_for_the_time_of_a_block(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "HIERAVG_TEST_VARIABLE"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with environment_with(name, "during"):
        assert os.environ[name] == "during"
    assert os.environ.get(name) == before
    with pytest.raises(ZeroDivisionError), environment_with(name, "during"):
        raise ZeroDivisionError
    assert os.environ.get(name) == before
