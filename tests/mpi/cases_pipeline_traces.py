"""Models whose forward does not always do the same: what depends on the mode, and what trains nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import coordd.torch as cd
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import compare, doubles, in_one_piece, random, sgd


class _Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))


class _Detour(_Line):
    """Has a skip over two stages where it is not trained."""

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layers[0](x)
        x = self.layers[2](self.layers[1](first).tanh())
        out: Tensor = self.layers[3](x if self.training else x + first)
        return out


class _Frozen(_Line):
    """Two of its layers are not trained."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[1](self.layers[0](x).tanh())
        out: Tensor = self.layers[3](self.layers[2](x).tanh())
        return out


@ranks(2)
def case_a_skip_that_only_an_evaluation_takes() -> None:
    with doubles():
        torch.manual_seed(0)
        x, y, model = random(8, 6), torch.zeros(8, dtype=torch.long), _Detour()
        config = cd.PipelineConfig(microbatches=4, schedule="interleaved", layers_per_proc=[1, 1, 1, 1])
        pipe = cd.Pipeline(copy.deepcopy(model), config, optimizer=sgd, loss=functional.cross_entropy)
        assert_close(pipe.train_batch(x, y), in_one_piece(model, x, y, 4, 1)[0], rtol=1e-12, atol=1e-12)
        compare(pipe, model)
        wanted = functional.cross_entropy(model.eval()(x), y).item()
        assert_close(pipe.eval_batch(x, y), wanted, rtol=1e-12, atol=1e-12)


@ranks(2)
def case_what_a_model_does_without_gradients_is_not_trained() -> None:
    with doubles():
        torch.manual_seed(0)
        x, y, model = random(8, 6), torch.zeros(8, dtype=torch.long), _Frozen()
        config = cd.PipelineConfig(microbatches=4, split="layers")
        with pytest.raises(cd.ArgumentError, match="no_grad"):
            cd.Pipeline(copy.deepcopy(model), config, optimizer=sgd, loss=functional.cross_entropy)
        pipe = cd.Pipeline(copy.deepcopy(model), config, optimizer=sgd, loss=functional.cross_entropy, example=x)
        losses = [pipe.train_batch(x, y) for _ in range(2)]
        assert_close(losses, in_one_piece(model, x, y, 4, 2), rtol=1e-12, atol=1e-12)
        compare(pipe, model)
