"""Models as `transformers` publishes them, trained in stages, against the same models in one piece.

Imported where they are needed: that takes seconds, and the ranks of most cases never need it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import coordd.torch as cd
from coordd.pipeline.microbatch import cut
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import doubles, sgd
from tests.mpi.running import Statistics

MICROBATCHES = 4
STEPS = ((10, 8), (9, 6))
"""Rows and words of each step's batch: microbatches are uneven, and shapes change."""
EXACT = 1e-10

published = ranks(2, 4, deadline=180)


def own(output: Any, _: None) -> torch.Tensor:
    """The loss that the model finds by itself, from labels among its inputs."""
    return output.loss


def outside(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits.flatten(0, -2), labels.flatten())


def batches(make: Callable[[int, int], dict[str, Any]], loss: Any) -> list[tuple[dict[str, Any], Any]]:
    """Inputs and targets of all steps; the labels are where the loss looks for them."""
    torch.manual_seed(1)
    made = [make(*shape) for shape in STEPS]
    return [(x, None) if loss is own else (x, x.pop("labels")) for x in made]


def in_one_piece(model: nn.Module, given: Any, loss: Any, parts: int) -> tuple[list[float], dict[str, Any]]:
    """Trains without stages, each batch in so many parts; returns losses, and all that the model holds at the end."""
    optimizer, losses, statistics = sgd(model.parameters()), [], Statistics(model)
    for x, y in given:
        optimizer.zero_grad()
        losses.append(0.0)
        rows = len(next(iter(x.values())))
        for part in cut(rows, parts):
            taken = {name: value[part] for name, value in x.items()}
            found = loss(model(**taken), None if y is None else y[part])
            (found.double() * (part.stop - part.start) / rows).backward()
            losses[-1] += found.item() * (part.stop - part.start) / rows
        optimizer.step()
        statistics.update()
    return losses, model.state_dict()


def trained(
    name: str, batch: str, *, schedule: str = "1f1b", loss: Any = own, parts: int = 1, **settings: Any
) -> tuple[cd.Pipeline, nn.Module]:
    """Trains a model both ways, in doubles, and compares losses and all that it holds after the last step.

    Args:
        name: of the model.
        batch: the name of what makes one.
        schedule: of the stages.
        loss: `own` or `outside`.
        parts: into how many parts the plain model's batches are cut.
        settings: further ones of the pipeline.
    """
    from tests.torch_pipeline import published as models

    with doubles():
        given = batches(getattr(models, batch), loss)
        torch.manual_seed(0)
        model = getattr(models, name)().double().train()
        config = cd.PipelineConfig(microbatches=MICROBATCHES, schedule=schedule, split="layers", **settings)
        pipe = cd.Pipeline(copy.deepcopy(model), config, optimizer=sgd, loss=loss, example=given[0][0])
        losses = [pipe.train_batch(x, y) for x, y in given]
        wanted, state = in_one_piece(model, given, loss, parts)
        assert_close(losses, wanted, rtol=EXACT, atol=EXACT)
        for key, value in pipe.state_dict().items():
            assert_close(value, state[key], rtol=EXACT, atol=EXACT, msg=lambda text, key=key: f"{key}: {text}")
        return pipe, model


@published
def case_gpt2_with_its_own_loss() -> None:
    """Its embedding is its head, too; its loss is computed in floats, so that of the whole batch rounds differently."""
    trained("gpt2", "masked", parts=MICROBATCHES)


@published
def case_llama_with_a_loss_outside() -> None:
    trained("llama", "masked", schedule="zb-h1", loss=outside)


@published
def case_bert_in_several_stages_a_rank() -> None:
    trained("bert", "masked", schedule="interleaved", loss=outside, chunks=1 + (cd.size() == 2))


@published
def case_t5_whose_decoder_reads_the_encoder_everywhere() -> None:
    trained("t5", "words", parts=1)


@published
def case_vit_with_its_own_loss() -> None:
    from tests.torch_pipeline import published as models

    pipe, model = trained("vit", "pictures", schedule="gpipe")
    with doubles():
        x = models.pictures(10, 0)
        wanted = model.eval()(**x)
        found = pipe.predict(x)
        assert type(found) is type(wanted)
        assert_close(found.logits, wanted.logits, rtol=EXACT, atol=EXACT)
        assert_close(pipe.eval_batch(x, None), wanted.loss.item(), rtol=EXACT, atol=EXACT)
        history = pipe.fit(x, None, epochs=4, batch_size=10, verbose=False)
        assert history.loss[-1] < history.loss[0]


@published
def case_resnet_normalised_by_microbatches() -> None:
    trained("resnet", "pictures", parts=MICROBATCHES)


@ranks(4, deadline=180)
def case_resnet_whose_replicas_share_statistics() -> None:
    trained("resnet", "pictures", parts=2 * MICROBATCHES, data_parallel=2, recompute=True)


@ranks(2, deadline=240)
def case_architectures_of_other_kinds_match_one_process() -> None:
    """An encoder-decoder as a builder, a decoder that returns a cache by default, a state-space model."""
    from coordd_tools.architectures.models import ARCHITECTURES
    from coordd_tools.architectures.worker import compared

    random.seed(cd.rank())  # as in processes of which none has seeded it
    for name, built in (("BartForConditionalGeneration", False), ("OPTForCausalLM", True), ("MambaForCausalLM", False)):
        assert compared(ARCHITECTURES[name], built=built)["outcome"] == "match", name
