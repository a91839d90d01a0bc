"""The benchmark's models: bound by compute, by communication (two sizes), or by the number of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LEARNING_RATE", "MODELS", "Model"]

LEARNING_RATE = 1e-3

_VOCABULARY, _WIDTH, _HEADS, _BLOCKS, _CONTEXT = 256, 256, 4, 6, 128


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        build: creates the model from torch's global random state.
        batch: creates one rank's inputs and class labels.
        steps: the number of steps that take about half a second on one core.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    steps: int


class _Attention(nn.Module):
    """Causal self-attention over inputs of shape (batch, context, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self.mix(x).view(batch, context, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.out(seen.transpose(1, 2).reshape(batch, context, width))
        return joined


class _Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(_WIDTH), _Attention())
        self.feed = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.feed(x)
        return y


class _GPT(nn.Module):
    """A small GPT with an untied head: tokens (batch, context) in, logits (batch, context, vocabulary) out."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, _WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(_CONTEXT, _WIDTH))
        self.blocks = nn.Sequential(*(_Block() for _ in range(_BLOCKS)))
        self.head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.token(tokens) + self.place))
        return logits


def _stack(depth: int, width: int, activation: Callable[[], nn.Module]) -> nn.Module:
    """Stacks ``depth`` equal layers and adds a head of 10 classes."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(_VOCABULARY, (4, _CONTEXT + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def _vectors(batch: int, width: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, width, generator=generator), torch.randint(10, (batch,), generator=generator)

    return make


MODELS = {
    "gpt": Model(build=_GPT, batch=_text, steps=3),
    "mlp": Model(build=lambda: _stack(8, 1024, nn.ReLU), batch=_vectors(16, 1024), steps=12),
    "wide": Model(build=lambda: _stack(8, 2048, nn.ReLU), batch=_vectors(16, 2048), steps=3),
    "small": Model(build=lambda: _stack(80, 64, nn.Tanh), batch=_vectors(64, 64), steps=50),
}
