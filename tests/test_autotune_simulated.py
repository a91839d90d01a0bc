"""Whole searches with the real proposals, on jobs like those of the benchmark: what they cost, and where they end."""

from __future__ import annotations

import random

import pytest

from coordd.autotune import Progress, Tuner
from coordd.tuning.proposals import Proposals
from tests.synthetic import JOBS, START, Mood, Training, space_of, train

pytest.importorskip("optuna")

SPACE = space_of()
MOODS = {
    "calm": Mood(noise=0.02),
    "usual": Mood(noise=0.05, pauses=0.005, drift=0.2),
    "rough": Mood(noise=0.1, pauses=0.01, drift=0.3, bursts=0.001, lengths=0.3),
}
SEEDS = range(10)


def searched(job: str, mood: str, seed: int, *, steps: int, share: float) -> Progress:
    training = Training(JOBS[job], MOODS[mood], steps, random.Random(seed))
    search = Tuner(SPACE, START, Proposals(SPACE, START, seed=seed), share=share)
    train(search, training.step, steps)
    return search.progress


def left(job: str, progress: Progress) -> float:
    """What is left of the step time, by the formula rather than by what was measured."""
    return JOBS[job].step(progress.best) / JOBS[job].step(START)


def floor(job: str) -> float:
    return JOBS[job].best(SPACE) / JOBS[job].step(START)


@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("job", JOBS)
class TestAnExplicitSearch:
    def test_finds_the_plateau_and_stops(self, job, mood):
        found = [searched(job, mood, seed, steps=3000, share=1.0) for seed in SEEDS]
        gaps = sorted(left(job, progress) / floor(job) - 1 for progress in found)
        assert gaps[len(gaps) * 7 // 10] < 0.06, gaps
        assert all(progress.done for progress in found)

    def test_never_ends_worse_than_it_began(self, job, mood):
        for seed in SEEDS:
            assert left(job, searched(job, mood, seed + 100, steps=3000, share=1.0)) < 1.01


@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("job", JOBS)
def test_a_search_beside_the_training_takes_a_hundredth_and_pays_off(job, mood):
    for seed in SEEDS[:3]:
        progress = searched(job, mood, seed, steps=60_000, share=0.01)
        assert progress.spent <= 0.01 * progress.steps
        assert left(job, progress) < 1.01
        assert left(job, progress) / floor(job) < (1.2 if mood == "rough" else 1.06)


def test_nothing_is_found_where_there_is_nothing_to_find():
    """All settings are alike, and the machine is rough."""
    for seed in SEEDS:
        training = Training(JOBS["gpt"], MOODS["rough"], 3000, random.Random(seed))
        search = Tuner(SPACE, START, Proposals(SPACE, START, seed=seed), share=1.0)
        train(search, lambda _, training=training: training.step(START), 3000)
        assert search.done
        assert search.progress.relative > 0.85


def test_equal_seeds_give_equal_searches():
    first, second, other = (searched("mlp", "usual", seed, steps=1500, share=1.0) for seed in (4, 4, 5))
    assert first == second
    assert first != other


def test_many_short_runs_find_what_a_long_one_does():
    training = Training(JOBS["mlp"], MOODS["usual"], 60_000, random.Random(1))
    progress = None
    for _ in range(30):
        search = Tuner(SPACE, START, Proposals(SPACE, START), share=0.01, progress=progress)
        train(search, training.step, 2000)
        progress = search.progress
    assert left("mlp", progress) / floor("mlp") < 1.06
    assert progress.spent <= 0.01 * progress.steps
