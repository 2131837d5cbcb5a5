"""Flags and files: what is read, and what is refused."""

from pathlib import Path

import pytest

from elastic_hieravg.config import (
    NODES_FILE_BYTES_MAX,
    read_node,
    read_nodes,
    read_nodes_file,
    read_params,
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
    with pytest.raises(UsageError, match="is not a number of parameters"):
        read_params(text)
