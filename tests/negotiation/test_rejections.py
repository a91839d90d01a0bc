"""How long the coordinator remembers a call that a rank has refused."""

from __future__ import annotations

from coordd.negotiation.rejections import Refusals, RefusedParts
from coordd.ops.messages import Refused


def test_a_refused_call_is_forgotten_when_the_last_member_has_left_it_or_the_job():
    refusals = Refusals()
    assert refusals.enter(Refused(0, "7", "bad"), 0b111, 0)
    assert not refusals.enter(Refused(1, "7", "told"), 0b111, 0)
    assert "7" in refusals
    refusals.leave(0b100)
    assert not refusals


def test_ranks_that_have_left_before_are_not_waited_for():
    refusals = Refusals()
    assert refusals.enter(Refused(0, "7", "bad"), 0b111, 0b110)
    assert not refusals


def test_a_refused_group_is_forgotten_when_each_rank_has_announced_all_of_its_own_in_any_order():
    parts = RefusedParts(0b111)
    said = Refused(0, "", "refused it", (), ("g_*",))
    parts.enter(said, "g_*", 0b111, 0b110, {"g_1of2": 0b010}, before={})
    assert parts.claim("g_2of3", (), 0b100) == [(said, 0b100)]
    assert parts.claim("g_0of2", (), 0b010) == [(said, 0b010)]
    assert parts.claim("g_0of2", (), 0b010) == []  # the next group of this name
    assert parts.claim("g_0of3", (), 0b100) == [(said, 0b100)]
    assert parts
    assert parts.claim("g_1of3", (), 0b100) == [(said, 0b100)]
    assert not parts


def test_ranks_with_the_error_of_a_deadlock_get_a_refusal_until_they_have_met_the_refusing_rank():
    parts = RefusedParts(0b1111)
    said = Refused(0, "", "refused it", (), ("x",))
    parts.inform(0b0110)
    parts.enter(said, "x", 0b1111, 0b1110, {}, before={})
    parts.meet(0b1111, 5)
    assert parts.claim("x", (), 0b0010) == [(said, 0b0010)]  # submitted before the barrier
    parts.acknowledge(0b1111, 5)
    assert parts.claim("x", (), 0b1100) == [(said, 0b1000)]
    assert not parts


def test_ranks_that_have_met_others_since_the_error_of_a_deadlock_get_refusals_again():
    parts = RefusedParts(0b1111)
    said = Refused(0, "", "refused it", (), ("x",))
    parts.inform(0b110)
    parts.meet(0b110, 4)  # without the refusing rank
    parts.meet(0b111, 5)
    parts.enter(said, "x", 0b111, 0b110, {}, before={})
    parts.meet(0b111, 5)
    assert not parts.expiring(5)
    parts.acknowledge(0b111, 5)
    assert parts.claim("x", (), 0b110) == [(said, 0b110)]
