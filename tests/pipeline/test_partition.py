"""The split is as good as the best of all splits there are, under cuts that cost and caps on memory; then even."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.pipeline.load import Load, Memory, shares
from coordd.pipeline.partition import regroup, split, split_counts
from tests.pipeline.splits import even, every, loads, memories, problems


def lengths(stages):
    return [len(stage) for stage in stages]


def slowest(items, stages, cuts=()):
    return max(share.seconds for share in shares(items, stages, cuts=cuts))


def most(items, stages, memory):
    return max(share.memory for share in shares(items, stages, memory=memory))


def squares(items, stages, cuts):
    return sum(share.seconds**2 for share in shares(items, stages, cuts=cuts))


@given(problems())
def test_no_split_has_a_faster_slowest_stage(problem):
    items, stages, cuts = problem
    found = split(items, stages, cuts=cuts)
    assert found in set(every(len(items), stages))
    assert slowest(items, found, cuts) == min(slowest(items, other, cuts) for other in every(len(items), stages))


@given(problems())
def test_of_equally_fast_splits_it_is_the_evenest(problem):
    items, stages, cuts = problem
    found = split(items, stages, cuts=cuts)
    best = slowest(items, found, cuts)
    peers = [other for other in every(len(items), stages) if slowest(items, other, cuts) == best]
    least = min(squares(items, other, cuts) for other in peers)
    assert squares(items, found, cuts) == pytest.approx(least, rel=1e-3)


@given(problems(), memories, st.data())
def test_under_a_cap_it_is_the_fastest_of_those_that_fit(problem, memory, data):
    items, stages, cuts = problem
    splits = list(every(len(items), stages))
    held = [most(items, other, memory) for other in splits]
    cap = data.draw(st.sampled_from(held))
    limited = replace(memory, cap=cap)
    found = split(items, stages, cuts=cuts, memory=limited)
    assert most(items, found, limited) <= cap
    fitting = [other for other, bytes_ in zip(splits, held, strict=True) if bytes_ <= cap]
    assert slowest(items, found, cuts) == min(slowest(items, other, cuts) for other in fitting)


@given(problems(), memories)
def test_where_nothing_fits_the_least_cap_that_works_is_told(problem, memory):
    items, stages, cuts = problem
    least = min(most(items, other, memory) for other in every(len(items), stages))
    with pytest.raises(ArgumentError, match=rf"the least that works is {least:,};"):
        split(items, stages, cuts=cuts, memory=replace(memory, cap=least - 1))
    assert most(items, split(items, stages, cuts=cuts, memory=replace(memory, cap=least)), memory) == least


@pytest.mark.parametrize("by", ["parameters", "layers"])
@given(problem=problems())
def test_by_other_measures_too_no_split_is_better_and_cuts_cost_nothing(by, problem):
    items, stages, cuts = problem

    def worst(found):
        return max(getattr(share.load, by) for share in shares(items, found))

    found = split(items, stages, by=by, cuts=cuts)
    assert worst(found) == min(worst(other) for other in every(len(items), stages))


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40), st.integers(1, 40))
def test_measured_times_are_split_no_worse_than_evenly(times, stages):
    items = [Load(seconds) for seconds in times]
    stages = min(stages, len(items))
    found = split(items, stages)
    assert slowest(items, found) <= slowest(items, even(len(items), stages)) * (1 + 1e-12)


@given(st.floats(1e-9, 1e9), st.integers(1, 60), st.data())
def test_equal_layers_are_dealt_out_evenly_larger_stages_first(seconds, count, data):
    stages = data.draw(st.integers(1, count))
    found = lengths(split([Load(seconds, 2 * seconds)] * count, stages))
    assert found == [count // stages + (stage < count % stages) for stage in range(stages)]


def test_ten_equal_layers_in_four():
    assert lengths(split([Load(0.1)] * 10, 4)) == [3, 3, 2, 2]


def test_a_costly_cut_is_avoided():
    items = [Load(1.0)] * 4
    assert lengths(split(items, 2)) == [2, 2]
    assert lengths(split(items, 2, cuts=[0.0, 5.0, 0.5])) == [1, 3]


def test_early_stages_hold_more_activations_so_a_cap_makes_them_shorter():
    items = [Load(1.0, 1.0, activation=100)] * 12
    free = Memory(microbatches=8)
    assert lengths(split(items, 4, memory=free)) == [3, 3, 3, 3]
    assert [share.memory for share in shares(items, split(items, 4), memory=free)] == [1200, 900, 600, 300]
    found = split(items, 4, memory=replace(free, cap=800))
    assert lengths(found) == [2, 2, 4, 4]
    assert [share.memory for share in shares(items, found, memory=free)] == [800, 600, 800, 400]


def test_a_model_of_thousands_of_layers_is_split():
    items = [Load(1.0 + at * 37 % 11 / 10, activation=at * 13 % 7) for at in range(2000)]
    cuts = [at * 7 % 5 / 20 for at in range(1999)]
    found = split(items, 300, cuts=cuts, memory=Memory(cap=10_000, microbatches=600))
    assert [a.stop for a in found[:-1]] == [b.start for b in found[1:]]
    assert (found[0].start, found[-1].stop) == (0, 2000)
    assert min(lengths(found)) >= 1
    assert most(items, found, Memory(microbatches=600)) <= 10_000
    assert slowest(items, found, cuts) < slowest(items, even(2000, 300), cuts)


@given(st.lists(loads, min_size=1, max_size=9), st.data())
def test_stages_of_groups_are_stages_of_their_layers(items, data):
    ends = [0, *sorted(data.draw(st.sets(st.integers(1, 30), min_size=len(items), max_size=len(items))))]
    groups = [range(a, b) for a, b in pairwise(ends)]
    stages = split(items, data.draw(st.integers(1, len(items))))
    found = regroup(groups, stages)
    assert [at for run in found for at in run] == list(range(ends[-1]))
    assert [run.start for run in found] == [groups[run.start].start for run in stages]


@pytest.mark.parametrize(
    ("stages", "arguments", "message"),
    [
        (0, {}, "cannot be split in 0 stages: give one or more"),
        (4, {}, "4 stages need 4 layers or groups of layers, and the model has 3 .*: use at most 3 stages"),
        (2, {"by": "colour"}, "by='colour' is unknown; choose one of time, parameters, layers"),
        (2, {"cuts": [1.0]}, "3 items have 2 cuts between them, and 1 have a cost"),
        (2, {"cuts": [1.0, -1.0]}, "a cut cannot cost -1.0 seconds: measure it again"),
        (2, {"cuts": [float("nan"), 1.0]}, "a cut cannot cost nan seconds"),
        (
            2,
            {"by": "parameters"},
            "no layer has a cost to split by='parameters': measure the layers, or split by='layers'",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_to_do(stages, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        split([Load(1.0)] * 3, stages, **arguments)


NAMES = ["conv1", "relu", "conv2", "fc"]


def test_counts_are_runs_of_layers():
    assert split_counts(NAMES, [2, 1, 1]) == (range(2), range(2, 3), range(3, 4))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([], r"layers_per_proc=\[\] makes no stage: give the number of layers of each, as in \[4\]"),
        ([4, 0], "gives stage 1 0 layers: each stage needs one or more"),
        ([5, -1], "gives stage 1 -1 layers"),
        ([2.0, 2], "gives stage 0 2.0 layers"),
        (
            [2, 1],
            r"=\[2, 1\] places 3 layers, but the model has 4 \('conv1', 'relu', 'conv2', 'fc'\): add 1, or set",
        ),
        ([3, 3], 'places 6 layers, but the model has 4 .*: take away 2, or set layers_per_proc="auto"$'),
        ([1] * 5, 'places 5 layers, but the model has 4 .*: use at most 4 stages, or set layers_per_proc="auto"$'),
    ],
)
def test_counts_that_do_not_fit_are_refused_with_what_to_do(counts, message):
    with pytest.raises(ArgumentError, match=message):
        split_counts(NAMES, counts)


def test_of_many_layers_the_first_are_listed():
    with pytest.raises(ArgumentError, match=r"'layer11', and 8 more\):"):
        split_counts([f"layer{at}" for at in range(20)], [1])
