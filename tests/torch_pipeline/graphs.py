"""Stages whose graphs branch in all the ways that a split backward pass meets."""

from __future__ import annotations

import torch
from torch import nn


class Tied(nn.Module):
    """One weight in two places on the way to the input, and used by another parameter's way, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        ids = x.detach().abs().long().clamp(max=3)[:, 0]
        return nn.functional.linear(torch.tanh(x @ self.linear.weight) + self.embedding(ids), self.embedding.weight)


class Twice(nn.Module):
    """The same layer twice, with its weight prepared once, for both."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        weight = self.weight / self.weight.norm()
        h = nn.functional.linear(x, weight, self.bias).relu()
        return self.last(nn.functional.linear(h, weight, self.bias.exp()))


class Mixed(nn.Module):
    """A weight made of one parameter of its own and one that is used elsewhere."""

    def __init__(self):
        super().__init__()
        self.own, self.common = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ (self.own * self.common)).tanh() @ self.common


class Branches(nn.Module):
    """Ways that end nowhere, a frozen parameter, one that has nothing to do with the input, a detached one."""

    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.position = nn.Parameter(torch.randn(3, 4))
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x):
        constant = self.other(self.position).mean(0)
        h = torch.where(x > 0, self.linear(x), x.detach()) * self.frozen + constant
        return h.softmax(-1) + self.linear(h.detach())


class Scaled(torch.autograd.Function):
    """A function in Python on the way to the input and to a parameter; it tells how often it is gone back through."""

    times = 0

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        Scaled.times += 1
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Scaled.apply(self.linear(x), self.scale)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 4),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=first) for first in (0, 1)]
        )

    def forward(self, x):
        return self.layers(x[:, None].expand(-1, 3, -1).cumsum(1)).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.cell(x[:, None].expand(-1, 3, -1))[0][:, -1]


def normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


class Dense(nn.Linear):
    """A layer that no ledger knows, so that graphs of it are split node by node."""


def multilayer():
    return nn.Sequential(Dense(4, 8), nn.GELU(), nn.LayerNorm(8), Dense(8, 8), nn.Tanh(), Dense(8, 4))


GRAPHS = {
    "multilayer": multilayer,
    "attention": Attention,
    "convolution": Convolution,
    "recurrent": Recurrent,
    "tied": Tied,
    "twice": Twice,
    "mixed": Mixed,
    "branches": Branches,
    "custom": Custom,
    "normed": normed,
    "nothing": nn.Identity,
}
