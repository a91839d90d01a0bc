"""Whole searches with the real proposals, on jobs like those of the benchmark: what they cost, and where they end."""

from __future__ import annotations

import random

import pytest

from coordd.tuning.autotune import Progress, Tuner
from coordd.tuning.proposals import Proposals
from tests.synthetic import JOBS, START, Mood, Training, space_of, train

pytest.importorskip("optuna")

SPACE = space_of()
MOODS = {
    "calm": Mood(noise=0.02),
    "usual": Mood(noise=0.05, pauses=0.005, drift=0.2),
    "rough": Mood(noise=0.1, pauses=0.01, drift=0.3, bursts=0.001, lengths=0.3),
}
SEEDS = range(7)

pytestmark = pytest.mark.slow


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
def test_an_explicit_search_finds_the_plateau_and_stops(job, mood):
    found = [searched(job, mood, seed, steps=3000, share=1.0) for seed in SEEDS]
    gaps = sorted(left(job, progress) / floor(job) - 1 for progress in found)
    assert gaps[len(gaps) // 2] < (0.10 if mood == "rough" else 0.06), "within so much of the best there is, in most"
    assert max(left(job, progress) for progress in found) < 1.01, "none ends worse than it began"
    assert all(progress.done for progress in found)


@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("job", JOBS)
def test_a_search_beside_the_training_takes_a_hundredth_and_pays_off(job, mood):
    progress = searched(job, mood, 1, steps=60_000, share=0.01)
    assert progress.spent <= 0.01 * progress.steps
    assert left(job, progress) / floor(job) < (1.20 if mood == "rough" else 1.06)
    assert left(job, progress) < 1.01


def test_nothing_is_found_where_there_is_nothing_to_find():
    """All settings are alike, and the machine is rough."""
    found = []
    for seed in SEEDS:
        training = Training(JOBS["gpt"], MOODS["rough"], 3000, random.Random(seed))
        search = Tuner(SPACE, START, Proposals(SPACE, START, seed=seed), share=1.0)
        train(search, lambda _, training=training: training.step(START), 3000)
        assert search.done
        found.append(search.progress.relative)
    assert min(found) > 0.9
    assert found.count(1.0) >= len(found) * 3 / 4, "the start is kept"


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
