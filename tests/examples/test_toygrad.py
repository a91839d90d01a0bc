"""The toy framework and its plugin, which docs/writing-a-plugin.md shows."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from coordd.ops.messages import ReduceOp
from tests.local_ranks import each_rank
from tests.mpi.launch import launch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "numpy"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def toy():
    yield loaded("toygrad"), loaded("coordd_toygrad")
    del sys.modules["toygrad"], sys.modules["coordd_toygrad"]


def test_the_framework_computes_gradients(toy):
    framework, _ = toy
    random = np.random.default_rng(0)
    x, weight, wanted = random.normal(size=(5, 3)), random.normal(size=(3, 2)), random.normal(size=(5, 2))

    def loss(values):
        tensor = framework.Tensor(values)
        found = framework.mean_squared_error(framework.tanh(framework.matmul(framework.Tensor(x), tensor)), wanted)
        framework.backward(found)
        return float(found.value), tensor.gradient

    _, gradient = loss(weight)
    for place in np.ndindex(weight.shape):
        step = np.zeros_like(weight)
        step[place] = 1e-6
        slope = (loss(weight + step)[0] - loss(weight - step)[0]) / 2e-6
        assert slope == pytest.approx(gradient[place], abs=1e-8)


def test_gradients_flow_through_operations(toy):
    framework, plugin = toy

    def body(rank):
        mine = framework.Tensor(np.array([rank + 1.0, 2.0]))
        total = plugin.allreduce(mine, op=ReduceOp.SUM, name="total")
        everything = plugin.allgather(total, name="all")
        framework.backward(framework.mean_squared_error(everything, np.zeros(4)))
        return total.value.tolist(), everything.value.tolist(), mine.gradient.tolist()

    # everything is (3, 4, 3, 4); its gradient half of that; averaged, this rank's part; and summed over the ranks
    assert each_rank(2, body) == [([3.0, 4.0], [3.0, 4.0, 3.0, 4.0], [3.0, 4.0])] * 2


@pytest.mark.mpi
def test_two_ranks_train_as_one_process_does():
    def weights(size, launcher):
        outcome = launch(size, FOLDER / "train.py", launcher=launcher, timeout=60)
        assert outcome.returncode == 0, str(outcome)
        losses = [float(each) for each in re.findall(r"loss ([\d.]+)", outcome.stdout)]
        assert losses[-1] < losses[0] / 4
        return [float(each) for each in re.search(r"weights: (.*)", outcome.stdout)[1].split()]

    assert weights(2, "coordd") == pytest.approx(weights(1, "python"), abs=1e-8)
