"""Layers that do more than most: they write to their input, are checkpointed, or ask for gradients."""

from __future__ import annotations

import copy
import gc
import weakref

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


class Watched(nn.Linear):
    """Remembers, without keeping them, what it gave."""

    def __init__(self, takes: int, gives: int) -> None:
        super().__init__(takes, gives)
        self.given: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.given.append(weakref.ref(y))
        return y


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


@ranks(2)
def case_nothing_of_a_batch_is_kept_after_its_run() -> None:
    model = nn.Sequential(Watched(6, 6), nn.Tanh(), Watched(6, 3))
    pipe = pipeline(model, layers_per_proc=[2, 1])
    (layer,) = (each for stage in pipe.stages.values() for each in stage.module.modules() if isinstance(each, Watched))
    for call in ("train_batch", "eval_batch", "predict"):
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        batch = weakref.ref(x)
        getattr(pipe, call)(*((x,) if call == "predict" else (x, y)))
        del x
        gc.collect()
        assert len(layer.given) >= 4, call
        assert batch() is None, call
        assert all(each() is None for each in layer.given), call
