"""Running the stages of a model one after another, as the ranks of a pipeline would."""

from __future__ import annotations

import copy
import itertools

import torch
from torch.utils import _pytree as pytree

from coordd_torch.pipeline.capture import stage
from coordd_torch.pipeline.stage_module import OUTPUT


def cut(captured, count):
    """About equally many layers for each stage."""
    borders = [len(captured.layers) * i // count for i in range(count + 1)]
    return [stage(captured, first, last - 1) for first, last in itertools.pairwise(borders)]


def arrived(value):
    """A value as it comes from elsewhere: nothing of it is shared, and it is a leaf."""
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad), value
    )


def forward(stages, inputs):
    """For each stage what it received and what it gave."""
    sent, passes = {}, []
    for each in stages:
        received = {name: arrived(sent[name]) for name in each.interface(inputs).reads}
        given = each({**inputs, **received})
        sent |= given
        passes.append((received, given))
    return passes


def backward(passes, loss):
    """Carries gradients from where values were received back to where they were given."""
    gradients = {}
    loss.backward()
    for received, given in reversed(passes):
        pairs = [(leaf, gradients.get(key)) for key, leaf in leaves(given) if leaf.requires_grad]
        pairs = [pair for pair in pairs if pair[1] is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        for key, leaf in leaves(received):
            if leaf.grad is not None:
                gradients[key] = gradients.get(key, 0) + leaf.grad


def leaves(values):
    for name, value in values.items():
        for index, leaf in enumerate(pytree.tree_leaves(value)):
            if isinstance(leaf, torch.Tensor):
                yield (name, index), leaf


def step(model, captured, stages, batch, loss):
    """Output and gradients of the plain model, then of its stages; both begin with the same buffers and luck."""
    buffers = copy.deepcopy([buffer.detach() for buffer in model.buffers()])
    generator = torch.get_rng_state()
    whole = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
    loss(whole).backward()
    wanted = taken(model), [buffer.clone() for buffer in model.buffers()]
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.data.copy_(before)
    torch.set_rng_state(generator)
    passes = forward(stages, captured.inputs(batch))
    output = passes[-1][1][OUTPUT]
    backward(passes, loss(output))
    return (whole, *wanted), (output, taken(model), [buffer.clone() for buffer in model.buffers()])


def taken(model):
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def assert_same(plain, staged, *, tolerance=0.0):
    torch.testing.assert_close(staged, plain, rtol=tolerance, atol=tolerance)


def assert_whole(model, stages):
    """All stages together have what the model has, under its names."""
    assert set().union(*(each.state_dict() for each in stages)) == set(model.state_dict())
    names = set().union(*(dict(each.named_parameters()) for each in stages))
    assert names == set(dict(model.named_parameters()))
