"""Whatever one rank refuses in a call of `coordd.keras` that all ranks make, the others hear."""

from __future__ import annotations

import importlib.util

import pytest

from tests.local_ranks import local_ranks
from tests.refusals.injection import EVERY, check_all

pytestmark = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")


def optimizer(_):
    import keras

    import coordd.keras as cd

    return cd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)


def pipeline(_):
    import keras

    import coordd.keras as cd

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    return cd.Pipeline(model, cd.Config(microbatches=2), optimizer="sgd", loss="mse")


CALLS = {"optimizer": optimizer, "pipeline": pipeline}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("part", [0.1, *EVERY])
def test_the_others_hear_of_a_rank_that_fails_anywhere(name, part):
    with local_ranks(2, stall_check=False) as ranks:
        assert len(check_all(ranks, lambda _: CALLS[name], 1, part)) > 5
