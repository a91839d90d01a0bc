"""Models of `transformers` from their public code, tiny and with random weights, unchanged."""

from __future__ import annotations

import pytest
import torch

from coordd_torch.pipeline.capture import capture
from tests.torch_pipeline.captures import assert_same, assert_whole, cut, step

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

SMALL = {
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
}
TEXT = {"vocab_size": 32, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}


def words(count, length):
    tokens = torch.randint(2, 32, (count, length))
    return {"input_ids": tokens, "labels": tokens}


def masked(count, length):
    return words(count, length) | {"attention_mask": (torch.arange(length) < length - 1).long().repeat(count, 1)}


def pictures(count, _length):
    return {"pixel_values": torch.randn(count, 3, 16, 16), "labels": torch.arange(count) % 2}


def gpt2():
    config = transformers.GPT2Config(n_layer=3, n_head=2, n_embd=16, n_positions=16, use_cache=False, **TEXT)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(**SMALL, **TEXT, num_key_value_heads=1, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **TEXT))


def t5():
    config = transformers.T5Config(
        num_layers=2, num_heads=2, d_model=16, d_kv=8, d_ff=32, vocab_size=32, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=16, patch_size=8))


@pytest.mark.parametrize(
    ("make", "batch"), [(gpt2, words), (llama, words), (bert, masked), (t5, words), (vit, pictures)]
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
