"""Completion: training on all ranks is training of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from coordd import api
from tests.contract.plugin import Training, plugin
from tests.contract.reference import close, data, gradients
from tests.mpi.cases import ranks

__all__ = ["begun", "stepped"]

RATE, STEPS, BATCH = 0.1, 4, 6
SLACK = 20
"""Sums of some hundred products are less exact than a product."""


def begun(rate: float, *, outputs: int = 2) -> Training:
    """Begins training from the same weights on all ranks."""
    return plugin().training([weight.astype(plugin().precision) for weight in _weights(outputs)], rate)


def stepped(training: Training, step: int, *, outputs: int = 2, frozen: bool = False) -> Sequence[object]:
    """Makes a step with this rank's part of a batch."""
    x, wanted = (array.astype(plugin().precision) for array in _part(step, api.rank(), outputs))
    return training.step(x, wanted, frozen=frozen)


def _weights(outputs: int = 2) -> list[np.ndarray]:
    """The first of them is large enough to lie alone, the second travels with what is small."""
    return [data("float64", shape, seed=seed) / 8 for seed, shape in enumerate([(32, 600), (600, outputs)])]


def _part(step: int, rank: int, outputs: int = 2) -> tuple[np.ndarray, np.ndarray]:
    seed = 100 + 10 * step + rank
    return data("float64", (BATCH, 32), seed=seed), data("float64", (BATCH, outputs), seed=1000 + seed)


def _whole(step: int) -> list[np.ndarray]:
    return [np.concatenate(parts) for parts in zip(_part(step, 0), _part(step, 1), strict=True)]


def _same(found: Sequence[object], expected: Sequence[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        close(plugin().view(one), other.astype(plugin().precision), slack=SLACK)


@ranks(2)
def case_training_gives_the_weights_of_one_process_on_the_whole_batch() -> None:
    training, expected = begun(RATE), _weights()
    for step in range(STEPS):
        stepped(training, step)
        found = gradients(expected, *_whole(step))
        expected = [weight - RATE * gradient for weight, gradient in zip(expected, found, strict=True)]
    for found, weight in zip(training.weights(), expected, strict=True):
        close(found, weight.astype(plugin().precision), slack=SLACK)


@ranks(2)
def case_gradients_are_averages_and_stay_so_where_they_are_kept() -> None:
    training, weights, kept = begun(0.0), _weights(), []
    for step in range(STEPS):
        kept.append((stepped(training, step), gradients(weights, *_whole(step))))
        _same(*kept[-1])
    for found, expected in kept if plugin().keeps else ():
        _same(found, expected)


@ranks(2)
def case_a_rank_without_a_gradient_takes_part_with_zeros() -> None:
    training, weights = begun(0.0), _weights()
    for step in range(2):  # so that there is memory to be used again, with what is no zero
        _same(stepped(training, step), gradients(weights, *_whole(step)))
    (hidden, out), (others, _) = (gradients(weights, *_part(2, rank)) for rank in range(2))
    frozen = api.rank() == 1
    if not plugin().mends:  # one rank cannot use it, so none does
        with pytest.raises(Exception, match=r"some ranks have gradients for \S*\bout\b"):
            stepped(training, 2, frozen=frozen)
    else:
        _same(stepped(training, 2, frozen=frozen), [(hidden + others) / 2, out / 2])
    _same(stepped(training, 3), gradients(weights, *_whole(3)))
