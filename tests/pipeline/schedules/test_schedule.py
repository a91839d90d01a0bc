"""The schedules against what their papers say of them, and what is true of all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.pipeline.action import Kind
from coordd.pipeline.schedules.schedule import (
    eager,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    two_buffered,
    zero_bubble,
    zero_bubble_far,
    zero_bubble_far_lean,
    zero_bubble_lean,
    zero_bubble_v,
)
from coordd.pipeline.simulate import Costs, simulate
from tests.pipeline.plans import ALL, FLUSHING, SIZES, STALE, chained


def orders(plan) -> list[str]:
    return [" ".join(map(str, actions)) for actions in plan.actions]


def test_the_figures():
    assert orders(gpipe(2, 2)) == ["0F0 0F1 0B0 0B1 0STEP", "1F0 1F1 1B0 1B1 1STEP"]
    assert orders(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0STEP",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1STEP",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2STEP",
    ]
    assert orders(eager(3, 6))[:2] == [
        "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5 0STEP",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5 1STEP",
    ]
    assert orders(zero_bubble(2, 3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2 0STEP",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 1STEP",
    ]
    assert orders(zero_bubble_far(2, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0STEP",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3 1STEP",
    ]
    assert orders(zero_bubble_lean(2, 4)) == [
        "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 0STEP",
        "1F0 1I0 1F1 1B1 1F2 1B2 1F3 1I3 1W0 1W3 1STEP",
    ]
    assert orders(zero_bubble_far_lean(2, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0STEP",
        "1F0 1I0 1F1 1I1 1F2 1B2 1F3 1I3 1W0 1W1 1W3 1STEP",
    ]
    assert orders(interleaved(2, 2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 0STEP 2STEP",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1STEP 3STEP",
    ]
    assert orders(pipedream(2, 3))[0] == "0F0 0F1 0B0 0STEP0 0F2 0B1 0STEP1 0B2 0STEP2"
    assert orders(two_buffered(2, 2, steps=2))[0] == "0F0 0F1 0B0 0F2 0B1 0STEP0 0F3 0B2 0B3 0STEP1"


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_they_take_as_long_and_keep_as_much_as_their_papers_say(ranks, microbatches):
    def outcome(schedule, **options):
        plan = schedule(ranks, microbatches, **options)
        return simulate(chained(plan), Costs.even(plan.stages))

    ideal, gap = 3 * microbatches, ranks - 1
    assert outcome(gpipe).makespan == ideal + 3 * gap
    assert outcome(gpipe).peaks == (microbatches,) * ranks
    assert outcome(one_f_one_b).makespan == ideal + 3 * gap
    assert outcome(one_f_one_b).peaks == tuple(min(microbatches, ranks - stage) for stage in range(ranks))
    assert outcome(eager).makespan == ideal + 3 * gap
    assert outcome(eager).peaks == tuple(min(microbatches, 2 * (ranks - stage) - 1) for stage in range(ranks))
    for chunks in (2, 3):
        assert outcome(interleaved, chunks=chunks).makespan == ideal * chunks + 3 * gap
    assert outcome(zero_bubble).makespan == ideal + gap
    assert outcome(zero_bubble).peaks == (ranks,) * ranks
    assert outcome(zero_bubble_far).makespan == ideal + gap + max(0, 2 * ranks - 1 - microbatches) // 2
    assert outcome(zero_bubble_far).peaks == (min(microbatches, 2 * ranks - 1),) * ranks
    assert outcome(zero_bubble_lean).makespan == ideal + gap
    assert outcome(zero_bubble_lean).peaks == (ranks,) * ranks
    assert outcome(zero_bubble_far_lean).makespan == outcome(zero_bubble_far).makespan
    assert outcome(zero_bubble_far_lean).peaks == outcome(zero_bubble_far).peaks
    assert outcome(zero_bubble_v).makespan == 2 * ideal + gap
    assert max(outcome(zero_bubble_v).peaks) <= 2 * ranks


@given(passes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), ranks=st.integers(2, 6))
def test_far_ahead_ranks_are_idle_only_until_the_first_microbatch_comes(passes, ranks):
    forward, inward, weight = passes
    costs = Costs.even(ranks, forward=forward, inward=inward, weight=weight)
    microbatches = 4 * ranks
    found = simulate(chained(zero_bubble_far(ranks, microbatches)), costs).makespan
    waits = max(0, inward - 2 * min(forward, weight))
    assert found == microbatches * sum(passes) + (ranks - 1) * (forward + waits)


def test_the_eager_one_waits_for_no_message_that_takes_no_longer_than_a_pass():
    def seconds(schedule, transfer):
        costs = replace(Costs.even(4), transfer={(stage, stage + 1): transfer for stage in range(3)})
        return simulate(chained(schedule(4, 16)), costs).makespan

    there_and_back = 2 * 3
    assert seconds(eager, 1.0) == seconds(eager, 0.0) + there_and_back
    assert seconds(one_f_one_b, 1.0) > seconds(eager, 1.0) + 16


@given(passes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), ranks=st.integers(2, 6))
def test_with_few_split_passes_zb_h2_takes_as_long_if_those_for_inputs_are_no_longer_than_those_for_weights(
    passes, ranks
):
    forward, inward, weight = passes
    costs = Costs.even(ranks, forward=forward, inward=min(inward, weight), weight=weight)
    lean, far = (
        simulate(chained(schedule(ranks, 4 * ranks)), costs).makespan
        for schedule in (zero_bubble_far_lean, zero_bubble_far)
    )
    assert lean == far


@pytest.mark.parametrize("microbatches", [8, 16, 64])
@pytest.mark.parametrize(("schedule", "most"), [(zero_bubble_lean, 1), (zero_bubble_far_lean, 2)])
def test_a_lean_zero_bubble_splits_as_many_passes_whatever_the_number_of_microbatches(schedule, most, microbatches):
    plan = schedule(4, microbatches)
    split = sum(action.kind is Kind.INPUT for mine in plan.actions for action in mine)
    assert split == sum(min(microbatches, most * stage + 3) for stage in (1, 2, 3))
    assert [len(halved) for halved in plan.halved] == [0, *(min(microbatches, most * s + 3) for s in (1, 2, 3))]


@pytest.mark.parametrize(
    ("schedule", "costs", "makespan", "bubble", "peak"),
    [
        (gpipe(4, 8), 1, 33, 27.3, 8),
        (one_f_one_b(4, 16), 1, 57, 15.8, 4),
        (interleaved(4, 8), 2, 28.5, 15.8, 5.5),
        (interleaved(4, 16, chunks=4), 4, 50.25, 4.5, 4.75),
        (zero_bubble(4, 32), 1, 99, 3.0, 4),
        (zero_bubble_v(4, 16), 2, 49.5, 3.0, 4),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_table(schedule, costs, makespan, bubble, peak):
    """Costs are for one rank's share of the layers, however many stages it is cut into."""
    share = 1 / costs
    found = simulate(chained(schedule), Costs.even(schedule.stages, forward=share, inward=share, weight=share))
    assert (found.makespan, round(100 * found.bubble, 1), max(found.peaks) / costs) == (makespan, bubble, peak)


@pytest.mark.parametrize("name", ALL)
@given(data=st.data())
def test_every_plan_ends_whatever_it_costs_and_without_buffers(name, data):
    ranks = data.draw(st.integers(1, 6))
    plan = ALL[name](
        ranks, data.draw(st.integers(ranks if name == "2bw" else 1, 14)), replicas=data.draw(st.integers(1, 2))
    )
    seconds = st.lists(st.floats(0, 10), min_size=plan.stages, max_size=plan.stages)
    transfer = {(stage, stage + 1): data.draw(st.floats(0, 10)) for stage in range(plan.stages - 1)}
    costs = Costs(*(data.draw(seconds) for _ in range(3)), transfer=transfer)
    simulate(chained(plan), costs, depth=data.draw(st.sampled_from([0, 1])))


@pytest.mark.parametrize("name", FLUSHING)
def test_replicas_take_microbatches_in_turn(name):
    plan = FLUSHING[name](2, 3, replicas=2)
    assert plan.microbatches == 6
    for rank, actions in enumerate(plan.actions):
        assert {action.microbatch % 2 for action in actions if action.microbatch >= 0} == {rank // 2}


def test_stages_may_have_different_numbers_of_replicas():
    plan = one_f_one_b(3, 2, replicas=[1, 2, 1])
    assert orders(plan) == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0STEP",
        "1F0 1F2 1B0 1B2 1STEP",
        "1F1 1F3 1B1 1B3 1STEP",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2STEP",
    ]
    simulate(chained(plan), depth=0)


def test_microbatches_must_go_round():
    with pytest.raises(ArgumentError, match="9 microbatches cannot be dealt out to the 2 replicas of stage 0"):
        gpipe(2, 3, replicas=[2, 3])


def test_versions_are_those_of_the_closed_forms():
    stages, microbatches = 4, 12
    stale = pipedream(stages, microbatches).versions
    assert stale == tuple(
        tuple(max(0, t - (stages - 1 - stage)) for t in range(microbatches)) for stage in range(stages)
    )
    assert set(two_buffered(stages, 4, steps=3).versions) == {(-1, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1)}


@pytest.mark.parametrize("name", STALE)
def test_a_version_exists_when_it_is_used_and_is_not_older_than_need_be(name):
    plan = STALE[name](3, 6)
    for rank, actions in enumerate(plan.actions):
        steps = 0
        for action in actions:
            steps += action.kind is Kind.STEP
            if action.kind is Kind.FORWARD:
                assert steps - 2 <= plan.versions[rank][action.microbatch] <= steps


def test_two_versions_want_enough_microbatches():
    with pytest.raises(ArgumentError, match="2bw needs as many microbatches as stages, not 2 for 3"):
        two_buffered(3, 2)
