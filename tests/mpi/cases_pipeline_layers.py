"""Layers that do more than most: they write to their input, are checkpointed, or ask for gradients."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import compare, doubles, in_one_piece, pipeline, random


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.tanh(self.second(functional.gelu(self.first(x)))), x, use_reentrant=False)


class Force(nn.Module):
    """The gradient of an energy, as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            return x + torch.autograd.grad(self.energy(place).square().sum(), place, create_graph=True)[0]


@ranks(2, deadline=60)
def case_layers_that_write_to_inputs_are_checkpointed_or_ask_for_gradients() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        for schedule, recompute in (("1f1b", True), ("1f1b", False), ("zb-h1", False), ("zb-v", True)):
            torch.manual_seed(0)
            model = nn.Sequential(Doubled(), Checkpointed(), Force(), Checkpointed(), Force(), nn.Linear(6, 3))
            pipe = pipeline(copy.deepcopy(model), schedule=schedule, recompute=recompute)
            given = x.clone()
            loss = pipe.train_batch(given, y)
            assert torch.equal(given, x)
            assert_close(loss, in_one_piece(model, x.clone(), y, 4, 1)[0], rtol=1e-12, atol=1e-12)
            compare(pipe, model)
