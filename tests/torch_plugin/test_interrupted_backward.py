"""An exception of a signal handler on any line of a hook: the step counts on all ranks or on none, or the job ends.

The exception is raised by a trace function, which sees more places than a signal handler can interrupt.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from types import CodeType, FunctionType, MethodType

import pytest
import torch

import coordd.torch as cd
from coordd.errors import CoorddError, DiscardedStepError
from tests.local_ranks import local_ranks
from tests.torch_plugin.training import weights

STEPS = 6
BROKEN = 3
"""The step in which the exception is raised; the gradients are in buckets by then."""
SIZES = {"a": 300, "b": 300, "c": 300}
START = "_expect_end"
"""From here on the other ranks hear that the pass has failed; before, the script has to call `discard_step()`."""
ELSEWHERE = ("contextlib", "torch.amp.autocast_mode", "torch.autograd.grad_mode")


class TimeIsUpError(Exception):
    """What the handler raises."""


class Handler:
    """Raises at a place of coordd that a thread reaches, counted from the first hook of a backward pass.

    Places are the functions that it calls, each once, or with ``every`` each call and each line, as often as they come.
    With ``as_torch`` the exception looks like one of PyTorch, such as for want of memory.
    """

    def __init__(self, number: int, *, every: bool, as_torch: bool = False) -> None:
        self.where = ""
        self.trace = MethodType(_of_torch(Handler.raise_there) if as_torch else Handler.raise_there, self)
        self._number = number
        self._every = every
        self._places: list[CodeType] | None = None

    def raise_there(self, frame, event, _):
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if self._places is None:
            if code.co_name == START:
                self._places = []
            return self.trace if name.startswith("coordd") else None
        if not name.startswith(("coordd", *ELSEWHERE)):
            return None
        if event in {"call", "line"} and (self._every or code not in self._places):
            self._places.append(code)
            if len(self._places) > self._number:
                self.where = f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
                raise TimeIsUpError
        return self.trace if self._every else None


def _of_torch(function):
    scope = {**function.__globals__, "__name__": "torch.utils.data"}
    return FunctionType(function.__code__, scope, function.__name__)


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
            except (TimeIsUpError, DiscardedStepError):
                continue

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
    for number in itertools.count():
        handler = Handler(number, **kind)
        made, ended = run(handler, compression=getattr(cd.Compression, compression))
        if not handler.where:
            break
        for step, values in itertools.chain(*made):
            assert sorted(values) == pytest.approx([step + 1] * len(values), rel=0.02), f"{handler.where}: {made}"
        if not ended:
            assert [step for step, _ in made[0]] == [step for step, _ in made[1]], f"{handler.where}: {made}"
        kinds[ended] += 1
    assert kinds[True]
    assert kinds[False]


# Python shows what a handler raises in `__del__`, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("as_torch", [False, True])
def test_a_step_that_a_handler_interrupts_counts_on_all_ranks_or_on_none_or_the_job_ends(compression, as_torch):
    check(compression, every=False, as_torch=as_torch)


@pytest.mark.sweep
@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("as_torch", [False, True])
def test_a_step_that_a_handler_interrupts_on_any_line(compression, as_torch):
    check(compression, every=True, as_torch=as_torch)
