from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.monitoring.timeline.scribe import Scribe
from coordd.ops.event_buffer import Cycle, Delivery, Passage, Pause
from coordd.ops.messages import Kind, Request
from tests.monitoring.timeline.recorded import events

REQUEST = Request(Kind.ALLREDUCE, "w", "float32", (3,))


def spans(found):
    return [event for event in found if event.ph == "X"]


def test_the_phases_of_a_tensor_follow_each_other():
    passage = Passage((7, 7, 112), [1.0, 2.0, 4.0, 7.0, 11.0], [(REQUEST, 0.5)])
    found = spans(events(Scribe(3), passage))
    assert [event.name for event in found] == ["NEGOTIATE", "QUEUE", "FUSE", "ALLREDUCE", "UNFUSE"]
    assert [event.ts for event in found] == [0.5e6, 1e6, 2e6, 4e6, 7e6]
    assert [event.dur for event in found] == [0.5e6, 1e6, 2e6, 3e6, 4e6]
    assert {event.pid for event in found} == {3}
    assert found[3].args == {"op": "7:7:112", "bytes": 12, "dtype": "float32", "shape": [3]}
    assert found[4].args == {"op": "7:7:112", "of": 1}


def test_a_barrier_moves_nothing_and_has_all_phases():
    barrier = Request(Kind.BARRIER, "barrier.noname.0", transient=True)
    found = spans(events(Scribe(0), Passage((1,), [1.0, 2.0, 3.0], [(barrier, 0.5)])))
    assert [event.name for event in found] == ["NEGOTIATE", "QUEUE", "FUSE", "BARRIER", "UNFUSE"]
    assert [event.dur for event in found] == [0.5e6, 1e6, 1e6, 0.0, 0.0]


def test_rows_have_names_once():
    scribe = Scribe(0)
    found = events(scribe, *(Pause("main", "w", number, number + 0.5) for number in range(3)))
    assert [event.args["name"] for event in found if event.name == "thread_name"] == ["waits of main"]
    assert len(spans(found)) == 3


def test_a_cycle_is_an_instant():
    (event,) = (event for event in events(Scribe(0), Cycle(2.5)) if event.ph != "M")
    assert (event.name, event.ph, event.ts, event.s) == ("CYCLE", "i", 2.5e6, "t")


def test_a_send_is_one_event():
    (event,) = spans(events(Scribe(0), Delivery("send", "act", 1, (0, 7), 64, 1.0, 3.0)))
    assert (event.name, event.dur, event.args) == ("SEND", 2e6, {"op": "message 0:7", "peer": 1, "bytes": 64})


def test_names_that_come_once_do_not_grow_rows():
    scribe = Scribe(0)
    for number in range(5000):
        request = Request(Kind.ALLREDUCE, f"x{number}", "float32", (3,))
        scribe.lines(Passage((number,), [number, number, number, number, number], [(request, number)]))
    assert scribe._tids <= 4097


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1), st.booleans())
def test_nothing_overlaps_in_a_row(times, transient):
    scribe = Scribe(0)
    rows = {}
    for since, until in sorted((sorted(pair) for pair in times), key=lambda pair: pair[1]):  # as they end
        request = Request(Kind.ALLGATHER, "x", "float32", (3,), transient=transient)
        passage = Passage((1,), [since, since, since, until, until], [(request, since)])
        for event in spans(events(scribe, passage)):
            rows.setdefault(event.tid, []).append((event.ts, event.ts + event.dur))
    for row in rows.values():
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(row))


@pytest.mark.parametrize("name", ["\udcff", "a\nb\0", "é" * 400])
def test_any_thread_can_be_told(name):
    assert len(spans(events(Scribe(0), Pause(name, "w", 0.0, 1.0)))) == 1
