from __future__ import annotations

import pytest

from coordd.monitoring.timeline.journal import Journal
from coordd.monitoring.timeline.scribe import Scribe
from coordd.ops.event_buffer import Cycle, Delivery, Passage, Pause
from coordd.ops.messages import Kind, Request
from tests.monitoring.timeline.recorded import BEGIN, events, passage, training


def journal(*items):
    return Journal(1, events(Scribe(1), *items))


def test_tensors_that_travelled_together_are_one_operation():
    (found,) = journal(passage(5, 2.0, queued=3.0, landed=4.0)).operations
    assert found.key == "5:5"
    assert found.kind == "ALLREDUCE"
    assert found.names == ("g0", "g1")
    assert found.nbytes == 2_000_000
    assert (found.come, found.queued, found.landed) == pytest.approx((2.0, 3.0, 4.0))
    assert found.moving == pytest.approx(3.0002)


def test_operations_are_in_the_order_in_which_they_came():
    found = journal(passage(2, 5.0, landed=6.0), passage(1, 1.0, landed=9.0)).operations
    assert [one.key for one in found] == ["1:1", "2:2"]


def test_an_operation_that_is_cut_off_does_not_count():
    told = events(Scribe(0), *(passage(number, number + 1.0, landed=number + 2) for number in range(2)))
    for missing in range(1, 6):
        assert [one.key for one in Journal(0, told[:-missing]).operations] == ["0:0"]
    later = [event for event in told if event.name != "NEGOTIATE" or event.args["op"] != "0:0"]
    assert [one.key for one in Journal(0, later).operations] == ["1:1"]


def test_a_send_has_the_key_of_its_receive_and_cycles_are_no_operations():
    (found,) = journal(Delivery("recv", "act", 0, (0, 7), 64, 1.0, 3.0), Cycle(2.0)).operations
    (sent,) = journal(Delivery("send", "act", 1, (0, 7), 64, 0.5, 1.5)).operations
    assert found.key == sent.key
    assert found.key not in {one.key for one in journal(passage(7, 2.0, landed=4.0)).operations}
    assert (found.kind, found.names, found.nbytes) == ("RECV", ("act",), 64)
    assert (found.come, found.landed) == (1.0, 3.0)


def test_the_main_thread_is_the_one_that_waits_most_often():
    found = journal(Pause("loader", "x", 0.0, 99.0), Pause("main", "y", 1.0, 1.5), Pause("main", "y", 2.0, 3.0))
    assert found.waits == [(1.0, 1.5), (2.0, 3.0)]


def test_a_rank_without_waits_has_none():
    assert journal(passage(1, 1.0, landed=2.0)).waits == []


def test_a_barrier_is_an_operation_of_no_bytes():
    barrier = Request(Kind.BARRIER, "b", shape=(0,), transient=True)
    (found,) = journal(Passage((1,), [1.0, 2.0, 3.0], [(barrier, 0.5)])).operations
    assert (found.kind, found.nbytes, found.landed) == ("BARRIER", 0, 3.0)


def test_a_whole_training_is_read():
    found = journal(*training(1, steps=4))
    assert [one.come for one in found.operations] == pytest.approx([BEGIN + 0.1 * step + 0.06 for step in range(4)])
    assert len(found.waits) == 4
