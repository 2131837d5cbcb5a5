"""What agents write, read back: the same value, or a refusal that says what is wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_hieravg.errors import DocumentError, HierAvgError
from elastic_hieravg.membership.records import (
    Bounds,
    Closing,
    Generation,
    Job,
    Kind,
    Mode,
    NodeRecord,
    NodeState,
    Refusal,
    StoreOffer,
    Suspicion,
    read_bounds,
    read_closing,
    read_generation,
    read_job,
    read_node,
    read_offer,
    read_refusal,
    read_suspicion,
)
from elastic_hieravg.plan import Hierarchy, Node

A, B = Node("a", 2, {"zone": "z1"}, "a0"), Node("b", 1, {}, "b0")
EXAMPLES: list[tuple[Any, Callable[[str], Any]]] = [
    (Job(1, 4, Hierarchy.parse("node=4,global=16"), Mode.RESTART, 10, "strict"), read_job),
    (NodeRecord(A, NodeState.LEAVING, "h1", 4711, seen=7, entered=6), read_node),
    (
        Generation(3, Kind.LOSS, "why", (A, B), {"a": "h1", "b": "h2"}, "d", (1, 3), "hold", "a0"),
        read_generation,
    ),
    (Suspicion("a0", "b", "its process ended"), read_suspicion),
    (Refusal("a0", "two zones"), read_refusal),
    (StoreOffer(3, "h1", 29500), read_offer),
    (Closing(True, "done"), read_closing),
    (Closing(False, "b failed"), read_closing),
    (Bounds(2, 8), read_bounds),
]
each_record = pytest.mark.parametrize(
    ("value", "read"), EXAMPLES, ids=[type(value).__name__ for value, _ in EXAMPLES]
)

texts = st.text(max_size=40)
numbers = st.integers(min_value=-(2**70), max_value=2**70)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
nodes = st.builds(
    Node,
    names,
    st.integers(min_value=1, max_value=1000),
    st.dictionaries(st.sampled_from(["zone", "rack", "a.b/c"]), names, max_size=3),
    texts,
)


@each_record
def test_what_is_written_is_read(value: Any, read: Callable[[str], Any]) -> None:
    assert read(value.to_json()) == value


node_records = st.builds(
    NodeRecord, nodes, st.sampled_from(NodeState), texts, numbers, seen=numbers, entered=numbers, asked=numbers
)
generations = st.builds(
    Generation,
    number=numbers,
    kind=st.sampled_from(Kind),
    reason=texts,
    members=st.lists(nodes, max_size=4).map(tuple),
    addresses=st.just({}),
    digest=texts,
    built=st.lists(numbers, max_size=4).map(tuple),
    hold=texts,
    writer=texts,
).map(lambda made: replace(made, addresses={node.node_id: "10.0.0.1" for node in made.members}))


@given(node_records)
def test_any_node_is_read_as_it_was_written(record: NodeRecord) -> None:
    assert read_node(record.to_json()) == record


@given(generations)
def test_any_generation_is_read_as_it_was_written(generation: Generation) -> None:
    found = read_generation(generation.to_json())
    assert found == generation
    for member in found.members:
        assert found.member(member.node_id) is not None


@each_record
def test_another_version_or_format_is_refused(value: Any, read: Callable[[str], Any]) -> None:
    document = json.loads(value.to_json())
    for changes in ({"version": 2}, {"format": "elastic_hieravg/other"}, {"version": 1.0}, {"version": True}):
        with pytest.raises(DocumentError) as error:
            read(json.dumps(document | changes))
        assert error.value.problems[0].hint


@each_record
def test_unknown_and_missing_fields_are_refused(value: Any, read: Callable[[str], Any]) -> None:
    document = json.loads(value.to_json())
    with pytest.raises(DocumentError, match="surplus"):
        read(json.dumps(document | {"surplus": 1}))
    for name in document:
        left = {key: each for key, each in document.items() if key != name}
        # Texts by name are told as what they are for.
        with pytest.raises(DocumentError, match="one address" if name == "addresses" else name):
            read(json.dumps(left))


@each_record
@pytest.mark.parametrize("wrong", [None, [[]], {"a": 1}, 1.5, True], ids=repr)
def test_wrong_types_are_refused(value: Any, read: Callable[[str], Any], wrong: object) -> None:
    document = json.loads(value.to_json())
    for name in document:
        with pytest.raises(DocumentError):
            read(json.dumps(document | {name: wrong}))


@each_record
@given(text=st.one_of(texts, st.recursive(st.none() | texts, st.lists, max_leaves=5).map(json.dumps)))
def test_what_is_no_record_is_refused(value: Any, read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(DocumentError):
        read(text)


@pytest.mark.parametrize(
    ("value", "changes", "message"),
    [
        (EXAMPLES[0][0], {"nodes_min": 5}, "the minimum of nodes is 5, more than the maximum of 4"),
        (EXAMPLES[0][0], {"nodes_min": 0}, "the minimum of nodes is 0"),
        (EXAMPLES[0][0], {"warmup_steps": -1}, "-1 warm-up steps"),
        (EXAMPLES[0][0], {"hierarchy": "zone"}, "zone"),
        (EXAMPLES[0][0], {"mode": "sideways"}, "the Mode 'sideways'"),
        (EXAMPLES[0][0], {"on_misfit": "cry"}, "another on_misfit"),
        (EXAMPLES[1][0], {"state": "asleep"}, "the NodeState 'asleep'"),
        (EXAMPLES[1][0], {"node": {"node_id": "a/b", "slots": 1}}, "node id 'a/b' is not a name"),
        (EXAMPLES[2][0], {"kind": "odd"}, "the Kind 'odd'"),
        (EXAMPLES[6][0], {"outcome": "maybe"}, "the outcome 'maybe'"),
    ],
)
def test_values_that_cannot_be_are_refused(value: Any, changes: dict[str, object], message: str) -> None:
    read = next(read for example, read in EXAMPLES if example is value)
    with pytest.raises(HierAvgError, match=message) as error:
        read(json.dumps(json.loads(value.to_json()) | changes))
    assert isinstance(error.value, DocumentError)


def test_a_generation_holds_incarnations_not_names() -> None:
    generation: Generation = EXAMPLES[2][0]
    assert generation.lists(A)
    assert not generation.lists(Node("a", 2, {"zone": "z1"}, "a1"))
    assert not generation.lists(Node("c", 1, {}, "c0"))
