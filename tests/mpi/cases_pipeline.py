"""Models trained in stages, against the same model in one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import coordd.torch as cd
from coordd.pipeline.microbatch import cut
from tests.mpi.cases import ranks
from tests.mpi.running import Statistics

FLUSHING = ("gpipe", "1f1b", "1f1b-eager", "interleaved", "zb-h1", "zb-h2", "zb-lean", "zb-h2-lean", "zb-v")


@contextmanager
def doubles() -> Iterator[None]:
    """Numbers so exact that a sum in another order does not matter."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Dense(nn.Module):
    """A layer that passes a dict on, with a number and None in it."""

    def __init__(self, takes: int, gives: int) -> None:
        super().__init__()
        self.linear = nn.Linear(takes, gives)

    def forward(self, given: Any) -> dict[str, Any]:
        values = given if isinstance(given, dict) else {"x": given, "depth": 0, "mask": None}
        return {**values, "x": torch.tanh(self.linear(values["x"])), "depth": values["depth"] + 1}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        assert (given["depth"], given["mask"]) == (7, None)
        return self.linear(given["x"])


class Skips(nn.Module):
    """The first layer's result is taken by the last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(7))
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            first = x if number == 0 else first
        return self.head(torch.cat([x, first], 1))


class Tied(nn.Module):
    """The last layer has the first one's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(7))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def plain() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 3))


def normed() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6))), nn.Linear(6, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "dicts": lambda: nn.Sequential(*(Dense(6, 6) for _ in range(7)), Head()),
    "skips": Skips,
    "tied": Tied,
    "normed": normed,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pipeline(model: Any, example: Any = None, **settings: Any) -> cd.Pipeline:
    settings.setdefault("split", "layers")
    config = cd.PipelineConfig(microbatches=4, **settings)
    return cd.Pipeline(model, config, optimizer=sgd, loss=functional.cross_entropy, example=example)


def in_one_piece(model: nn.Module, x: torch.Tensor, y: torch.Tensor, microbatches: int, steps: int) -> list[float]:
    """Trains with gradients that are accumulated over the same microbatches, and statistics of the whole batch."""
    optimizer, losses, statistics = sgd(model.parameters()), [], Statistics(model)
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in cut(len(x), microbatches):
            loss = functional.cross_entropy(model(x[part]), y[part]) * len(x[part]) / len(x)
            loss.backward()
            total += loss.item()
        optimizer.step()
        statistics.update()
        losses.append(total)
    return losses


def compare(pipe: cd.Pipeline, model: nn.Module) -> None:
    """Weights and buffers are equal."""
    wanted = model.state_dict()
    for name, value in pipe.state_dict().items():
        assert_close(value, wanted[name], rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def trained(name: str, **settings: Any) -> None:
    """Trains a model both ways, and compares losses, weights and predictions."""
    rows, replicas = 18, cd.PipelineConfig(**settings).widest
    x, y = random(rows, 6), torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(2))
    model = build(name)
    pipe = pipeline(copy.deepcopy(model), **settings)
    losses = [pipe.train_batch(x, y) for _ in range(2)]
    assert_close(losses, in_one_piece(model, x, y, 4 * replicas, 2), rtol=1e-12, atol=1e-12)
    compare(pipe, model)
    model.eval()
    assert_close(pipe.predict(x), model(x), rtol=1e-12, atol=1e-12)
    assert_close(pipe.eval_batch(x, y), functional.cross_entropy(model(x), y).item(), rtol=1e-12, atol=1e-12)


@ranks(2, deadline=110)
def case_every_schedule_and_model_trains_as_in_one_piece() -> None:
    with doubles():
        for name in [*MODELS][::2]:
            for schedule in FLUSHING:
                trained(name, schedule=schedule)


@ranks(2, deadline=110)
def case_every_schedule_and_other_model_trains_as_in_one_piece() -> None:
    with doubles():
        for name in [*MODELS][1::2]:
            for schedule in FLUSHING:
                trained(name, schedule=schedule)


@ranks(2, 4, deadline=110)
def case_activations_may_be_computed_anew() -> None:
    with doubles():
        for name in MODELS:
            trained(name, schedule="1f1b", recompute=True, data_parallel=cd.size() // 2)


@ranks(4, deadline=110)
def case_replicas_train_as_in_one_piece() -> None:
    with doubles():
        for name in [*MODELS][::2]:
            for schedule in FLUSHING:
                trained(name, schedule=schedule, data_parallel=2)


@ranks(4, deadline=110)
def case_replicas_of_other_models_train_as_in_one_piece() -> None:
    with doubles():
        for name in [*MODELS][1::2]:
            for schedule in FLUSHING:
                trained(name, schedule=schedule, data_parallel=2)


@ranks(2, 4)
def case_a_builder_makes_only_what_is_needed() -> None:
    with doubles():
        model = build("tied")
        pipe = pipeline(lambda: build("tied"))
        whole, mine = model.state_dict(), pipe.state_dict()
        assert mine.keys() < whole.keys()
        assert all(torch.equal(value, whole[name]) for name, value in mine.items())
        x, y = random(9, 6), torch.zeros(9, dtype=torch.long)
        pipe.train_batch(x, y)
        in_one_piece(model, x, y, 4, 1)
        compare(pipe, model)


@ranks(2, 4)
def case_gradients_are_clipped_together() -> None:
    with doubles():
        model = build("tied")
        pipe = pipeline(copy.deepcopy(model), clip_norm=0.05, data_parallel=cd.size() // 2)
        x, y = random(16, 6), torch.zeros(16, dtype=torch.long)
        pipe.train_batch(x, y)
        functional.cross_entropy(model(x), y).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.1
        sgd(model.parameters()).step()
        for name, value in pipe.state_dict().items():
            assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-9)


@ranks(2, 4)
def case_running_statistics_are_those_of_the_whole_batch() -> None:
    with doubles():
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3))
        pipe = pipeline(copy.deepcopy(model), data_parallel=cd.size() // 2, layers_per_proc=[1, 2])
        x, y = random(19, 6), torch.zeros(19, dtype=torch.long)
        for _ in range(2):
            pipe.train_batch(x, y)
            model(x)
        for name, value in pipe.state_dict().items():
            if "running" in name or "tracked" in name:
                assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-12)


@ranks(2)
def case_stale_weights_follow_their_closed_forms() -> None:
    with doubles():
        x, y = random(12, 6), torch.zeros(12, dtype=torch.long)
        model = build("plain")
        pipe = pipeline(copy.deepcopy(model), schedule="2bw")
        before = copy.deepcopy(model)
        optimizer = sgd(model.parameters())
        for _ in range(4):  # each gradient is that of the weights before the last step
            pipe.train_batch(x, y)
            before.zero_grad()
            functional.cross_entropy(before(x), y).backward()
            for parameter, older in zip(model.parameters(), before.parameters(), strict=True):
                parameter.grad = older.grad
            before = copy.deepcopy(model)
            optimizer.step()
        compare(pipe, model)


@ranks(2)
def case_each_microbatch_may_be_a_step() -> None:
    """PipeDream: microbatch ``t`` meets the weights after ``t - 1`` steps in the first of two stages."""
    with doubles():
        x, y = random(8, 6), torch.zeros(8, dtype=torch.long)
        model = build("plain")
        pipe = pipeline(copy.deepcopy(model), schedule="pipedream", layers_per_proc=[4, 5])
        pipe.train_batch(x, y)
        optimizer = sgd(model.parameters())
        stale = copy.deepcopy(model[:4])
        for part in cut(8, 4):
            older = copy.deepcopy(model[:4])
            functional.cross_entropy(model[4:](stale(x[part])), y[part]).backward()
            for parameter, used in zip(model[:4].parameters(), stale.parameters(), strict=True):
                parameter.grad = used.grad
            optimizer.step()
            optimizer.zero_grad()
            stale = older
        compare(pipe, model)


@ranks(2)
def case_fit_learns_and_tells_how_far_it_is() -> None:
    x = random(40, 6)
    y = (x[:, 0] > 0).long()
    pipe = pipeline(build("plain"))
    history = pipe.fit(x, y, epochs=8, batch_size=16, validation_data=(x, y), verbose=False)
    assert len(history.loss) == len(history.val_loss) == 8
    assert history.val_loss[-1] < history.val_loss[0]
    assert pipe.predict(x).shape == (40, 3)
