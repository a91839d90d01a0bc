"""Models of `transformers` from their public code, tiny and with random weights, unchanged; and batches for them."""

from __future__ import annotations

import torch
import transformers

SMALL = {
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TEXT = {"vocab_size": 32, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def words(count, length):
    tokens = torch.randint(2, 32, (count, length))
    return {"input_ids": tokens, "labels": tokens}


def masked(count, length):
    """Rows of different lengths."""
    seen = torch.arange(length) < length - torch.arange(count)[:, None] % 3
    return words(count, length) | {"attention_mask": seen.long()}


def pictures(count, _length):
    return {"pixel_values": torch.randn(count, 3, 16, 16), "labels": torch.arange(count) % 2}


def gpt2(dropout=0.0):
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, use_cache=False, **drops, **TEXT)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(**SMALL, **TEXT, num_key_value_heads=1, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def bert(dropout=0.0):
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL | {"hidden_dropout_prob": dropout}, **TEXT))


def t5(dropout=0.0):
    config = transformers.T5Config(
        num_layers=2, num_heads=2, d_model=16, d_kv=8, d_ff=32, vocab_size=32, decoder_start_token_id=0,
        dropout_rate=dropout, use_cache=False
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit(dropout=0.0):
    sizes = SMALL | {"hidden_dropout_prob": dropout}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))


def resnet():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return transformers.ResNetForImageClassification(config)
