"""A plan's schedule, and its document: what is written is read back, anything else is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from elastic_hieravg.errors import DocumentError
from elastic_hieravg.plan import Hierarchy, Node, Plan, Topology, fit

PLAN = fit(
    Hierarchy.parse("node=4,zone=16,global=64"),
    Topology([Node("a", 2, {"zone": "z1"}), Node("b", 2, {"zone": "z1"}), Node("c", 1, {"zone": "z2"})]),
    generation=3,
    warmup_steps=10,
)


@pytest.mark.parametrize(
    ("step", "level"),
    [
        (-1, None),
        (0, None),
        (4, None),
        (10, None),
        (11, None),
        (14, "node"),
        (18, "node"),
        (26, "zone"),
        (74, "global"),
        (75, None),
    ],
)
def test_the_widest_level_is_due_counting_from_the_end_of_warm_up(step: int, level: str | None) -> None:
    due = PLAN.due(step)
    assert (due.name if due else None) == level


def test_warm_up_ends_after_its_last_step() -> None:
    assert [PLAN.is_warmup(step) for step in (1, 10, 11)] == [True, True, False]


def test_next_due_step_during_and_after_warm_up() -> None:
    node, _, last = PLAN.levels
    assert PLAN.next_due_step(node, after_step=0) == 14
    assert PLAN.next_due_step(node, after_step=13) == 14
    assert PLAN.next_due_step(node, after_step=14) == 18
    assert PLAN.next_due_step(last, after_step=14) == 74


def test_group_of_a_rank() -> None:
    assert PLAN.levels[1].group_of(2) == (0, 1, 2, 3)
    with pytest.raises(IndexError, match="rank 5 is in no group of level zone"):
        PLAN.levels[1].group_of(5)


def test_the_digest_is_fixed_for_ever() -> None:
    # A change here breaks jobs whose nodes run two versions: raise VERSION with it.
    assert PLAN.digest == "fbdb53a5712ab7fe84b95977c4c994c34d2ddd632fbb94cce8292510cb406de3"


def test_the_digest_is_of_what_ranks_act_on() -> None:
    hierarchy = Hierarchy.parse("node=4,global=64")
    nodes = [Node("a", 2), Node("b", 2)]
    digest = fit(hierarchy, Topology(nodes)).digest
    assert fit(hierarchy, Topology(nodes), generation=9).digest == digest
    assert fit(hierarchy, Topology([Node("a", 2, {}, "new start"), nodes[1]])).digest == digest
    assert fit(hierarchy, Topology(nodes), warmup_steps=1).digest != digest
    assert fit(hierarchy, Topology([*nodes, Node("c", 1)])).digest != digest
    assert fit(hierarchy, Topology([Node("a", 2, {"zone": "z"}), nodes[1]])).digest != digest
    assert fit(Hierarchy.parse("node=4,global=32"), Topology(nodes)).digest != digest


def _change(document: dict[str, Any], path: tuple[str | int, ...], value: object) -> None:
    *outer, last = path
    target: Any = document
    for key in outer:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        (("version",), 2, "the format elastic_hieravg/plan version 2; this version reads"),
        (("format",), "other", "the format other version 1"),
        (("version",), True, "the plan, version is true, true or false, not a whole number"),
        (("extra",), 1, "the plan has 'extra', which is not known here"),
        (("digest",), ..., "the plan has no 'digest'"),
        (("digest",), "0" * 64, "has the checksum"),
        (("warmup_steps",), 11, "has the checksum"),
        (("generation",), 4, "has the checksum"),
        (("nodes", 0, "incarnation"), "other", "has the checksum"),
        (("generation",), -1, "has the generation -1"),
        (("levels", 1, "name"), "node", "has the levels node, node, global, one of them twice"),
        (("levels", 0, "period_steps"), 16, "has the period 16 at zone, which does not nest"),
        (("levels",), [], "has no level that spans its 5 ranks"),
        (("warmup_steps",), -1, "-1 warm-up steps"),
        (("generation",), "3", 'the plan, generation is "3", text, not a whole number'),
        (("sort_by", 0), 1, "sort_by[0] is 1, a whole number, not text"),
        (("nodes",), {}, "the plan, nodes is {}, an object, not a list"),
        (("nodes",), [], "there are no nodes"),
        (("nodes", 0), "a", 'nodes[0] is "a", text, not an object'),
        (("nodes", 0, "slots"), 0, "node a has 0 slots"),
        (("nodes", 0, "labels", "zone"), None, "nodes[0], labels.zone is null, null, not text"),
        (("nodes", 0, "labels", "zone"), "z9", "does not list its nodes in rank order"),
        (("levels", 0, "name"), ..., "levels[0] has no 'name'"),
        (("levels", 0, "options"), [], "levels[0] has 'options'"),
        (("levels", 0, "period_steps"), 0, "has the period 0 at level node"),
        (("levels", 0, "period_steps"), 5, "has the period 16 at zone, which does not nest"),
        (("levels", 0, "groups", 0), 7, "groups[0] is 7, a whole number, not a list"),
        (("levels", 0, "groups", 0, 0), "0", 'groups[0] is "0", text, not a whole number'),
        (("levels", 0, "groups", 0, 0), 1, "groups at level node that do not partition 5 ranks"),
        (("levels", 0, "groups", 0), [1, 0], "do not partition"),
        (("levels", 0, "groups"), [[2, 3], [0, 1], [4]], "do not partition"),
        (("levels", 0, "groups"), [[], [0, 1], [2, 3], [4]], "do not partition"),
        (("levels", 0, "groups"), [[0, 4], [1, 2], [3]], "lies in two groups of zone"),
        (("levels", 2), ..., "has no level that spans its 5 ranks"),
        (("notes",), [{"level": "node", "kind": "new", "reason": "?"}], "has a note of the kind new"),
        (("notes",), [{"level": "node"}], "notes[0] has no 'kind'"),
        (("nodes", 0, "labels"), "x" * 99, "..., text, not an object"),
    ],
)
def test_rejects_a_document_it_does_not_understand(
    path: tuple[str | int, ...], value: object, found: str
) -> None:
    document = json.loads(PLAN.to_json())
    _change(document, path, value)
    with pytest.raises(DocumentError) as error:
        Plan.from_json(json.dumps(document))
    assert any(found in problem.message for problem in error.value.problems), error.value


@pytest.mark.parametrize(
    "break_text",
    [
        lambda text: text[:-1],
        lambda _: "",
        lambda _: "[" * 100_000,
        lambda _: "[]",
        lambda text: text.replace('"generation":3', '"generation":3,"generation":4'),
        lambda text: text.replace('"generation":3', '"generation":NaN'),
        lambda text: text.replace('"generation":3', f'"generation":{"9" * 5000}'),
    ],
)
def test_rejects_text_that_is_no_document(break_text: Callable[[str], str]) -> None:
    with pytest.raises(DocumentError, match="the plan is"):
        Plan.from_json(break_text(PLAN.to_json()))


def test_labels_and_incarnation_may_be_missing_from_a_node() -> None:
    assert Node.read({"node_id": "a", "slots": 1}, where="here") == Node("a", 1)
