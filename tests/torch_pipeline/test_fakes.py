from __future__ import annotations

import logging
import sys
from collections import deque
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from coordd_torch.pipeline.alike import structure
from coordd_torch.pipeline.capture import capture
from coordd_torch.pipeline.failure import CaptureError
from tests.torch_pipeline import published
from tests.torch_pipeline.captures import assert_same, cut, step


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Positions(nn.Module):
    """Only torch.export can trace it: it makes tensors of a size."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        rows, length, _ = x.shape
        x = x + self.embedding(torch.arange(length)) + torch.zeros(rows, 1, 1)
        mask = torch.full((length,), 0.5)
        for layer in self.layers:
            x = layer(x) * mask[:, None]
        return x + torch.ones_like(x)


@contextmanager
def _watched():
    """Refers to the local variables of what has run last, as a thread does that looks at the stack."""
    frames = deque(maxlen=100)
    before = sys.getprofile()
    sys.setprofile(lambda frame, *_: frames.append(frame))
    try:
        yield
    finally:
        sys.setprofile(before)


def test_a_thread_that_looks_at_the_stack_does_not_change_a_capture():
    model, x = Positions(), torch.randn(4, 5, 3)
    alone = capture(model, x)
    with _watched():
        captured = capture(model, x)
    assert captured.way == "export"
    assert str(captured.traces.first.graph) == str(alone.traces.first.graph)
    assert_same(*step(model, captured, cut(captured, 2), torch.randn(3, 7, 3), torch.sum), tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.sweep
def test_a_thread_that_looks_at_the_stack_does_not_change_the_names_of_values():
    """`torch.export` counts those, and computes more of them while something refers to what it has dropped."""
    model, x = published.t5(), published.words(4, 5)
    alone = capture(model, x)
    with _watched():
        captured = capture(model, x)
    assert captured.way == "export"
    assert list(structure(captured)) == list(structure(alone))


def test_a_thread_that_looks_at_the_stack_does_not_change_a_later_trace():
    model = Positions()
    captured = capture(model, torch.randn(4, 5, 3))
    stages = cut(captured, 2)
    with _watched():
        captured.traces.find(captured.inputs(torch.randn(4, 5, 3).double()), training=True)
    model.double()
    for each in stages:
        each.double()
    assert_same(*step(model, captured, stages, torch.randn(3, 7, 3).double(), torch.sum), tolerance=1e-6)


class Read(nn.Module):
    """Only torch.export can trace it; reads data in some way between its layers."""

    def __init__(self, read):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("mean", torch.zeros(3))
        self.read = read

    def forward(self, x):
        if x.shape[0] == 0:
            raise ValueError
        x = self.layers[1](self.layers[0](x).tanh())
        return self.layers[3](self.layers[2](self.read(self, x)))


def _of_value(_, x):
    return x * x.data


def _of_parameter(model, x):
    return x * model.layers[1].weight.data.sum() + model.layers[3].weight.data.mean()


def _of_written_value(_, x):
    x.data.mul_(2)
    return x


def _of_written_buffer(model, x):
    model.mean.data.add_(x.data.mean(0))
    return x - model.mean


@pytest.mark.parametrize("read", [_of_value, _of_parameter, _of_written_value, _of_written_buffer])
def test_forward_may_read_data_of_tensors(read):
    model = Read(read)
    captured = capture(model, torch.randn(4, 3))
    assert captured.way == "export"
    stages = cut(captured, 2)
    for _ in range(2):
        assert_same(*step(model, captured, stages, torch.randn(3, 3), torch.sum), tolerance=1e-6)


def test_what_torch_export_loses_is_refused_with_the_line_that_reads_it():
    def lost(_, x):
        with torch._C.DisableTorchFunction():
            copy = x.data
        return x * copy

    with pytest.raises(CaptureError, match=r"how a tensor is computed that is read by 'mul': File .*in forward"):
        capture(Read(lost), torch.randn(4, 3))


class Tries(Positions):
    """Computes something in another way where the first one fails, as Mixtral's experts do."""

    def forward(self, x):
        try:
            return super().forward(x) + torch._grouped_mm(x, torch.eye(3).expand(x.shape[0], 3, 3))
        except RuntimeError:
            return super().forward(x)


def test_errors_that_forward_catches_are_not_logged():
    shown = []
    handler = logging.Handler()
    handler.emit = shown.append
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        assert capture(Tries(), torch.randn(4, 5, 3)).way == "export"
    finally:
        logger.removeHandler(handler)
    assert shown == []
