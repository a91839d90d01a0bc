"""Running statistics of a batch that comes in microbatches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import coordd.torch as cd
from coordd.errors import ArgumentError
from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.statistics import DeferredStatistics
from tests.torch_pipeline.stages import Stage


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=momentum)

    def forward(self, values):
        return {"y": self.norm(2 * self.norm(values["x"]).relu())}


class Once(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm = nn.BatchNorm2d(3, **options)

    def forward(self, values):
        return {"y": self.norm(values["x"])}


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def close(left, right):
    assert left.keys() == right.keys()
    for name, buffer in left.items():
        torch.testing.assert_close(buffer, right[name], rtol=1e-12, atol=1e-12)


pytestmark = pytest.mark.usefixtures("exact")


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mean", [0, 1e4])
def test_they_are_those_of_the_whole_batch(momentum, recompute, mean):
    plain, ours = Once(momentum=momentum), Once(momentum=momentum)
    stage = Boundary(ours, recompute=recompute)
    for _ in range(3):
        batch = torch.randn(11, 3, 2, 2) + mean * torch.randn(11, 1, 1, 1)
        plain({"x": batch})
        for number, part in enumerate(batch.split([4, 1, 6])):
            loss = stage.forward(number, {}, {"x": part})["y"].sum()
            stage.backward(number, loss)
        stage.statistics.update([stage.statistics.take()])
    close(buffers(ours), buffers(plain))


def test_replicas_merge_theirs():
    plain, batch = Once(), torch.randn(12, 3, 2, 2)
    plain({"x": batch})
    replicas = [Once(), Once()]
    collected = [DeferredStatistics(replica) for replica in replicas]
    for number, part in enumerate(batch.split([5, 2, 4, 1])):
        with collected[number % 2].microbatch():
            replicas[number % 2]({"x": part})
    parts = [one.take() for one in collected]
    for replica, one in zip(replicas, collected, strict=True):
        one.update(parts)
        close(buffers(replica), buffers(plain))
    assert buffers(replicas[0])["norm.running_var"].equal(buffers(replicas[1])["norm.running_var"])


def test_a_layer_that_is_called_twice_is_updated_twice():
    plain, ours, batch = Twice(), Twice(), torch.randn(8, 3)
    plain({"x": batch})
    statistics = DeferredStatistics(ours)
    with statistics.microbatch():
        ours({"x": batch})
    statistics.update([statistics.take()])
    close(buffers(ours), buffers(plain))


def test_normalising_and_evaluation_are_as_ever():
    plain, ours, batch = Once(), Once(), torch.randn(6, 3, 2, 2)
    statistics = DeferredStatistics(ours)
    with statistics.microbatch():
        assert torch.equal(ours({"x": batch})["y"], plain({"x": batch})["y"])
    statistics.update([statistics.take()])
    close(buffers(ours), buffers(plain))
    with torch.no_grad(), statistics.microbatch():
        torch.testing.assert_close(ours.eval()({"x": batch})["y"], plain.eval()({"x": batch})["y"])
    assert statistics.take() == {}


def test_a_layer_that_fails_keeps_its_own():
    ours = Once()
    before = buffers(ours)
    statistics = DeferredStatistics(ours)
    with statistics.microbatch(), pytest.raises(ValueError, match="expected 4D input"):
        ours({"x": torch.randn(2, 3)})
    assert statistics.take() == {}
    close(buffers(ours), before)
    assert ours.norm.momentum == 0.1


@pytest.mark.parametrize("recompute", [False, True])
def test_instances_are_averaged_over_the_whole_batch(recompute):
    plain, ours = (nn.InstanceNorm2d(3, affine=True, track_running_stats=True) for _ in range(2))
    stage, batch = Boundary(Stage(ours, ["x"], ["y"]), recompute=recompute), torch.randn(11, 3, 4, 4) + 7
    for _ in range(2):
        plain(batch)
        for number, part in enumerate(batch.split([4, 1, 6])):
            stage.backward(number, stage.forward(number, {}, {"x": part})["y"].square().sum())
        stage.statistics.update([stage.statistics.take()])
    close(buffers(ours), buffers(plain))


@pytest.mark.parametrize("way", ["backward", "backward_input"])
def test_layers_that_compute_again_by_themselves_count_once(way):
    class Checkpointed(Once):
        def forward(self, values):
            return {"y": checkpoint(self.norm, values["x"], use_reentrant=False)}

    plain, ours, batch = Once(), Checkpointed(), torch.randn(11, 3, 2, 2)
    plain({"x": batch})
    stage = Boundary(ours)
    for number, part in enumerate(batch.split([4, 1, 6])):
        getattr(stage, way)(number, stage.forward(number, {}, {"x": part})["y"].square().sum())
        if way == "backward_input":
            stage.backward_weight(number)
    stage.statistics.update([stage.statistics.take()])
    close(buffers(ours), buffers(plain))


def test_between_microbatches_layers_are_as_they_were_made():
    ours, batch = Once(), torch.randn(6, 3, 2, 2)
    plain = copy.deepcopy(ours)
    first, second = DeferredStatistics(ours), DeferredStatistics(ours)
    with first.microbatch():
        ours({"x": batch})
    assert second.take() == {}
    first.update([first.take()])
    plain({"x": batch})
    close(buffers(ours), buffers(plain))
    again = copy.deepcopy(ours)
    pickle.dumps(ours)  # as torch.save does
    for each in (ours, again, plain):
        each({"x": batch})
    close(buffers(ours), buffers(plain))
    close(buffers(again), buffers(plain))


@pytest.mark.parametrize("kind", [nn.SyncBatchNorm, cd.SyncBatchNorm])
def test_a_layer_that_wants_all_ranks_at_a_time_is_refused(kind):
    with pytest.raises(ArgumentError, match="'1' is a SyncBatchNorm"):
        DeferredStatistics(nn.Sequential(nn.Linear(3, 3), kind(3)))
