"""An exception of a signal handler on any line of a hook: the step counts on all ranks or on none, or the job ends."""

from __future__ import annotations

import itertools
import sys
from collections import Counter

import pytest
import torch

import coordd.torch as cd
from coordd.errors import CoorddError, DiscardedStepError
from tests.interrupting import TimeIsUpError, handlers
from tests.local_ranks import local_ranks
from tests.torch_plugin.training import weights

STEPS = 6
BROKEN = 3
"""The step in which the exception is raised; the gradients are in buckets by then."""
SIZES = {"a": 300, "b": 300, "c": 300}


def begins(frame):
    """From here on the other ranks hear that the pass has failed; before, the script has to call `discard_step()`."""
    return frame.f_code.co_name == "_expect_end"


def run(handler, **optimizer):
    """Trains on two ranks; returns the steps of each, with the values of a gradient, and whether the job has ended."""
    made: list[list[tuple[int, set[float]]]] = [[], []]

    def body(rank):
        net = weights(SIZES)
        given = torch.optim.SGD(net.parameters(), lr=0.0)
        distributed = cd.DistributedOptimizer(given, net.named_parameters(), **optimizer)
        for step in range(STEPS):
            loss = sum((parameter * (step + 1)).sum() for parameter in net.parameters())
            try:
                distributed.zero_grad()
                if rank == 0 and step == BROKEN:
                    sys.settrace(handler.trace)
                try:
                    loss.backward()
                finally:
                    sys.settrace(None)
                made[rank].append((step, {float(parameter.grad.mean()) for parameter in net.parameters()}))
                distributed.step()
            except (TimeIsUpError, SystemExit, DiscardedStepError):
                continue
            finally:
                del loss  # a frame that an error keeps would keep its graph, through which no garbage collector sees

    with local_ranks(2, fusion_mb=0.002) as ranks:
        try:
            ranks.each(body)
        except RuntimeError as error:
            # Interrupted where autograd is enabled again, the script fails in the next step.
            if not isinstance(error, CoorddError) and "does not require grad" not in str(error):
                raise
            return made, True
    return made, False


def check(compression, **kind):
    """Raises the exception at each place in turn."""
    kinds = Counter()
    for handler in handlers(begins=begins, **kind):
        made, ended = run(handler, compression=getattr(cd.Compression, compression))
        for step, values in itertools.chain(*made):
            assert sorted(values) == pytest.approx([step + 1] * len(values), rel=0.02), f"{handler.where}: {made}"
        if not ended:
            assert [step for step, _ in made[0]] == [step for step, _ in made[1]], f"{handler.where}: {made}"
        kinds[ended] += bool(handler.where)
    assert kinds[True]
    assert kinds[False]


# Python shows what a handler raises in `__del__`, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


KINDS = {"handler": {}, "exit": {"error": SystemExit}, "torch": {"as_torch": True}}


@pytest.mark.parametrize("compression", ["none", pytest.param("int8", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_a_handler_interrupts_counts_on_all_ranks_or_on_none_or_the_job_ends(compression, kind):
    check(compression, every=False, **KINDS[kind])


@pytest.mark.sweep
@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_a_handler_interrupts_on_any_line(compression, kind):
    check(compression, every=True, **KINDS[kind])
