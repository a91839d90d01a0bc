from __future__ import annotations

import math
import threading

from coordd.ops.event_buffer import Cycle, Deck, Passage, Pause, Tape
from coordd.ops.messages import Kind, Request

REQUEST = Request(Kind.ALLREDUCE, "w", "float32", (3,))
SPOT = (1, 1, 0)


def steps(result=None):
    yield
    return result


def drive(generator):
    for _ in generator:
        pass


def test_a_passage_has_all_its_marks_in_order():
    tape = Tape()
    tape.queued(SPOT)
    tape.mark(SPOT)
    drive(tape.transfer(SPOT, steps()))
    tape.landed(SPOT, [(REQUEST, 0.5)])
    (found,) = tape.drain()
    assert isinstance(found, Passage)
    assert found.spot == SPOT
    assert found.cargo == [(REQUEST, 0.5)]
    assert len(found.marks) == 5
    assert found.marks == sorted(found.marks)
    assert not tape.drain()


def test_what_was_never_submitted_is_there_when_it_is_wanted():
    tape = Tape()
    tape.queued(SPOT)
    tape.landed(SPOT, [(REQUEST, math.inf)])
    (found,) = tape.drain()
    assert found.cargo == [(REQUEST, found.marks[0])]


def test_the_result_of_a_transfer_is_passed_on():
    def whole():
        found.append((yield from Tape().transfer(SPOT, steps(7))))

    found = []
    drive(whole())
    assert found == [7]


def test_what_began_before_the_tape_is_left_out():
    tape = Tape()
    tape.mark(SPOT)
    drive(tape.transfer(SPOT, steps()))
    tape.landed(SPOT, [(REQUEST, 0.5)])
    assert not tape.drain()


def test_what_some_rank_refused_is_left_out():
    tape = Tape()
    tape.queued(SPOT)
    drive(tape.transfer(SPOT, steps(result=False)))
    tape.landed(SPOT, [(REQUEST, 0.5)])
    assert not tape.drain()
    assert not tape._open


def test_a_pause_knows_its_thread():
    tape = Tape()

    def wait():
        over = tape.pause("w")
        over()

    thread = threading.Thread(target=wait, name="loader")
    thread.start()
    thread.join()
    (found,) = tape.drain()
    assert isinstance(found, Pause)
    assert (found.thread, found.name) == ("loader", "w")
    assert found.since <= found.until


def test_cycles_are_noted_only_if_wanted():
    plain, full = Tape(), Tape(cycles=True)
    plain.cycle()
    full.cycle()
    assert not plain.drain()
    assert isinstance(full.drain()[0], Cycle)


def test_a_full_tape_drops_and_counts():
    tape = Tape(cycles=True, most=3)
    for _ in range(5):
        tape.cycle()
    assert tape.dropped == 2
    assert len(tape.drain()) == 3
    tape.cycle()
    assert len(tape.drain()) == 1


def test_half_full_it_is_time_to_write():
    tape = Tape(cycles=True, most=6)
    for _ in range(3):
        tape.cycle()
    assert not tape.filling.is_set()
    tape.cycle()
    assert tape.filling.is_set()
    tape.drain()
    assert not tape.filling.is_set()


def test_a_new_deck_is_empty():
    assert Deck().tape is None
