"""Simulated jobs whose ranks refuse collective calls, or wait for each other: the simulator finds planted bugs."""

from __future__ import annotations

from collections import Counter

import pytest

from coordd_tools.sim.simulation import simulate
from tests.simulation.deadlock_mutants import DEADLOCK_MUTANTS
from tests.simulation.planting import found

ENOUGH = 3000
FIRST = {
    "forgets_a_refused_call_at_once": 17,
    "keeps_a_refused_call_for_ever": 17,
    "never_judges": 3,
    "lets_messages_wait_for_ever": 3,
    "does_not_ask_what_is_under_way": 38,
    "does_not_ask_whether_a_message_has_come": 38,
    "tells_no_rank_who_has_left": 3,
    "forgets_what_ranks_below_a_foreman_have_sent": 285,
    "lets_joins_wait_for_ever": 113,
    "takes_every_two_blocked_ranks_for_a_circle": 22,
    "does_not_tell_that_it_is_blocked_no_more": 24,
    "takes_a_rank_with_threads_for_blocked": 239,
    "lets_a_join_overtake_a_refusal": 688,
    "forgets_a_refused_operation_at_once": 0,
    "keeps_a_refused_operation_for_the_next_round": 0,
    "forgets_a_refused_group_with_its_last_operation": 274,
    "keeps_a_refusal_to_the_process_set_that_it_names": 274,
    "lets_ranks_stay_joined_after_a_refused_join": 65,
    "takes_a_refused_operation_for_the_call_of_all_that_have_none": 285,
    "locks_what_a_rank_has_refused": 93,
    "keeps_an_error_that_no_script_asks_for_after_a_barrier": 740,
}
"""The first seeds that find them; others do, too, but some take long."""


@pytest.mark.parametrize("plant", DEADLOCK_MUTANTS.values(), ids=DEADLOCK_MUTANTS.keys())
def test_a_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert found(range(ENOUGH), FIRST[plant.__name__], run=simulate)


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(100_000, 120_000, 200))
def test_the_invariants_hold_for_many_more_seeds(first):
    for seed in range(first, first + 200):
        simulate(seed)


def test_seeds_have_refusals_verdicts_and_waits_that_are_broken_off():
    seen: Counter[str] = Counter()

    def show(line: str) -> None:
        plan = "coordinator Plan(" in line
        seen["refused"] += plan and "reason='refused it'" not in line and "error='refused it'" in line
        seen["deadlock"] += plan and "attribute='order'" in line
        seen["join"] += plan and "attribute='order'" in line and "(join)" in line
        seen["broken off"] += "breaks its wait off" in line
        seen["receive"] += plan and "Unmatched(" in line and "number=0, error" in line
        seen["send"] += plan and "(send), not received" in line

    for seed in range(200):
        simulate(seed, show=show)
        if all(seen[what] for what in ("refused", "deadlock", "join", "broken off", "receive", "send")):
            return
    pytest.fail(f"{seen}")


def test_a_refusal_that_crosses_a_plan_which_locks_ends_the_lock():
    """Else the others give their words on what is locked, and the rank that has refused never gives one."""
    simulate(200_222)


def test_a_refusal_from_before_ranks_waited_for_each_other_does_not_hit_the_next_operation():
    simulate(9_009_473)


def test_a_join_does_not_complete_a_call_that_its_rank_has_refused_before():
    simulate(1177)
