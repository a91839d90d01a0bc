"""Joining: who has joined takes part with nothing, in everything, until all have."""

from __future__ import annotations

import math

import numpy as np
import pytest

from coordd.negotiation.absence import Absence
from coordd.negotiation.stand_in import stand_in
from coordd.ops.messages import Kind, ReduceOp, Request
from tests.negotiation.test_worker_lock import A, B, locked, run
from tests.star import Star, allreduce, outcome

JOIN = Request(Kind.JOIN, "join.noname.0", transient=True)


def joined(size: int, *ranks: int) -> Star:
    """A star of which these ranks have joined."""
    star = Star(size)
    for rank in ranks:
        star.submit(rank, JOIN)
    star.settle()
    return star


def test_what_the_others_do_goes_on_without_who_has_joined():
    star = joined(3, 1)
    handles = [star.submit(rank, A) for rank in (0, 2)]
    star.settle()
    assert [outcome(handle) for handle in handles] == ["done", "done"]
    assert not len(star.members[1].table) - 1  # what it has joined for is all that it waits for


def test_all_have_joined_when_the_last_one_has_and_everybody_is_told_who_that_was():
    star = joined(3, 1, 2)
    handles = [star.submit(rank, A) for rank in [0]]
    star.settle()
    handles.append(star.submit(0, JOIN))
    plans = [star.settle() for _ in range(2)]
    [response] = next(plan for plan in plans if plan is not None).responses
    assert response.request.root == 0
    assert {outcome(handle) for handle in handles} == {"done"}
    again = [star.submit(rank, A) for rank in star.ranks]
    star.settle()
    assert {outcome(handle) for handle in again} == {"done"}


def test_what_was_announced_before_others_joined_ends():
    star = Star(2)
    handle = star.submit(0, A)
    star.settle()
    assert outcome(handle) == "pending"
    star.submit(1, JOIN)
    star.settle()
    assert outcome(handle) == "done"


def test_an_allgather_has_no_rows_of_who_has_joined():
    star = joined(3, 0)
    for rank in (1, 2):
        star.submit(rank, Request(Kind.ALLGATHER, "rows", shape=(rank, 4)))
    [response] = star.settle().responses
    assert response.sizes == (0, 1, 2)
    assert response.absent == (0,)


def test_nobody_can_be_sent_something_by_who_has_joined():
    star = joined(3, 1)
    handles = [star.submit(rank, Request(Kind.BROADCAST, "w", shape=(2,), root=1)) for rank in (0, 2)]
    star.settle()
    assert all("rank 1, which has joined" in outcome(handle) for handle in handles)


def test_who_has_joined_a_set_still_takes_part_in_other_sets():
    star = Star(3)
    pair = Request(Kind.JOIN, "join.noname.(0-1).0", members=(0, 1), transient=True)
    star.submit(1, pair)
    alone = star.submit(0, allreduce("w", members=(0, 1)))
    everybody = [star.submit(rank, allreduce("v")) for rank in (0, 2)]
    star.settle()
    assert outcome(alone) == "done"
    assert [outcome(handle) for handle in everybody] == ["pending", "pending"]


def test_who_joins_breaks_the_lock_and_nothing_is_locked_while_somebody_has():
    star = locked(A)
    last = star.submit(0, JOIN)
    star.each(star.report)
    for _ in range(6):
        handle = star.submit(1, A)
        run(star)
        assert outcome(handle) == "done"
    assert not star.coordinator._negotiator._latch.slots
    star.submit(1, JOIN)
    run(star)
    assert outcome(last) == "done"


def test_a_word_that_was_refused_is_announced_before_the_join():
    star = locked(A, B, fusion=1)
    mine = star.submit(0, A)
    star.report(0)
    done = star.submit(0, JOIN)
    star.report(0)
    assert all(told.request.kind is not Kind.JOIN for message in star.up[0] for told in message.fresh)
    others = [star.submit(1, B), star.submit(1, A)]
    star.unlock(1)
    run(star)
    assert [outcome(handle) for handle in (mine, *others)] == ["done"] * 3
    star.submit(1, JOIN)
    run(star)
    assert outcome(done) == "done"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint64", "bool", "complex64"])
@pytest.mark.parametrize("op", ReduceOp)
def test_a_stand_in_changes_no_reduction(dtype, op):
    ordered = dtype != "complex64"
    if op in {ReduceOp.MIN, ReduceOp.MAX} and not ordered:
        return
    entry = stand_in(allreduce("w", 3, dtype=dtype, op=op))
    own = np.array([0, 1, 1]).astype(entry.array.dtype)
    combine = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}.get(op, np.add)
    assert np.array_equal(combine(own, entry.array), own)
    assert entry.patient
    assert entry.handle.submitted == math.inf


def test_a_stand_in_has_no_rows_and_room_for_what_is_sent():
    assert stand_in(Request(Kind.ALLGATHER, "w", shape=(7, 2))).array.shape == (0, 2)
    assert stand_in(Request(Kind.BROADCAST, "w", shape=(7, 2))).array.shape == (7, 2)


def test_absence_holds_for_the_set_and_its_subsets_until_its_end():
    absence = Absence()
    assert not absence
    absence.begin(0b111, 0b010)
    absence.begin(0b111, 0b100)
    assert absence.of(0b110) == 0b110
    assert absence.of(0b1110) == 0
    assert absence.end(0b111) == 2
    assert not absence


def test_a_join_that_fails_ends_the_absence():
    star = Star(3)
    failed = star.submit(0, JOIN)
    star.settle()
    star.leave(2)
    star.settle()
    star.settle()
    assert "ShutdownError" in outcome(failed)
    pair = [star.submit(rank, allreduce("w", members=(0, 1))) for rank in (1,)]
    star.settle()
    assert outcome(pair[0]) == "pending"
    pair.append(star.submit(0, allreduce("w", members=(0, 1))))
    star.settle()
    assert [outcome(handle) for handle in pair] == ["done", "done"]
