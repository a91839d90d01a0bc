"""Eight-bit integers with a scale for each block of values: a quarter of the bytes, with the range of fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from coordd.errors import ArgumentError
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.rounds import Gather, Rounds

__all__ = ["Int8Compressor", "dequantized", "quantized"]

_LARGEST = 127


class Int8Compressor(Compressor):
    """Sends each value as a multiple of its block's scale, the largest of the block divided by 127.

    A value is changed by at most half a scale. As integers of different scales cannot be added up, everybody gets
    everybody's, and adds them in fp32: with n ranks n - 1 times the tensor's quarter, so it is meant for few ranks.
    """

    def __init__(self, *, block: int = 256) -> None:
        """Makes one.

        Args:
            block: values that share a scale of four bytes.

        Raises:
            ArgumentError: there can be no such block.
        """
        super().__init__()
        if block < 1:
            text = f"a block has at least one value, not {block}"
            raise ArgumentError(text)
        self._block = block

    def exchange(self, cargo: Cargo) -> Rounds:
        """Gathers integers and scales."""
        numbers, scales = quantized(cargo.flat, self._block)
        members = yield Gather(numbers, scales)
        count = cargo.flat.numel()
        cargo.flat -= dequantized(numbers, scales, count)
        total = torch.zeros_like(cargo.flat)
        for theirs, theirs_scales in members:
            total += dequantized(theirs, theirs_scales, count)
        return total.div_(len(members))


def quantized(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns integers, of a whole number of blocks, and a scale in fp32 for each block."""
    blocks = pad(flat, (0, -flat.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1).div_(_LARGEST).float().clamp_(min=torch.finfo(torch.float32).tiny)
    steps = blocks.div(scales[:, None]).round_()
    return steps.clamp_(-_LARGEST, _LARGEST).to(torch.int8).flatten(), scales


def dequantized(numbers: Tensor, scales: Tensor, count: int) -> Tensor:
    """Returns the first ``count`` values."""
    return numbers.view(len(scales), -1).mul(scales[:, None]).flatten()[:count]
