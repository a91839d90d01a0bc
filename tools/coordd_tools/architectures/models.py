"""The thirty architectures: unchanged classes of their packages, small, with random weights and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

__all__ = ["ARCHITECTURES", "Architecture"]

Batch = dict[str, Any]

_WORDS = 32
_WIDTH = 16
_IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_TEXT: dict[str, Any] = {"vocab_size": _WORDS, "max_position_embeddings": 32, **_IDS}
_BLOCKS: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_NO_DROPOUT: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
_SEQ2SEQ: dict[str, Any] = {
    "d_model": _WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 1,
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
}


@dataclass(frozen=True)
class Architecture:
    """An architecture to train.

    Attributes:
        name: of the class, or of timm's model.
        package: that publishes it.
        build: creates the model; its weights depend on the state of PyTorch's random generator.
        batch: creates the model's keyword arguments for a number of rows.
        loss: computes the loss from the model's output.
        dtype: of weights and inputs; some kernels do not support double precision.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], torch.Tensor]
    dtype: torch.dtype = torch.float64


def _of(module: str, name: str) -> Any:
    """Returns an attribute of a package, which is imported only when needed."""
    return getattr(import_module(module), name)


def _own(output: Any, _: Any) -> torch.Tensor:
    """Returns the loss that the model computes from the labels among its inputs."""
    found: torch.Tensor = output.loss
    return found


def _square(output: Any, _: Any) -> torch.Tensor:
    """Returns the mean square of the output, for models that compute no loss."""
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found.square().mean()


def _tokens(rows: int, length: int = 8) -> torch.Tensor:
    return torch.randint(2, _WORDS, (rows, length))


def _words(rows: int) -> Batch:
    tokens = _tokens(rows)
    return {"input_ids": tokens, "labels": tokens}


def _masked(rows: int) -> Batch:
    """Returns rows of different lengths, with a mask."""
    seen = torch.arange(8) < 8 - torch.arange(rows)[:, None] % 3
    return _words(rows) | {"attention_mask": seen.long()}


def _pair(rows: int) -> Batch:
    return {"input_ids": _tokens(rows), "labels": _tokens(rows, 6)}


def _pictures(rows: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": torch.arange(rows) % 2}


def _segments(rows: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, 32, 32), "labels": torch.randint(0, 2, (rows, 32, 32))}


def _image_and_text(rows: int) -> Batch:
    return {"input_ids": _tokens(rows), "pixel_values": torch.randn(rows, 3, 32, 32), "return_loss": True}


def _speech(rows: int) -> Batch:
    return {"input_values": torch.randn(rows, 800), "labels": torch.randint(1, _WORDS, (rows, 3))}


def _mel(rows: int) -> Batch:
    return {"input_features": torch.randn(rows, 8, 32), "labels": _tokens(rows, 6)}


def _spectrogram(rows: int) -> Batch:
    return {"input_values": torch.randn(rows, 32, 16), "labels": torch.arange(rows) % 2}


def _image(rows: int) -> Batch:
    return {"x": torch.randn(rows, 3, 32, 32)}


def _noisy(rows: int) -> Batch:
    return {
        "sample": torch.randn(rows, 4, 8, 8),
        "timestep": torch.arange(rows) * 7 % 100,
        "encoder_hidden_states": torch.randn(rows, 5, _WIDTH),
    }


def _noisy_classes(rows: int) -> Batch:
    return {
        "hidden_states": torch.randn(rows, 4, 8, 8),
        "timestep": torch.arange(rows) * 7 % 100,
        "class_labels": torch.arange(rows) % 5,
    }


def _transformers(name: str, config: str, batch: Callable[[int], Batch], **settings: Any) -> Architecture:
    def build() -> nn.Module:
        made: nn.Module = _of("transformers", name)(_of("transformers", config)(**settings))
        return made

    return Architecture(name, "transformers", build, batch, _own)


def _single(name: str, config: str, batch: Callable[[int], Batch], **settings: Any) -> Architecture:
    """Returns a single-precision architecture: on CPUs, the experts' kernel supports no other dtype."""
    return replace(_transformers(name, config, batch, **settings), dtype=torch.float32)


def _clip() -> Architecture:
    def build() -> nn.Module:
        text = _of("transformers", "CLIPTextConfig")(**_BLOCKS, **_TEXT)
        vision = _of("transformers", "CLIPVisionConfig")(**_BLOCKS, image_size=32, patch_size=8)
        made: nn.Module = _of("transformers", "CLIPModel")(
            _of("transformers", "CLIPConfig")(
                text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8
            )
        )
        return made

    return Architecture("CLIPModel", "transformers", build, _image_and_text, _own)


def _timm(name: str, **settings: Any) -> Architecture:
    def build() -> nn.Module:
        made: nn.Module = _of("timm", "create_model")(name, pretrained=False, num_classes=4, **settings)
        return made

    return Architecture(name, "timm", build, _image, _square)


def _mixer() -> nn.Module:
    made: nn.Module = _of("timm.models.mlp_mixer", "MlpMixer")(
        num_classes=4, img_size=32, patch_size=8, embed_dim=_WIDTH, num_blocks=3
    )
    return made


def _dense() -> nn.Module:
    made: nn.Module = _of("torchvision.models", "DenseNet")(
        growth_rate=4, block_config=(2, 2, 2), num_init_features=8, num_classes=4
    )
    return made


def _mobile() -> nn.Module:
    made: nn.Module = _of("torchvision.models", "mobilenet_v3_small")(num_classes=4, dropout=0.0)
    return made


def _unet() -> nn.Module:
    made: nn.Module = _of("diffusers", "UNet2DConditionModel")(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=_WIDTH,
        attention_head_dim=4,
    )
    return made


def _dit() -> nn.Module:
    made: nn.Module = _of("diffusers", "DiTTransformer2DModel")(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=100,
        norm_num_groups=1,
    )
    for module in made.modules():
        if hasattr(module, "dropout_prob"):  # drops labels at random, and has no setting
            vars(module)["dropout_prob"] = 0.0
    return made


_MODELS = (
    _transformers("BartForConditionalGeneration", "BartConfig", _pair, **_TEXT, **_SEQ2SEQ),
    _transformers(
        "WhisperForConditionalGeneration", "WhisperConfig", _mel, **_SEQ2SEQ, **_IDS, vocab_size=_WORDS,
        num_mel_bins=8, max_source_positions=16, max_target_positions=16, use_cache=False,
    ),
    _transformers("MarianMTModel", "MarianConfig", _pair, **_TEXT, **_SEQ2SEQ, decoder_vocab_size=_WORDS),
    _transformers("PegasusForConditionalGeneration", "PegasusConfig", _pair, **_TEXT, **_SEQ2SEQ),
    _transformers(
        "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", _pair, **_IDS, vocab_size=_WORDS,
        d_model=_WIDTH, d_kv=8, d_ff=32, num_layers=2, num_sparse_encoder_layers=1, num_decoder_layers=2,
        num_sparse_decoder_layers=1, num_heads=2, num_experts=2, dropout_rate=0.0, router_jitter_noise=0.0,
        decoder_start_token_id=0, use_cache=False,
    ),
    _single(
        "MixtralForCausalLM", "MixtralConfig", _words, **_TEXT, **_BLOCKS, num_key_value_heads=1,
        num_local_experts=4, use_cache=False,
    ),
    _single(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", _words, **_TEXT, **_BLOCKS, num_key_value_heads=1, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, use_cache=False,
    ),
    _transformers(
        "MambaForCausalLM", "MambaConfig", _words, **_IDS, vocab_size=_WORDS, hidden_size=_WIDTH, state_size=4,
        num_hidden_layers=3, use_cache=False,
    ),
    _transformers(
        "Mamba2ForCausalLM", "Mamba2Config", _words, **_IDS, vocab_size=_WORDS, hidden_size=_WIDTH, state_size=4,
        num_hidden_layers=3, num_heads=4, head_dim=8, n_groups=1, chunk_size=4, use_cache=False,
    ),
    _transformers(
        "RwkvForCausalLM", "RwkvConfig", _words, bos_token_id=0, eos_token_id=1, vocab_size=_WORDS, context_length=32,
        hidden_size=_WIDTH, num_hidden_layers=3, use_cache=False,
    ),
    _transformers("Qwen3ForCausalLM", "Qwen3Config", _masked, **_TEXT, **_BLOCKS, num_key_value_heads=1, head_dim=8),
    _transformers(
        "Gemma2ForCausalLM", "Gemma2Config", _masked, **_TEXT, **_BLOCKS, num_key_value_heads=1, head_dim=8,
        sliding_window=4,
    ),
    _transformers(
        "OPTForCausalLM", "OPTConfig", _masked, **_TEXT, hidden_size=_WIDTH, ffn_dim=32, num_hidden_layers=3,
        num_attention_heads=2, word_embed_proj_dim=_WIDTH, dropout=0.0,
    ),
    _transformers(
        "BloomForCausalLM", "BloomConfig", _masked, **_IDS, vocab_size=_WORDS, hidden_size=_WIDTH, n_layer=3, n_head=2,
        hidden_dropout=0.0, attention_dropout=0.0,
    ),
    _transformers(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", _masked, **_TEXT, **_BLOCKS, hidden_dropout=0.0, attention_dropout=0.0
    ),
    _transformers(
        "DebertaV2ForMaskedLM", "DebertaV2Config", _masked, **_TEXT, **_BLOCKS, **_NO_DROPOUT, relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    _transformers("ModernBertForMaskedLM", "ModernBertConfig", _masked, **_TEXT, **_BLOCKS, local_attention=4),
    _transformers(
        "SwinForImageClassification", "SwinConfig", _pictures, **_NO_DROPOUT, image_size=32, patch_size=4, embed_dim=8,
        depths=[1, 2], num_heads=[2, 2], window_size=4, drop_path_rate=0.0,
    ),
    _transformers(
        "SegformerForSemanticSegmentation", "SegformerConfig", _segments, **_NO_DROPOUT, hidden_sizes=[8, 16],
        num_encoder_blocks=2, depths=[1, 1], num_attention_heads=[1, 2], sr_ratios=[2, 1], patch_sizes=[7, 3],
        strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, drop_path_rate=0.0, classifier_dropout_prob=0.0,
    ),
    _clip(),
    _transformers(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", _speech, **_BLOCKS, vocab_size=_WORDS, conv_dim=(8, 8), conv_kernel=(10, 3),
        conv_stride=(5, 2), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
        layerdrop=0.0, num_feat_extract_layers=2,
        **dict.fromkeys(
            ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"), 0.0
        ),
    ),
    _transformers(
        "ASTForAudioClassification", "ASTConfig", _spectrogram, **_BLOCKS, **_NO_DROPOUT, max_length=32,
        num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8,
    ),
    _timm("efficientnet_b0"),
    Architecture("mixer_b16_224", "timm", _mixer, _image, _square),
    _timm("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=_WIDTH, depth=3, num_heads=2),
    _timm("regnety_002"),
    Architecture("DenseNet", "torchvision", _dense, _image, _square),
    Architecture("mobilenet_v3_small", "torchvision", _mobile, _image, _square),
    Architecture("UNet2DConditionModel", "diffusers", _unet, _noisy, _square),
    Architecture("DiTTransformer2DModel", "diffusers", _dit, _noisy_classes, _square),
)  # fmt: skip

ARCHITECTURES = {each.name: each for each in _MODELS}
"""The architectures by name, in the order of `_MODELS`."""
