"""Plans carried out on ranks, against the same computation in one piece."""

from __future__ import annotations

import weakref
from itertools import pairwise

import numpy as np
import pytest

from coordd import api
from coordd.errors import PeerError
from coordd.ops.handles import Handle
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet
from coordd.pipeline.action import COMPUTE, Kind
from coordd.pipeline.engine import Engine
from coordd.pipeline.lowering import lower
from coordd.pipeline.schedules.schedule import one_f_one_b
from tests.local_ranks import local_ranks
from tests.pipeline.plans import ALL, FLUSHING

RATE = 0.01


def total(given):
    return float(sum(given.values()))


class Times:
    """A stage that multiplies the sum of what it is given by its weight; the loss is half the square of the result."""

    def __init__(
        self, stage: int, stages: int, batch: np.ndarray, flows: list[tuple[int, int]], ranks: tuple[int, ...]
    ):
        self.weights = [1.0 + stage / 10]
        self.used: dict[int, float] = {}
        self._stage, self._batch, self._ranks = stage, batch, ranks
        self._last = stage == stages - 1
        self._weight = self.weights[-1]
        self._slope = np.zeros(1)
        self._inputs: dict[int, float] = {}
        self._errors: dict[int, float] = {}
        self._sum = None

    def forward(self, microbatch, given):
        self._inputs[microbatch] = total(given) if given else self._batch[microbatch]
        self.used[microbatch] = self._weight

    def output(self, microbatch, taker):
        return np.array(self._inputs[microbatch] * self.used[microbatch])

    def backward_input(self, microbatch, given):
        self._errors[microbatch] = float(self.output(microbatch, -1)) if self._last else total(given)

    def backward_weight(self, microbatch):
        self._slope += self._errors[microbatch] * self._inputs[microbatch]

    def backward(self, microbatch, given):
        self.backward_input(microbatch, given)
        self.backward_weight(microbatch)

    def gradient(self, microbatch, giver):
        return np.array(self._errors[microbatch] * self.used[microbatch])

    def recall(self, version):
        self._weight = self.weights[max(0, version)]

    def reduce(self):
        self._sum = api.operations().allreduce(
            self._slope,
            name=f"stage{self._stage}.{len(self.weights)}",
            op=ReduceOp.SUM,
            process_set=ProcessSet(self._ranks),
        )

    def step(self):
        slope = self._sum.result() if self._sum else self._slope
        self.weights.append(self.weights[-1] - RATE * float(slope[0]))
        self._weight = self.weights[-1]
        self._slope = np.zeros(1)
        self._sum = None


def trained(plan, flows, batch, *, runs=1):
    """The weights of all stages after some runs of a plan on ranks, by stage, and what was computed when."""
    lowered = lower(plan, flows)

    def body(rank):
        stages = {stage: Times(stage, plan.stages, batch, flows, plan.placement[stage]) for stage in plan.held[rank]}
        engine = Engine(stages, api.operations(), name="pipe", fail=api.operations().daemon.fail)
        spans = [engine.run(lowered, rank) for _ in range(runs)]
        for mine in spans:
            timed = [one for one in plan.actions[rank] if one.kind in COMPUTE | {Kind.STEP}]
            assert [span.action for span in mine] == timed
            assert all(before.end <= after.begin for before, after in pairwise(mine))
        return {stage: made.weights for stage, made in stages.items()}

    with local_ranks(len(plan.actions)) as ranks:
        found = ranks.each(body)
    return [[mine[stage] for mine in found if stage in mine] for stage in range(plan.stages)]


def plain(stages, flows, batch, *, runs=1):
    """The same in one piece."""
    weights = np.array([1.0 + stage / 10 for stage in range(stages)])
    givers = [[giver for giver, taker in flows if taker == stage] for stage in range(stages)]
    for _ in range(runs):
        slopes = np.zeros(stages)
        for value in batch:
            inputs, errors = np.zeros(stages), np.zeros(stages)
            for stage in range(stages):
                inputs[stage] = (
                    sum(inputs[giver] * weights[giver] for giver in givers[stage]) if givers[stage] else value
                )
            errors[-1] = inputs[-1] * weights[-1]
            for stage in reversed(range(stages)):
                slopes[stage] += errors[stage] * inputs[stage]
                for giver in givers[stage]:
                    errors[giver] += errors[stage] * weights[stage]
        weights = weights - RATE * slopes
    return weights


def batch_of(count):
    return np.random.default_rng(count).normal(size=count)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", FLUSHING)
def test_a_plan_trains_as_one_piece_does(name, replicas):
    plan = FLUSHING[name](2, 3, replicas=replicas)
    flows = [(stage, stage + 1) for stage in range(plan.stages - 1)] + [(0, 2)] * (plan.stages > 2)
    batch = batch_of(plan.microbatches)
    found = trained(plan, flows, batch, runs=2)
    for weights, wanted in zip(found, plain(plan.stages, flows, batch, runs=2), strict=True):
        assert [mine[-1] for mine in weights] == pytest.approx([wanted] * replicas, rel=1e-12)


def test_stages_may_have_different_numbers_of_replicas():
    plan = one_f_one_b(3, 2, replicas=[1, 2, 1])
    flows, batch = [(0, 1), (1, 2)], batch_of(4)
    found = trained(plan, flows, batch)
    assert [len(weights) for weights in found] == [1, 2, 1]
    assert [weights[0][-1] for weights in found] == pytest.approx(list(plain(3, flows, batch)), rel=1e-12)


def test_stale_weights_are_those_of_the_closed_form():
    stages, count = 3, 6
    plan = ALL["pipedream"](stages, count)
    batch = batch_of(count)
    found = [weights[0] for weights in trained(plan, [(0, 1), (1, 2)], batch)]
    weights = [[1.0 + stage / 10] for stage in range(stages)]
    for t, value in enumerate(batch):
        used = [weights[stage][max(0, t - (stages - 1 - stage))] for stage in range(stages)]
        result = value * np.prod(used)
        for stage in range(stages):
            weights[stage].append(weights[stage][-1] - RATE * result * result / used[stage])
    assert found == [pytest.approx(mine, rel=1e-12) for mine in weights]


def test_what_a_stage_raises_is_told_on_all_ranks():
    plan = lower(one_f_one_b(3, 4), [(0, 1), (1, 2)])

    class Broken(Times):
        def backward(self, microbatch, given):
            raise ArithmeticError("overflow here")

    def body(rank):
        kind = Broken if rank == 1 else Times
        stage = kind(rank, 3, batch_of(4), [], (rank,))
        engine = Engine({rank: stage}, api.operations(), name="p", fail=api.operations().daemon.fail)
        with pytest.raises(ArithmeticError if rank == 1 else PeerError) as caught:
            engine.run(plan, rank)
        return str(caught.value)

    with local_ranks(3) as ranks:
        told = ranks.each(body)
    assert told[1] == "overflow here"
    where = "in 1B0 of the pipeline, the backward pass of microbatch 0 in stage 1"
    for text in (told[0], told[2]):
        assert f"rank 1 failed {where}: ArithmeticError: overflow here" in text


def test_what_has_been_sent_is_let_go():
    class Post:
        """Delivers at once, and counts what is still kept of it."""

        def __init__(self):
            self.sent, self.most = [], 0

        def send(self, array, destination, *, name):
            self.sent.append(weakref.ref(array))
            self.most = max(self.most, sum(each() is not None for each in self.sent))
            return self._done(array, name)

        def recv(self, array, source, *, name, lazy):
            return self._done(np.array(1.0), name)

        def _done(self, array, name):
            handle = Handle(name)
            handle.resolve(array)
            return handle

    class Alone(Times):
        def reduce(self):
            pass

    post, plan = Post(), lower(one_f_one_b(3, 16), [(0, 1), (1, 2)])
    stage = Alone(1, 3, batch_of(16), [], (1,))
    Engine({1: stage}, post, name="p", fail=pytest.fail).run(plan, 1)
    assert (len(post.sent), post.most) == (32, 1)
