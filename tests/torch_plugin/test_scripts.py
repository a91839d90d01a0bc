"""Training scripts made at random: how they clear, keep, change and convert gradients while a model trains.

All ranks do the same to their gradients, but for what leaves them as they are: keeping them, or moving their memory.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.training import LARGE, WAYS

SHAPES = [(3,), (200,), (4, 5), (2, 3, 2, 2), (LARGE,)]
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
]
KEPT: list[Callable[[torch.Tensor], Any]] = [
    lambda gradient: gradient,
    lambda gradient: gradient.detach(),
    lambda gradient: gradient[1:],
]


class Script:
    """A training of 10 steps; equal for equal seeds, however many ranks make it."""

    def __init__(self, seed: int, rank: int | None = None) -> None:
        self.random = random.Random(seed)
        self.own = random.Random(f"{seed} {rank}")
        source = torch.Generator().manual_seed(seed)
        shapes = self.random.sample(SHAPES, self.random.choice([2, 4, 5]))
        self.net = nn.ParameterList(torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
        self.optimizer: Any = self.random.choice(OPTIMIZERS)(self.net.parameters())
        self.kept: list[Any] = []
        self.cleared = self.random.choice(["none", "zero", "by hand", "mixed", "mixed"])
        self.passes = self.random.choice([1, 1, 2, 3])
        self.ways = self.random.choice([KEPT, [*KEPT, lambda gradient: gradient.numpy()]])

    def clear(self) -> None:
        how = self.random.choice(["none", "zero", "by hand", "never"]) if self.cleared == "mixed" else self.cleared
        if how == "by hand":
            for parameter in self.net:
                parameter.grad = None
        elif how != "never":
            self.optimizer.zero_grad(set_to_none=how == "none")

    def convert(self) -> None:
        """Converts the model between two steps."""
        kind = self.random.choice(["last", "first", "float", "double", "data", "shared", *["none"] * 6])
        if kind in {"last", "first"}:
            formats = {"last": torch.channels_last, "first": torch.contiguous_format}
            self.net.to(memory_format=formats[kind])
            self.kept.clear()  # views of what lies in buckets stay views: gradients there keep their layout
        elif kind in {"float", "double"}:
            self.net.to(getattr(torch, kind))
        elif kind == "shared" and self.ways is KEPT:  # it frees the memory of arrays
            self.net.share_memory()
        elif kind == "data":
            for parameter in self.net:
                parameter.data = parameter.data.clone()

    def given(self) -> list[torch.Tensor]:
        """The gradients that there are, some of them."""
        found = [parameter.grad for parameter in self.net if parameter.grad is not None]
        return self.random.sample(found, self.random.randint(0, len(found)))

    def keep(self) -> None:
        """Keeps gradients, on all ranks, to see what becomes of them, and on this one, which makes no difference."""
        self.kept = [one for one in self.kept if self.random.random() < 0.8]
        if self.random.random() < 0.3:
            self.kept += [self.random.choice(self.ways)(value) for value in self.given()]
        mine = [parameter.grad for parameter in self.net if self.own.random() < 0.1]
        self.mine = [value for value in mine if value is not None]
        if self.own.random() < 0.1 and not self.kept:
            for value in self.mine:
                value.data = value.data.clone()

    def change(self) -> None:
        """Changes averaged gradients, as clipping does, and others."""
        kind = self.random.choice(["scale", "replace", "move", "clip", "share", *["none"] * 4])
        if kind == "clip":
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for parameter in self.net if kind != "clip" else ():
            if parameter.grad is None or self.random.random() < 0.4:
                continue
            if kind == "scale":
                parameter.grad.mul_(0.5)
            elif kind == "replace":
                parameter.grad = parameter.grad * 0.5
            elif kind == "move":
                parameter.grad.data = parameter.grad.data * 0.5
            elif kind == "share" and self.ways is KEPT:
                parameter.grad.share_memory_()

    def loss(self, seed: int) -> torch.Tensor:
        """What a rank computes in one pass, with some of the parameters."""
        source = torch.Generator().manual_seed(seed)
        used = [one for one in self.net if torch.rand(1, generator=source) < 0.8] or self.net
        parts = [(one.sin() * torch.randn(one.shape, generator=source)).double().mean() for one in used]
        return torch.stack(parts).sum()

    def run(self, ranks: Iterable[int], size: int) -> Iterator[list[float]]:
        """Trains with the batches of these ranks; yields what can be seen before and after each step."""
        ranks = list(ranks)
        share = size if len(ranks) == size else 1
        for _ in range(10):
            self.convert()
            self.clear()
            seed, waits = self.random.randrange(1 << 20), self.random.random() < 0.3
            for number in range(self.passes):
                last = number == self.passes - 1
                waiting = getattr(self.optimizer, "no_sync", None) if waits and not last else None
                with waiting() if waiting else contextlib.nullcontext():
                    for rank in ranks:
                        (self.loss(seed + 10 * number + rank) / share).backward()
                if last or not waits:
                    self.keep()
                    self.change()
            yield [*sums(value.grad for value in self.net), *sums(self.kept)]
            self.optimizer.step()
            yield [*sums(self.net), *sums(self.kept)]


def sums(values: Iterable[Any]) -> Iterator[float]:
    """Sums with weights, by which numbers in other places differ."""
    for value in values:
        flat = torch.zeros(1) if value is None else torch.as_tensor(value).detach().reshape(-1).double()
        yield (flat * torch.arange(1, flat.numel() + 1).double()).mean().item()


@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 20), size=st.sampled_from([2, 3]), way=st.sampled_from(WAYS))
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_script_sees_and_does_with_ranks_what_it_does_alone(seed, size, way):
    def body(rank):
        script = Script(seed, rank)
        script.optimizer = cd.DistributedOptimizer(script.optimizer)
        return list(script.run([rank], size))

    wanted = list(Script(seed).run(range(size), size))
    found = each_rank(size, body, **way)
    assert all(one == found[0] for one in found)
    for now, then in zip(found[0], wanted, strict=True):
        assert now == pytest.approx(then, rel=1e-4, abs=1e-4)
