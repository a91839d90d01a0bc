from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.tuning.autotune import Outcome, Progress, Trial, Tuner, judge
from tests.synthetic import START, Listed, space_of, train

SPACE = space_of()


def other(**changes):
    return msgspec.structs.replace(START, **changes)


FAST, FASTER, SLOW, AWFUL = other(buckets=2), other(buckets=4), other(buckets=8), other(buckets=16)
TIMES = {FAST: 0.9, FASTER: 0.8, SLOW: 1.1, AWFUL: 5.0}


def times(chosen):
    return TIMES.get(chosen, 1.0)


def tuner(*candidates, share=1.0, **options) -> Tuner:
    return Tuner(SPACE, START, Listed(*candidates), share=share, **options)


def trained(*candidates, steps=2000, step=times, **options) -> Tuner:
    made = tuner(*candidates, **options)
    train(made, step, steps)
    return made


class TestAVerdict:
    def test_needs_several_comparisons(self):
        assert judge([0.5], 0.01) is Outcome.OPEN
        assert judge([0.5, 0.5], 0.01) is Outcome.OPEN
        assert judge([0.5, 0.5, 0.5], 0.01) is Outcome.FASTER

    def test_is_quick_where_nothing_is_to_be_gained(self):
        assert judge([1.0], 0.01) is Outcome.NO_GAIN
        assert judge([0.995], 0.01) is Outcome.NO_GAIN

    def test_waits_while_noise_could_explain_the_gain(self):
        assert judge([0.95] * 3, 0.1) is Outcome.OPEN
        assert judge([0.95] * 7, 0.1) is Outcome.OPEN
        assert judge([1.0], 0.1, least=2) is Outcome.OPEN
        assert judge([1.0] * 2, 0.1, least=2) is Outcome.NO_GAIN
        assert judge([0.95] * 8, 0.1) is Outcome.UNCLEAR

    def test_is_not_swayed_by_one_lucky_comparison(self):
        assert judge([0.2, 1.01, 1.02], 0.01) is Outcome.NO_GAIN

    @given(st.lists(st.floats(0.5, 1.5), min_size=1, max_size=8), st.floats(0.003, 0.3))
    def test_never_takes_what_is_not_faster(self, ratios, noise):
        if judge(ratios, noise) is Outcome.FASTER:
            assert sum(ratio < 1 for ratio in ratios) >= len(ratios) / 2
            assert len(ratios) >= 3


class TestASearch:
    def test_finds_the_fastest(self):
        search = trained(SLOW, FAST, AWFUL, FASTER)
        assert search.done
        assert search.settings == search.progress.best == FASTER
        assert search.progress.relative == pytest.approx(0.8)
        outcomes = [(trial.settings, trial.outcome) for trial in search.progress.trials]
        assert outcomes == [
            (SLOW, Outcome.NO_GAIN),
            (FAST, Outcome.FASTER),
            (AWFUL, Outcome.NO_GAIN),
            (FASTER, Outcome.FASTER),
            (START, Outcome.NO_GAIN),  # the last word
        ]

    def test_stays_with_the_start_if_nothing_is_faster(self):
        search = trained(SLOW, AWFUL)
        assert search.done
        assert search.settings == START
        assert search.progress.relative == 1.0
        assert len(search.progress.trials) == 2

    def test_tells_the_proposer_what_it_measured(self):
        proposer = Listed(SLOW, FAST)
        train(Tuner(SPACE, START, proposer, share=1.0), times, 1000)
        learned = {chosen: relative for chosen, relative in proposer.learned if chosen != START}
        assert proposer.learned[0] == (START, 1.0)
        assert learned == {SLOW: pytest.approx(1.1), FAST: pytest.approx(0.9)}

    def test_ends_at_a_plateau_without_asking_for_everything(self):
        candidates = [other(fusion_mb=mb, cycle_ms=ms) for mb in SPACE.fusion_mb for ms in SPACE.cycle_ms]
        proposer = Listed(*(one for one in candidates if one != START))
        search = Tuner(SPACE, START, proposer, share=1.0)
        train(search, times, 5000)
        assert search.done
        assert len(proposer.candidates) > 30

    def test_goes_back_to_the_start_if_what_it_found_has_lost_its_edge(self):
        state = {"steps": 0}

        def step(chosen):
            state["steps"] += chosen == FAST
            lost_its_edge = state["steps"] > 3 * 8
            return (1.2 if lost_its_edge else 0.8) if chosen == FAST else 1.0

        search = trained(FAST, step=step)
        assert [trial.outcome for trial in search.progress.trials] == [Outcome.FASTER, Outcome.FASTER]
        assert (search.done, search.settings, search.progress.relative) == (True, START, 1.0)

    def test_goes_back_to_the_start_in_doubt(self):
        state = {"steps": 0, "noise": random.Random(2)}

        def step(chosen):
            state["steps"] += chosen == FAST
            pace = (1.08 if state["steps"] > 3 * 8 else 0.5) if chosen == FAST else 1.0
            return pace * state["noise"].lognormvariate(0, 0.1)

        search = trained(FAST, step=step)
        assert [trial.outcome for trial in search.progress.trials] == [Outcome.FASTER, Outcome.UNCLEAR]
        assert (search.done, search.settings, search.progress.relative) == (True, START, 1.0)

    @pytest.mark.parametrize("change", [0.998, 1.002])
    def test_is_not_misled_by_a_machine_that_changes(self, change):
        state = {"steps": 0}

        def step(chosen):
            state["steps"] += 1
            return times(chosen) * change ** state["steps"]

        search = trained(SLOW, other(cycle_ms=5.0), step=step)
        assert [trial.ratios for trial in search.progress.trials] == [(pytest.approx(1.1),), (pytest.approx(1.0),)]

    def test_begins_when_the_machine_is_warm_and_its_noise_known(self):
        search = tuner(FAST)
        first = next(steps for steps in range(1, 100) if search.tell(1.0))
        assert first == 10 + 7 * 6

    def test_corrects_what_it_said_by_the_last_word(self):
        state = {"steps": 0}

        def step(chosen):
            state["steps"] += chosen == FAST
            return (0.8 if state["steps"] <= 3 * 8 else 0.9) if chosen == FAST else 1.0

        search = trained(FAST, step=step)
        assert search.progress.trials[0].relative == pytest.approx(0.8)
        assert (search.settings, search.progress.relative) == (FAST, pytest.approx(0.9))

    def test_is_not_misled_by_pauses(self):
        chance = random.Random(3)

        def step(chosen):
            return times(chosen) * (100 if chance.random() < 0.03 else 1)

        assert trained(SLOW, FAST, step=step).settings == FAST

    def test_leaves_a_hopeless_candidate_early(self):
        def tried(candidate):
            search = tuner(candidate, settle=1)
            train(search, times, 500)
            return search.progress.spent

        assert tried(SLOW) == 1 + 6 + 1
        assert tried(AWFUL) == 1 + 3 + 1

    def test_does_not_measure_the_steps_after_a_change(self):
        last = {"chosen": START}

        def step(chosen):
            changed = chosen != last["chosen"]
            last["chosen"] = chosen
            return times(chosen) * (3 if changed else 1)

        assert trained(FAST, step=step, settle=1).progress.relative == pytest.approx(0.9)

    def test_begins_no_trial_after_its_limit(self):
        search = trained(FAST, FASTER, limit=60)
        assert not search.done
        assert search.progress.spent == 0 or search.settings == START
        assert search.progress.steps == 2000
        assert len(search.progress.trials) <= 1

    @pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
    def test_refuses_a_time_that_is_none(self, seconds):
        with pytest.raises(ArgumentError, match="cannot take"):
            tuner().tell(seconds)

    def test_refuses_a_start_outside_the_space(self):
        with pytest.raises(ArgumentError, match="not one of the choices"):
            Tuner(SPACE, other(fusion_mb=3.0), Listed())


class TestTheCost:
    @given(seed=st.integers(0, 10_000), share=st.sampled_from([0.0, 0.01, 0.1, 0.5]), settle=st.integers(1, 4))
    @settings(max_examples=60, deadline=None)
    def test_never_exceeds_the_share_at_any_moment(self, seed, share, settle):
        chance = random.Random(seed)
        search = tuner(SLOW, FAST, AWFUL, FASTER, share=share, settle=settle)
        chosen, away = START, 0
        for steps in range(1, 2000):
            away += chosen != search.progress.best
            chosen = search.tell(times(chosen) * chance.lognormvariate(0, 0.3)) or chosen
            assert away <= search.progress.spent <= share * steps + 1e-6

    def test_counts_slow_steps_for_what_they_last(self):
        spent = []
        for candidate in (SLOW, AWFUL):
            search = trained(candidate, other(cycle_ms=5.0), share=0.05, steps=50_000)
            spent.append([search.progress.steps, search.progress.spent])
        (steps, _), (longer, less) = spent
        assert longer > steps
        assert less < 0.05 * longer / 2

    def test_is_nothing_without_a_share(self):
        search = trained(FAST, share=0.0)
        assert search.progress.spent == 0
        assert search.settings == START


class TestAnotherDay:
    def resumed(self, progress: Progress, *candidates, start=START, **options) -> Tuner:
        text = msgspec.json.encode(progress)
        known = msgspec.json.decode(text, type=Progress)
        return Tuner(SPACE, start, Listed(*candidates), **{"share": 1.0, "progress": known, **options})

    def test_begins_with_the_best_and_searches_no_more(self):
        search = self.resumed(trained(FAST).progress, FASTER)
        assert (search.settings, search.done) == (FAST, True)
        train(search, times, 200)
        assert search.settings == FAST

    def test_goes_on_with_the_open_trial(self):
        first = tuner(FAST, FASTER)
        while first.measured < 2:
            first.tell(times(first.settings))
        search = self.resumed(first.progress, FASTER)
        train(search, times, 1000)
        assert [(trial.settings, len(trial.ratios)) for trial in search.progress.trials[:2]] == [(FAST, 3), (FASTER, 3)]
        assert search.progress.steps > first.progress.steps

    def test_brings_along_the_steps_saved_for_a_trial(self):
        progress = Progress(start=START, best=START)
        days = 0
        while not progress.trials:
            search = self.resumed(progress, FAST, share=0.01)
            train(search, times, 300)
            progress = search.progress
            days += 1
        assert days == 4
        assert progress.spent <= 0.01 * progress.steps

    def test_does_not_bring_along_the_savings_of_years(self):
        progress = Progress(start=START, best=START, steps=10**6, credit=10_000.0)
        search = self.resumed(progress, FAST, share=0.0)
        train(search, times, 500)
        assert search.progress.spent == 10

    def test_tells_the_proposer_what_earlier_ones_learned(self):
        first = trained(SLOW, FAST).progress
        proposer = Listed()
        Tuner(SPACE, START, proposer, progress=first)
        assert [chosen for chosen, _ in proposer.learned] == [START, SLOW, FAST, START]

    def test_tries_a_new_start_against_the_best(self):
        progress = trained(FAST).progress
        for start, winner in ((SLOW, FAST), (FASTER, FASTER)):
            search = self.resumed(progress, start=start)
            assert (search.settings, search.done) == (FAST, False)
            train(search, times, 1000)
            assert (search.settings, search.done) == (winner, True)

    def test_forgets_trials_of_choices_that_are_gone(self):
        gone = Trial(settings=other(algorithm="tree"), ratios=(0.9,))
        kept = Trial(settings=SLOW, ratios=(1.1,), outcome=Outcome.NO_GAIN)
        search = self.resumed(Progress(start=START, best=START, trials=(kept, gone)))
        assert search.progress.trials == (kept,)


def test_equal_step_times_give_equal_searches():
    def run(seed):
        chance = random.Random(seed)
        return trained(SLOW, FAST, FASTER, step=lambda chosen: times(chosen) * chance.lognormvariate(0, 0.05)).progress

    assert run(5) == run(5)
    assert run(5) != run(6)
