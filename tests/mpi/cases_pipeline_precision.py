"""Numbers of fewer bits in pipelines: compressed messages, autocast, loss scaling. And losses that count by tokens."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import coordd.torch as cd
from coordd import api
from coordd.pipeline.microbatch import cut
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import build, compare, doubles, in_one_piece, random, sgd

WIDTH = 64


def wide() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


class Exact(nn.Linear):
    """A layer that is left out of autocast, also on the way back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def data(rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    x = random(rows, WIDTH)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def pipeline(model: nn.Module, *, scaler: Any = None, weight: Any = None, **settings: Any) -> cd.Pipeline:
    config = cd.PipelineConfig(microbatches=4, split="layers", **settings)
    loss = functional.cross_entropy
    return cd.Pipeline(model, config, optimizer=sgd, loss=loss, scaler=scaler, weight=weight)


def sent(pipe: cd.Pipeline, x: torch.Tensor, y: torch.Tensor) -> int:
    """The bytes that this rank sends in a step."""
    counted = api.operations().daemon._loop._mailbox.bytes
    before = counted["send"]
    pipe.train_batch(x, y)
    return counted["send"] - before


@ranks(2, deadline=60)
def case_compressed_activations_and_gradients_are_fewer_bytes_and_train_as_well() -> None:
    x, y = data(128)
    plain, losses = 0, {}
    for form, saved in ((None, 1.0), ("bf16", 1.9), ("int8", 3.5)):
        pipe = pipeline(wide(), compression=form)
        found = sent(pipe, x, y)  # activations of the first rank, gradients of the second
        plain = plain or found
        assert plain / found >= saved, (form, cd.rank())
        losses[form] = [pipe.train_batch(x, y) for _ in range(40)][-1]
    assert losses[None] < 0.8
    assert losses["bf16"] == pytest.approx(losses[None], rel=0.01)
    assert losses["int8"] == pytest.approx(losses[None], rel=0.01)
    with doubles():
        model = build("dicts")  # whose integers and None travel, too
        pipe = pipeline(copy.deepcopy(model))
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        pipe.train_batch(x, y)
        in_one_piece(model, x, y, 4, 1)
        compare(pipe, model)


@ranks(2, 4, deadline=60)
def case_autocast_around_all_of_it_is_that_of_a_plain_run() -> None:
    x, y = data()
    for schedule, recompute in (("1f1b", False), ("1f1b", True), ("zb-v", False)):
        model = wide()
        model.append(nn.Tanh()).append(Exact(3, 3)).insert(2, Exact(WIDTH, WIDTH))
        pipe = pipeline(copy.deepcopy(model), schedule=schedule, recompute=recompute)
        optimizer = sgd(model.parameters())
        with torch.autocast("cpu", torch.bfloat16):  # around several steps: weights are cast anew in each
            losses = [pipe.train_batch(x, y) for _ in range(3)]
        for step in range(3):
            optimizer.zero_grad()
            total = 0.0
            for part in cut(len(x), 4):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = functional.cross_entropy(model(x[part]), y[part])
                (loss / 4).backward()
                total += loss.item() / 4
            optimizer.step()
            assert_close(losses[step], total, rtol=1e-6, atol=1e-6)
        wanted = model.state_dict()
        for name, value in pipe.state_dict().items():
            assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


@ranks(2, 4, deadline=60)
def case_a_loss_scaler_skips_a_step_on_all_ranks_or_on_none() -> None:
    """What one stage finds in one microbatch is heard of by stages that have no part in it."""
    x, y = data(36)
    for schedule in ("gpipe", "zb-v", "2bw"):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        replicas = cd.size() // 2
        pipe = pipeline(wide(), scaler=scaler, schedule=schedule, data_parallel=replicas, clip_norm=1.0)
        last = max(pipe.stages) == len(pipe.layout.spans) - 1
        culprit = max(rank * has for rank, has in enumerate(cd.allgather_object(last)))
        scales = []
        for step in range(5):
            weights = {name: value.clone() for name, value in pipe.state_dict().items()}
            handle = _spoil(pipe) if step == 1 and cd.rank() == culprit else None
            pipe.train_batch(x, y)
            if handle:
                handle.remove()
            stays = [torch.equal(value, weights[name]) for name, value in pipe.state_dict().items()]
            assert all(stays) if step == 1 else not any(stays), (schedule, step, stays)
            scales.append(scaler.get_scale())
        assert scales == [1024.0, 512.0, 512.0, 1024.0, 1024.0], (schedule, scales)
        assert len(set(cd.allgather_object(scales[-1]))) == 1


def _spoil(pipe: cd.Pipeline) -> Any:
    """Makes one gradient of the last stage infinite, after what it would have spoilt of others."""
    parameter = list(pipe.stages[max(pipe.stages)].module.parameters())[-1]
    return parameter.register_hook(lambda gradient: torch.full_like(gradient, math.inf))


@ranks(2, deadline=60)
def case_a_scaled_loss_gives_the_gradients_of_a_plain_one() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        for name in ("tied", "skips"):
            model = build(name)
            pipe = pipeline(copy.deepcopy(model), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))
            losses = [pipe.train_batch(x, y) for _ in range(2)]
            assert_close(losses, in_one_piece(model, x, y, 4, 2), rtol=1e-12, atol=1e-12)
            compare(pipe, model)
            assert pipe.verify_parity(x, y) < 1e-12
    with pytest.raises(cd.ArgumentError, match="a scaler looks at the gradients of all stages"):
        pipeline(build("plain"), scaler=torch.amp.GradScaler("cpu"), schedule="pipedream")


@ranks(2)
def case_fp16_trains_under_autocast_and_a_scaler() -> None:
    x, y = data(64)
    pipe = pipeline(wide(), scaler=torch.amp.GradScaler("cpu"), compression="int8")
    with torch.autocast("cpu", torch.float16):
        losses = [pipe.train_batch(x, y) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]


@ranks(2, 4, deadline=60)
def case_ranks_with_other_scales_are_told() -> None:
    x, y = data()
    pipe = pipeline(wide(), scaler=torch.amp.GradScaler("cpu", init_scale=2.0 + cd.rank()))
    with pytest.raises(cd.ArgumentError, match="the scale of the loss"):
        pipe.train_batch(x, y)


def tokens(_: Any, y: torch.Tensor) -> torch.Tensor:
    return (y != -100).sum()


@ranks(2, 4, deadline=60)
def case_losses_may_count_by_tokens() -> None:
    """Rows are of different lengths, and one microbatch is of padding alone."""
    with doubles():
        x, y = random(16, 6), torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(3))
        y[:4] = y[9] = y[14] = -100
        for schedule in ("1f1b", "zb-v"):
            model = build("skips")
            replicas = cd.size() // 2
            pipe = pipeline(copy.deepcopy(model), schedule=schedule, weight=tokens, data_parallel=replicas)
            optimizer = sgd(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                assert pipe.verify_parity(x, y) < 1e-12
                assert_close(pipe.train_batch(x, y), loss.item(), rtol=1e-12, atol=1e-12)
                optimizer.step()
            compare(pipe, model)
            assert_close(pipe.eval_batch(x, y), functional.cross_entropy(model(x), y).item(), rtol=1e-12, atol=1e-12)
            assert_close(pipe.predict(x), model.eval()(x))  # there are no targets to weigh
            model.train()
