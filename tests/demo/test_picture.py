"""The demo's picture, judged by what is in it."""

import xml.etree.ElementTree as ET

import pytest

from elastic_hieravg.demo.facts import Kind, find_facts
from elastic_hieravg.demo.picture import BANDS, BLUE, GREEN, ORANGE, draw, ticks
from tests.demo.runs import hurt_run, run_of, worker

SVG = "{http://www.w3.org/2000/svg}"


def drawn() -> ET.Element:
    run = hurt_run()
    return ET.fromstring(draw(run, find_facts(run)))


def test_every_fault_is_a_band_with_its_name() -> None:
    picture = drawn()
    fills = [rect.get("fill") for rect in picture.iter(f"{SVG}rect")]
    assert [fill for fill in fills if fill in BANDS.values()] == [BANDS[kind] for kind in Kind]
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    for told in ("a killed", "b frozen", "c joined", "a asked to leave"):
        assert told in texts
    assert "steps lost by survivors: 0; restarts of survivors: 0; replicas identical: yes" in texts


def test_lines_fall_and_rise_where_the_run_does() -> None:
    picture = drawn()
    lines = {
        str(line.get("stroke")): [
            tuple(map(float, pair.split(","))) for pair in str(line.get("points")).split()
        ]
        for line in picture.iter(f"{SVG}polyline")
    }
    loss = lines[BLUE]
    # Down is up in a picture: a loss that falls goes to larger numbers, from left to right.
    assert loss == sorted(loss)
    assert loss[0][1] < loss[-1][1]
    assert len(lines[ORANGE]) > 10
    assert all(0 <= x <= float(str(picture.get("width"))) for points in lines.values() for x, _ in points)


def test_a_node_that_makes_no_steps_has_a_hole_in_its_lane() -> None:
    picture = drawn()
    lanes = [rect for rect in picture.iter(f"{SVG}rect") if rect.get("fill") == GREEN]
    # a and b stood still once, c and d did not.
    assert len(lanes) == 2 + 2 + 1 + 1
    assert {f"node {name}" for name in "abcd"} <= {text.text for text in picture.iter(f"{SVG}text")}


def test_the_same_run_gives_the_same_picture_on_a_light_background() -> None:
    run = hurt_run()
    assert draw(run, find_facts(run)) == draw(hurt_run(), find_facts(hurt_run()))
    first = next(drawn().iter(f"{SVG}rect"))
    assert (first.get("fill"), first.get("width")) == ("#ffffff", drawn().get("width"))


def test_names_do_not_become_markup() -> None:
    run = run_of(worker("<a>&", 1, range(1, 101)), worker("b", 2, range(1, 101)))
    assert "node <a>&" in [text.text for text in ET.fromstring(draw(run, find_facts(run))).iter(f"{SVG}text")]


@pytest.mark.parametrize("high", [0.3, 1.0, 4.9, 63.0, 120.0, 3600.0])
def test_ticks_are_few_and_inside(high: float) -> None:
    found = ticks(high)
    assert 2 <= len(found) <= 11
    assert found[0] == 0.0
    assert found[-1] <= high
