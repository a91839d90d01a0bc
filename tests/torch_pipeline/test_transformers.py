"""Models of `transformers` from their public code, tiny and with random weights, unchanged."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from coordd_torch.pipeline.capture import capture
from tests.torch_pipeline.captures import assert_same, assert_whole, cut, step

pytest.importorskip("transformers")

from tests.torch_pipeline.published import bert, gpt2, llama, masked, pictures, resnet, t5, vit, words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (partial(gpt2, 0.1), words),
        (llama, words),
        (partial(bert, 0.1), masked),
        (partial(t5, 0.1), words),
        (partial(vit, 0.1), pictures),
        (resnet, pictures),
    ],
)
def test_stages_do_what_the_model_does(make, batch):
    torch.manual_seed(0)
    model = make().train()
    captured = capture(model, batch(3, 8))
    assert captured.way == "export"
    for count in (2, 4):
        stages = cut(captured, count)
        assert_whole(model, stages)
        for size, length in ((3, 8), (5, 6)):
            # A layer that several stages have adds up its gradients in another order.
            plain, staged = step(model, captured, stages, batch(size, length), lambda out: out.loss)
            assert type(staged[0]) is type(plain[0])
            assert_same(plain, staged, tolerance=1e-6)
    assert len(captured.traces.found) == 1
    for each in (model, *stages):
        each.eval()
    assert_same(*step(model, captured, stages, batch(1, 7), lambda out: out.loss), tolerance=1e-6)
