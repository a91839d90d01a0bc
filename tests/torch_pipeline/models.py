"""Models that are awkward to cut, each in its way."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.norm(self.conv(x))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.conv1 = nn.Conv2d(2, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(width), Residual(width))
        self.layer2 = nn.Sequential(Residual(width), Residual(width))
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(width, 4)

    def forward(self, x):
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.dropout(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1)))


class UNet(nn.Module):
    """Skips from the first layers straight to the last ones."""

    def __init__(self, depth=3):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(12, 6) for _ in range(depth))

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x).tanh()
            skips.append(x)
        for up in self.up:
            x = up(torch.cat([x, skips.pop()], 1))
        return x


class Station(nn.Module):
    """Takes a dict and gives another, with a tuple, a number and None in it."""

    def __init__(self, width=5):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, state):
        x = self.linear(state["x"]).relu()
        return {"x": x, "both": (x * 2, state["count"]), "count": state["count"] + 1, "nothing": None}


class Stations(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Station() for _ in range(4))
        self.head = nn.Linear(5, 2)

    def forward(self, batch, *, scale=None, times=1):
        state = {"x": batch["image"], "count": 0}
        for block in self.blocks:
            state = block(state)
        x = state["both"][0] + state["count"]
        if scale is not None:
            x = x * scale
        for _ in range(times):
            x = x + batch["image"]
        return {"logits": self.head(x), "count": state["count"], "scale": None}


class Tied(nn.Module):
    """The last layer's weight is the first one's; dropout is a function."""

    def __init__(self, vocabulary=11, width=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(9, width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = x + functional.dropout(block(x).relu(), 0.2, training=self.training)
        return self.head(x)


class Guarded(nn.Module):
    """Only torch.export can trace it: its forward looks at a size. It counts its calls, and has a constant."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("offset", torch.full((4,), 0.5), persistent=False)

    def forward(self, x, *, shift=None):
        if x.shape[0] == 0:
            raise ValueError
        self.calls += 1
        first = torch.zeros_like(x)
        first[:, 1:] = x[:, :-1]
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
        for block in self.blocks:
            x = (block(x).relu_() + self.offset) * scale
            x += first
        return (self.head(x), shift)


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:  # here
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return self.last(x)
