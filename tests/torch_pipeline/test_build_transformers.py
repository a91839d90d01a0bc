"""Models as their authors published them are built in parts, with the weights of the whole."""

from __future__ import annotations

import pytest
from torch import nn

from tests.torch_pipeline.test_build import check_quarters

transformers = pytest.importorskip("transformers")

_SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=40)  # noqa: C408


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, tie_word_embeddings=True))


def t5() -> nn.Module:
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=40)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**_SMALL, image_size=16, patch_size=8))


@pytest.mark.parametrize("builder", [gpt2, bert, llama, t5, vit])
def test_quarters_equal_the_plain_build_bit_by_bit(builder) -> None:
    check_quarters(builder)
