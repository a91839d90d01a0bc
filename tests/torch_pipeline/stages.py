"""Stages in one process: what the engine does with them, in the plainest order; and the same without stages."""

from __future__ import annotations

import torch
from torch import nn

from coordd.pipeline.frame import pack, unpack
from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.codec import TorchCodec

CODEC = TorchCodec()


class Stage(nn.Module):
    """A module of positional arguments, with names for its arguments and its results."""

    def __init__(self, module, takes, gives):
        super().__init__()
        self.module, self.takes, self.gives = module, takes, gives

    def forward(self, values):
        results = self.module(*(values[name] for name in self.takes))
        return dict(zip(self.gives, results if isinstance(results, tuple) else (results,), strict=True))


class Line:
    """Boundaries of stages, and what each sends to which others: ``{0: {1: ["h"], 2: ["skip"]}}``."""

    def __init__(self, stages, sends, **options):
        self.stages, self.sends = stages, sends
        self.boundaries = [Boundary(stage, stage=number, **options) for number, stage in enumerate(stages)]

    def forward(self, microbatch, inputs):
        frames = {}
        for number, boundary in enumerate(self.boundaries):
            parcels = {source: unpack(frame, CODEC) for (source, target), frame in frames.items() if target == number}
            outputs = boundary.forward(microbatch, parcels, inputs)
            if number in self.sends:
                del outputs
                found = boundary.frames(microbatch, self.sends[number])
                frames.update({(number, target): frame for target, frame in found.items()})
        return outputs

    def backward(self, microbatch, loss, way="backward"):
        """Goes back through all stages; ``way`` is backward or backward_input."""
        frames = {}
        for number in reversed(range(len(self.boundaries))):
            gradients = {
                target: unpack(frame, CODEC)[0] for (target, source), frame in frames.items() if source == number
            }
            found = getattr(self.boundaries[number], way)(microbatch, gradients if number in self.sends else loss)
            frames.update({(number, source): pack(given, CODEC)[0] for source, given in found.items()})

    def weight(self, microbatch):
        for boundary in self.boundaries:
            boundary.backward_weight(microbatch)

    def plain(self, inputs):
        values = dict(inputs)
        for stage in self.stages:
            values.update(stage(values))
        return values

    def gradients(self):
        """Takes the gradients of all parameters."""
        found = {}
        for number, stage in enumerate(self.stages):
            for name, parameter in stage.named_parameters():
                found[f"{number}.{name}"] = parameter.grad
        for stage in self.stages:
            stage.zero_grad()
        return found


def same(left, right):
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        if gradient is None or right[name] is None:
            assert gradient is right[name], name
        else:
            assert torch.equal(gradient, right[name]), name
