"""Pipelines that go on from what was saved."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import coordd.torch as cd
from coordd_torch.pipeline.checkpoint import load_into
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import build, compare, doubles, in_one_piece, pipeline, random, sgd

X, Y = random(18, 6), torch.zeros(18, dtype=torch.long)


def saved(pipe: cd.Pipeline) -> str:
    folder: str = cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else None, 0, name="folder")
    pipe.save(folder)
    return folder


def weights(pipe: cd.Pipeline) -> dict[str, torch.Tensor]:
    return copy.deepcopy(pipe.state_dict())


@ranks(2, 4)
def case_what_was_saved_goes_on_at_another_number_of_stages() -> None:
    with doubles():
        x = X.double()
        pipe = pipeline(build("tied"), data_parallel=cd.size() // 2)
        pipe.train_batch(x, Y)
        folder = saved(pipe)
        model = build("tied")
        load_into(model, folder)
        compare(pipe, model)
        again = pipeline(lambda: build("tied"), schedule="zb-v", data_parallel=cd.size() // 2)
        again.load(folder)
        compare(again, model)
        assert_close(again.train_batch(x, Y), pipe.train_batch(x, Y), rtol=1e-12, atol=1e-12)

        cd.barrier()


@ranks(2)
def case_older_weights_are_not_those_of_what_was_loaded() -> None:
    with doubles():
        x = X.double()
        folder = saved(pipeline(build("plain")))
        pipe = pipeline(build("plain"), schedule="2bw")
        for _ in range(2):
            pipe.train_batch(x * 9, Y)
        pipe.load(folder, optimizer=False)
        pipe.optimizers[0].state.clear()
        pipe.train_batch(x, Y)
        model = build("plain")
        in_one_piece(model, x, Y, 4, 1)
        compare(pipe, model)


@ranks(2)
def case_random_numbers_go_on() -> None:
    def dropping() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))

    def rows(pipe: cd.Pipeline) -> list[float]:
        seen, train = [], pipe.train_batch

        def watched(x: Any, y: Any) -> float:
            seen.append(x[0, 0].item())
            return train(x, y)

        pipe.train_batch = watched  # type: ignore[method-assign]  # it is listened to for a while
        pipe.fit(X, Y, batch_size=9, verbose=False)
        pipe.train_batch = train  # type: ignore[method-assign]  # as above
        return seen

    pipe, again = (pipeline(dropping(), seed=1) for _ in range(2))
    first = rows(pipe)
    again.load(saved(pipe))
    assert again.epochs == 1
    assert_close(again.train_batch(X, Y), pipe.train_batch(X, Y))
    second = rows(pipe)
    assert rows(again) == second != first


@ranks(2)
def case_all_ranks_load_or_none() -> None:
    pipe = pipeline(build("plain"))
    pipe.train_batch(X, Y)
    folder = saved(pipe)

    def refused(text: str, model: nn.Module, optimizer: Any = sgd) -> cd.Pipeline:
        config = cd.PipelineConfig(split="layers")
        other = cd.Pipeline(model, config, optimizer=optimizer, loss=functional.cross_entropy)
        before = weights(other)
        with pytest.raises(cd.ArgumentError, match=text):
            other.load(folder)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        return other

    wide = build("plain")
    wide[-1] = nn.Linear(6, 5)  # the last rank's
    refused(r"has other shapes than the model: '8.bias \(here \(5,\), there \(3,\)\)'", wide)
    refused(r"the model has no '8.bias', '8.weight'", build("plain")[:-1])
    swapped = refused("has the state of SGD, which AdamW cannot go on with", build("plain"), torch.optim.AdamW)
    swapped.load(folder, optimizer=False)
    assert all(torch.equal(value, pipe.state_dict()[name]) for name, value in swapped.state_dict().items())
    assert swapped.train_batch(X, Y) > 0
    cd.barrier()
