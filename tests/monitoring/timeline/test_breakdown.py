from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.monitoring.timeline.breakdown import Part, breakdowns, comings
from coordd.monitoring.timeline.journal import Journal, Operation, Wait
from coordd.monitoring.timeline.steps import Step


def operation(key, come, queued, landed):
    return Operation(key, "ALLREDUCE", (key,), 8, come, queued, queued, landed)


def journal(rank, operations, waits=()):
    found = Journal(rank, ())
    found.operations = sorted(operations, key=lambda one: one.come)
    found.waits = [Wait(*wait) for wait in sorted(waits)]
    return found


def parts(found):
    return {part: found.spent(part) for part in Part}


def test_a_wait_is_divided_at_the_coming_of_the_last_and_the_agreement():
    ready = journal(0, [operation("g", 2.0, 6.0, 9.0)], [(3.0, 10.0)])
    late = journal(1, [operation("g", 5.0, 6.5, 9.0)])
    (found,) = breakdowns(ready, [Step("g", 0.0, 11.0)], comings([ready, late]))
    spent = {Part.COMPUTE: 4.0, Part.LATE: 2.0, Part.NEGOTIATION: 1.5, Part.TRANSFER: 2.5, Part.REST: 1.0}
    assert parts(found) == pytest.approx(spent)
    assert found.exposed == pytest.approx(7.0)
    assert [piece.culprit for piece in found.pieces if piece.part is Part.LATE and piece.spans] == [1]


def test_who_is_last_waits_for_nobody():
    ready = journal(0, [operation("g", 2.0, 6.0, 9.0)])
    late = journal(1, [operation("g", 5.0, 6.0, 9.0)], [(5.0, 9.0)])
    (found,) = breakdowns(late, [Step("g", 0.0, 9.0)], comings([ready, late]))
    assert parts(found)[Part.LATE] == 0.0
    assert parts(found)[Part.NEGOTIATION] == pytest.approx(1.0)


def test_data_that_moves_hides_a_rank_that_is_late():
    mine = journal(0, [operation("a", 0.0, 0.0, 4.0), operation("b", 1.0, 6.0, 7.0)], [(0.0, 7.0)])
    other = journal(1, [operation("a", 0.0, 0.0, 4.0), operation("b", 6.0, 6.0, 7.0)])
    (found,) = breakdowns(mine, [Step("a", 0.0, 7.0)], comings([mine, other]))
    assert parts(found)[Part.TRANSFER] == pytest.approx(5.0)
    assert parts(found)[Part.LATE] == pytest.approx(2.0)


def test_communication_that_nobody_waits_for_is_not_exposed():
    mine = journal(0, [operation("a", 1.0, 2.0, 8.0)])
    (found,) = breakdowns(mine, [Step("a", 0.0, 10.0)], comings([mine]))
    assert found.spent(Part.COMPUTE) == 10.0
    assert found.exposed == 0.0


def test_a_receive_waits_for_its_sender_and_then_for_the_data():
    mine = journal(0, [operation("m", 1.0, 1.0, 6.0)], [(2.0, 6.0)])
    sender = journal(3, [operation("m", 5.0, 5.0, 5.5)])
    (found,) = breakdowns(mine, [Step("a", 0.0, 6.0)], comings([mine, sender]))
    assert found.spent(Part.LATE) == pytest.approx(3.0)
    assert found.spent(Part.TRANSFER) == pytest.approx(1.0)
    assert found.spent(Part.NEGOTIATION) == 0.0
    assert [piece.culprit for piece in found.pieces if piece.part is Part.LATE] == [3]


def test_a_send_that_was_over_before_its_receiver_came_has_waited_for_nobody():
    sends = [operation("m", 1.0, 1.0, 2.0), operation("n", 3.0, 3.0, 3.5)]
    mine, receiver = journal(0, sends, [(1.0, 4.0)]), journal(1, [operation("m", 9.0, 9.0, 9.5)])
    (found,) = breakdowns(mine, [Step("a", 0.0, 4.0)], comings([mine, receiver]))
    assert found.spent(Part.LATE) == 0.0
    assert found.spent(Part.TRANSFER) == pytest.approx(1.5)


@pytest.mark.parametrize("itself", [False, True], ids=["unknown", "itself"])
def test_a_message_whose_other_end_is_unknown_or_here_is_transfer(itself):
    more = [operation("m", 2.0, 2.0, 3.0)] if itself else []
    mine = journal(0, [operation("m", 1.0, 1.0, 3.0), *more], [(1.0, 3.0)])
    (found,) = breakdowns(mine, [Step("a", 0.0, 4.0)], comings([mine]))
    assert found.spent(Part.TRANSFER) == 2.0


def test_comings_name_the_last_and_how_far_it_was_behind():
    ranks = [journal(rank, [operation("g", come, 9.0, 10.0)]) for rank, come in enumerate([3.0, 8.0, 5.0])]
    assert comings(ranks) == {"g": (1, 8.0, 3.0, 9.0)}
    assert comings(ranks[:1])["g"].rank == -1


MOMENTS = st.floats(0, 100)
OPERATIONS = st.lists(st.tuples(st.integers(0, 5), MOMENTS, MOMENTS, MOMENTS), max_size=12)


@given(OPERATIONS, OPERATIONS, st.lists(st.tuples(MOMENTS, MOMENTS)), st.lists(MOMENTS, min_size=2, max_size=6))
def test_the_parts_of_a_step_add_up_to_it(mine, others, waits, cuts):
    def made(rank, found):
        return journal(rank, [operation(str(key), *sorted(times)) for key, *times in found])

    ranks = [made(0, mine), made(1, others)]
    ranks[0].waits = sorted(Wait(*sorted(wait)) for wait in waits)
    cuts = sorted(cuts)
    steps = [Step("x", since, until) for since, until in pairwise(cuts)]
    for found in breakdowns(ranks[0], steps, comings(ranks)):
        assert sum(parts(found).values()) == pytest.approx(found.seconds, abs=1e-6)
        assert all(spent >= 0 for spent in parts(found).values())
