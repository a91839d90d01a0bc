"""What is hardly enough for a pipeline, or not: it works, or all ranks say why not, and go on."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import coordd.torch as cd
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import FLUSHING, build, compare, doubles, in_one_piece, pipeline, random, sgd


@ranks(2, 4, deadline=60)
def case_fewer_microbatches_than_stages() -> None:
    """As many as are wanted, or as there are rows for: one microbatch goes through four stages as well."""
    with doubles():
        for schedule in FLUSHING:
            for rows in (1, 3):
                x, y = random(rows, 6), torch.zeros(rows, dtype=torch.long)
                model = build("skips")
                pipe = pipeline(copy.deepcopy(model), schedule=schedule)
                losses = [pipe.train_batch(x, y) for _ in range(2)]
                assert_close(losses, in_one_piece(model, x, y, rows, 2), rtol=1e-12, atol=1e-12)
                compare(pipe, model)


@ranks(2, 4)
def case_ranks_that_do_not_make_equal_pipelines() -> None:
    with pytest.raises(cd.ArgumentError, match=f"{cd.size()} ranks do not make 3 equal pipelines: start 3"):
        pipeline(build("plain"), data_parallel=3)
    with pytest.raises(cd.ArgumentError, match="layers_per_proc has 3 stages, but"):
        pipeline(build("plain"), layers_per_proc=[3, 3, 3])
    pipe = pipeline(build("plain"), data_parallel=cd.size())  # replicas of all of it
    assert pipe.train_batch(random(8, 6), torch.zeros(8, dtype=torch.long)) > 0


@ranks(2, 4)
def case_batches_that_differ_are_told_on_all_ranks_and_nothing_is_lost() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        model = build("plain")
        pipe = pipeline(copy.deepcopy(model), seed=1)
        last = cd.rank() == cd.size() - 1
        with pytest.raises(cd.ArgumentError, match=f"rows .18 on rank.*, 2 on rank {cd.size() - 1}"):
            pipe.train_batch(*((x[:2], y[:2]) if last else (x, y)))
        with pytest.raises(cd.ArgumentError, match=r"inputs .* on rank"):
            pipe.train_batch(x.flip(0) if last else x, y)
        with pytest.raises(cd.ArgumentError, match="what they call"):
            (pipe.eval_batch if last else pipe.train_batch)(x, y)
        with pytest.raises(cd.ArgumentError, match="equally many rows to be cut into microbatches, not 17, 18"):
            pipe.train_batch(x, y[:17])
        with pytest.raises(cd.ArgumentError, match="not none"):
            pipe.predict(3)
        assert_close(pipe.train_batch(x, y), in_one_piece(model, x, y, 4, 1)[0], rtol=1e-12, atol=1e-12)
        compare(pipe, model)


@ranks(2, deadline=60)
def case_training_goes_on_after_different_calls() -> None:
    """Also where ranks found a deadlock, because one was in no call that is compared."""
    with doubles(), tempfile.TemporaryDirectory() as folder:
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        model = build("plain")
        pipe = pipeline(copy.deepcopy(model), seed=1)

        def fit() -> Any:
            return pipe.fit(x, y, batch_size=18, shuffle=False, verbose=False)

        compared = [lambda: pipe.train_batch(x, y), lambda: pipe.eval_batch(x, y), lambda: pipe.predict(x), fit]
        deadlocks = [(fit, lambda: pipe.save(folder)), (cd.barrier, fit), (compared[0], cd.barrier)]
        losses = []
        for mine, other in (*itertools.combinations(compared, 2), *deadlocks):
            losses.append(pipe.train_batch(x, y))
            with pytest.raises((cd.ArgumentError, cd.MismatchError), match=r"what they call|wait for each other"):
                (other if cd.rank() else mine)()
            losses += fit().loss
        with pytest.raises(cd.ArgumentError, match=r"differ in batch size .*; epochs "):
            pipe.fit(x, y, batch_size=9 + cd.rank(), epochs=1 + cd.rank())
        losses.append(pipe.train_batch(x, y))
        assert_close(losses, in_one_piece(model, x, y, 4, len(losses)), rtol=1e-12, atol=1e-12)
        compare(pipe, model)


@ranks(2, 4, deadline=60)
def case_calls_are_comparable_that_compare_what_some_ranks_share() -> None:
    """Tied parameters, and replicas, which `train_batch` compares, and `fit` does not."""
    x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
    for name, replicas in (("tied", 1), ("plain", cd.size() // 2), ("tied", cd.size() // 2)):
        pipe = pipeline(build(name), data_parallel=replicas, seed=1)
        calls = [
            functools.partial(pipe.train_batch, x, y),
            functools.partial(pipe.fit, x, y, batch_size=18, verbose=False),
            functools.partial(pipe.predict, x),
            functools.partial(pipe.verify_parity, x, y),
        ]
        for mine, other in itertools.combinations(calls, 2):
            with pytest.raises(cd.ArgumentError, match="the ranks of a pipeline differ in what they call"):
                (other if cd.rank() else mine)()
            for call in calls:
                call()


@ranks(2)
def case_settings_of_other_types_are_told_by_their_texts() -> None:
    x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
    pipe = pipeline(build("plain"))
    pipe.fit(x, y, batch_size=np.int64(9) if cd.rank() else 9, verbose=False)
    with pytest.raises(cd.ArgumentError, match=r"differ in shuffle \(True on rank 0, 1 on rank 1\): all of them must"):
        pipe.fit(x, y, batch_size=9, shuffle=1 if cd.rank() else True, verbose=False)


@ranks(2)
def case_validation_data_of_another_shape_is_told() -> None:
    x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
    held_out = (x, y[:, None] if cd.rank() else y)
    with pytest.raises(
        cd.ArgumentError, match=r"validation data \(\(18, 6\), \(18,\) \w+ on rank 0, .* \(18, 1\) \w+ on"
    ):
        pipeline(build("plain")).fit(x, y, batch_size=9, verbose=False, validation_data=held_out)


@ranks(2)
def case_epochs_of_a_fit_that_has_failed_do_not_count() -> None:
    """Ranks may have completed different numbers of them, and the rows of an epoch depend on its number."""
    x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
    pipe = pipeline(build("plain"))
    train = pipe.train_batch

    def interrupted(*batch: torch.Tensor) -> float:
        train(*batch)
        raise KeyError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe, "train_batch", interrupted if cd.rank() else train)
        with pytest.raises((KeyError, cd.RefusedError)):
            pipe.fit(x, y, batch_size=18, verbose=False)
    assert pipe.epochs == 0
    pipe.fit(x, y, batch_size=9, epochs=2, verbose=False)
    assert pipe.epochs == 2


@ranks(2, 4, deadline=60)
def case_what_waits_on_the_host_trains_as_in_one_piece() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        for schedule, recompute in (("1f1b", False), ("1f1b", True), ("zb-v", False), ("2bw", False)):
            model = build("tied")
            config = cd.PipelineConfig(
                microbatches=4, split="layers", schedule=schedule, recompute=recompute, offload=True
            )
            pipe = cd.Pipeline(copy.deepcopy(model), config, optimizer=sgd, loss=functional.cross_entropy)
            assert_close(pipe.train_batch(x, y), in_one_piece(model, x, y, 4, 1)[0], rtol=1e-12, atol=1e-12)
            compare(pipe, model)


@ranks(2)
def case_a_schedule_that_wants_many_microbatches_evaluates_one_row_and_leaves_a_rest_out() -> None:
    with doubles():
        x, y = random(9, 6), torch.zeros(9, dtype=torch.long)
        model = build("plain")
        pipe = pipeline(copy.deepcopy(model), schedule="2bw")
        assert_close(pipe.predict(x[:1]), model(x[:1]), rtol=1e-12, atol=1e-12)
        history = pipe.fit(x, y, batch_size=4, validation_data=(x[:1], y[:1]), shuffle=False, verbose=False)
        assert len(history.val_loss) == 1
        assert next(iter(pipe.stages.values())).steps == 2


@ranks(2)
def case_layers_may_thaw() -> None:
    with doubles():
        x, y = random(18, 6), torch.zeros(18, dtype=torch.long)
        model = build("plain").requires_grad_(requires_grad=False)
        model[-1].requires_grad_(requires_grad=True)
        mine = copy.deepcopy(model)
        pipe = pipeline(mine)
        for each in (model, mine):
            each[0].requires_grad_(requires_grad=True)
        losses = [pipe.train_batch(x, y) for _ in range(2)]
        assert_close(losses, in_one_piece(model, x, y, 4, 2), rtol=1e-12, atol=1e-12)
        compare(pipe, model)


@ranks(2)
def case_what_would_not_be_trained_is_refused() -> None:
    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heat = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(output * self.heat, y)

    loss, config = Warm(), cd.PipelineConfig(split="layers")
    with pytest.raises(cd.ArgumentError, match="loss= has parameters that no stage would train: heat"):
        cd.Pipeline(build("plain"), config, optimizer=sgd, loss=loss)
    pipe = cd.Pipeline(build("plain"), config, optimizer=sgd, loss=loss.requires_grad_(requires_grad=False))
    x, y = random(8, 6), torch.zeros(8, dtype=torch.long)
    with torch.no_grad(), pytest.raises(cd.ArgumentError, match="gradients are switched off here"):
        pipe.train_batch(x, y)
    assert pipe.train_batch(x, y) > 0


class Recurrent(nn.Module):
    """Returns its hidden state as well; the rows of that are in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        out, state = self.lstm(self.first(x))
        return self.last(out), state


@ranks(2)
def case_the_state_of_a_recurrent_layer_is_predicted() -> None:
    with doubles():
        torch.manual_seed(0)
        model, x = Recurrent(), random(8, 5, 6)
        config = cd.PipelineConfig(microbatches=4, split="layers")
        pipe = cd.Pipeline(
            copy.deepcopy(model), config, optimizer=sgd, loss=lambda output, y: functional.mse_loss(output[0], y)
        )
        assert_close(pipe.predict(x), model(x), rtol=1e-12, atol=1e-12)
        wanted = functional.mse_loss(model(x)[0], y := torch.zeros(8, 5, 3)).item()
        assert_close(pipe.train_batch(x, y), wanted, rtol=1e-12, atol=1e-12)


@ranks(2)
def case_an_optimizer_that_computes_losses_is_refused_on_all_ranks() -> None:
    """Also if only one rank has chosen it."""
    config = cd.PipelineConfig(microbatches=4, split="layers")
    for choosing in ({0, 1}, {0}, {1}):
        make = torch.optim.LBFGS if cd.rank() in choosing else sgd
        error = cd.ArgumentError if cd.rank() in choosing else cd.RefusedError
        with pytest.raises(error, match="closure"):
            cd.Pipeline(build("plain"), config, optimizer=make, loss=functional.cross_entropy)
    assert cd.allreduce(torch.ones(1), op=cd.Sum) == cd.size()
