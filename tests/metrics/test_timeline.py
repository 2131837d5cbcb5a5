"""Where a node's worker time goes: scripted timelines with exact numbers, and the phases of a recovery."""

import pytest

from elastic_hieravg.metrics.catalogue import Cause, Phase
from elastic_hieravg.metrics.recovery import LOSSES_MAX, Recovery
from elastic_hieravg.metrics.timeline import Timeline

START, RECOVERY, AVERAGING, RENDEZVOUS = Cause.START, Cause.RECOVERY, Cause.AVERAGING, Cause.RENDEZVOUS


def test_every_second_has_its_place_across_a_restart() -> None:
    """One slot, from second 100 on.

    100 the node begins; 110 a worker says its first word; until 115 it loads its model and waits 2 s to be
    taken in; until 200 it trains, 8 s of that in rounds; 200 it is killed, its last report is of 195; 207 the
    next one is there, waits 3 s, and trains until 250.
    """
    timeline = Timeline(100.0, slots=1)
    assert timeline.goodput(100.0) == 0.0
    assert timeline.own(105.0) == {START: 5.0}
    timeline.came(110.0, slot=0)
    timeline.told(112.0, slot=0, productive_s=0.0, badput_s={START: 2.0}, num_steps=0)
    told = {START: 3.0, RENDEZVOUS: 2.0, AVERAGING: 7.5}
    timeline.told(195.0, slot=0, productive_s=72.5, badput_s=told, num_steps=700)
    assert timeline.own(199.0) == {START: 10.0}
    assert timeline.goodput(200.0) == 72.5 / 100
    timeline.gone(200.0, slot=0)
    # The steps after the last report are lost.
    assert timeline.own(200.0) == {START: 10.0, RECOVERY: 5.0}
    assert timeline.own(203.0) == {START: 10.0, RECOVERY: 8.0}
    timeline.came(207.0, slot=0)
    assert timeline.own(230.0) == {START: 10.0, RECOVERY: 12.0}
    again = {RENDEZVOUS: 3.0, AVERAGING: 4.0}
    timeline.told(250.0, slot=0, productive_s=36.0, badput_s=again, num_steps=350)
    assert timeline.productive_s() == 108.5
    assert timeline.wall_s(250.0) == 150.0
    assert timeline.goodput(250.0) == 108.5 / 150
    # Every second of the 150 is somewhere.
    everything = timeline.productive_s() + sum(timeline.own(250.0).values())
    assert everything + sum(told.values()) + sum(again.values()) == 150.0


def test_slots_are_added_up() -> None:
    timeline = Timeline(0.0, slots=2)
    timeline.came(2.0, slot=0)
    timeline.came(4.0, slot=1)
    timeline.told(10.0, slot=0, productive_s=8.0, badput_s={}, num_steps=8)
    timeline.told(10.0, slot=1, productive_s=3.0, badput_s={AVERAGING: 3.0}, num_steps=3)
    assert timeline.own(10.0) == {START: 6.0}
    assert timeline.goodput(10.0) == 11.0 / 20.0


def test_until_the_first_step_it_is_a_start_however_often_it_is_tried() -> None:
    timeline = Timeline(0.0, slots=1)
    for begin_s in (0.0, 10.0, 20.0):
        timeline.came(begin_s + 3.0, slot=0)
        timeline.told(begin_s + 5.0, slot=0, productive_s=0.0, badput_s={}, num_steps=0)
        timeline.gone(begin_s + 10.0, slot=0)
    assert timeline.own(30.0) == {START: 30.0}


def test_time_after_the_training_loop_is_no_part_of_it() -> None:
    timeline = Timeline(0.0, slots=1)
    timeline.came(0.0, slot=0)
    timeline.told(10.0, slot=0, productive_s=10.0, badput_s={}, num_steps=10)
    timeline.done(10.0, slot=0)
    assert timeline.goodput(50.0) == 1.0
    timeline.gone(40.0, slot=0)
    assert sum(timeline.own(50.0).values()) == 0.0
    assert timeline.goodput(50.0) == 1.0
    # Another worker of the node died after all, and everybody starts anew.
    timeline.came(60.0, slot=0)
    assert timeline.own(60.0)[RECOVERY] == 50.0
    assert timeline.goodput(60.0) == 10.0 / 60.0


@pytest.mark.parametrize("productive_s", [5.0, 500.0])
def test_no_more_time_is_counted_than_there_was(productive_s: float) -> None:
    timeline = Timeline(0.0, slots=1)
    timeline.came(0.0, slot=0)
    timeline.told(5.0, slot=0, productive_s=productive_s, badput_s={}, num_steps=1)
    assert timeline.goodput(5.0) == 1.0
    timeline.gone(5.0, slot=0)
    assert sum(timeline.own(5.0).values()) == 0.0


def test_a_worker_that_comes_takes_the_place_of_one_that_did_not_say_goodbye() -> None:
    timeline = Timeline(0.0, slots=1)
    timeline.came(1.0, slot=0)
    timeline.told(5.0, slot=0, productive_s=4.0, badput_s={}, num_steps=4)
    timeline.came(8.0, slot=0)
    assert timeline.own(8.0) == {START: 1.0, RECOVERY: 3.0}
    timeline.gone(8.0, slot=0)
    timeline.gone(9.0, slot=0)
    assert timeline.own(9.0) == {START: 1.0, RECOVERY: 4.0}


# --- recovery -------------------------------------------------------------------------------------------------


def test_phases_of_a_recovery_follow_each_other() -> None:
    recovery = Recovery()
    assert recovery.lost("b1", since_s=10.5, last_sign_s=10.0) == [(Phase.DETECT, 0.5)]
    assert recovery.lost("b1", since_s=10.5, last_sign_s=10.0) == [], "told once"
    assert recovery.adopted(10.75, number=7, members={"a1"}) == [(Phase.REPLAN, 0.25)]
    assert recovery.committed(10.8, number=7) == [], "nobody has entered"
    assert recovery.entered(10.9, number=6) == [], "another generation"
    assert recovery.entered(11.75, number=7) == [(Phase.REGROUP, 1.0)]
    assert recovery.entered(11.8, number=7) == []
    assert recovery.committed(11.7, number=7) == [], "that round was before"
    assert recovery.committed(12.0, number=6) == []
    assert recovery.committed(12.25, number=8) == [(Phase.FIRST_ROUND, 0.5)]
    assert recovery.committed(13.0, number=8) == []


def test_a_rack_that_is_lost_is_one_change() -> None:
    recovery = Recovery()
    recovery.lost("b1", since_s=10.0, last_sign_s=None)
    recovery.lost("c1", since_s=11.0, last_sign_s=None)
    recovery.lost("d1", since_s=12.0, last_sign_s=None)
    # d's loss came too late for this one.
    assert recovery.adopted(12.0, number=2, members={"a1", "d1"}) == [(Phase.REPLAN, 2.0)]
    assert recovery.adopted(14.0, number=3, members={"a1"}) == [(Phase.REPLAN, 2.0)]
    assert recovery.entered(15.0, number=3) == [(Phase.REGROUP, 3.0)]


def test_growth_is_no_recovery() -> None:
    recovery = Recovery()
    assert recovery.adopted(1.0, number=1, members={"a1"}) == []
    assert recovery.entered(2.0, number=1) == []
    assert recovery.committed(3.0, number=1) == []


def test_own_workers_that_die_end_it() -> None:
    recovery = Recovery()
    recovery.lost("b1", since_s=0.5, last_sign_s=None)
    recovery.adopted(1.0, number=2, members={"a1"})
    recovery.forget()
    assert recovery.entered(2.0, number=2) == []


def test_who_speaks_up_was_not_lost() -> None:
    recovery = Recovery()
    recovery.lost("b1", since_s=0.5, last_sign_s=None)
    recovery.spoke_up({"a1", "b1"})
    # Long after that it leaves.
    assert recovery.adopted(100.0, number=2, members={"a1"}) == []
    assert recovery.entered(101.0, number=2) == []


def test_losses_that_are_known_are_bounded() -> None:
    recovery = Recovery()
    for number in range(2 * LOSSES_MAX):
        recovery.lost(str(number), since_s=float(number), last_sign_s=None)
    assert len(recovery._evidence) == LOSSES_MAX
