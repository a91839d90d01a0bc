"""Int8 compression with a scale for each block of values: a quarter of the bytes, with the range of fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from coordd.errors import ArgumentError
from coordd.ops.checks import whole
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.rounds import Deal, Gather, Rounds

__all__ = ["Int8Compressor", "dequantized", "quantized"]

_LARGEST = 127


class Int8Compressor(Compressor):
    """Sends each value as an integer multiple of its block's scale, the largest magnitude of the block divided by 127.

    Rounding changes a value by at most half a scale. Integers with different scales cannot be summed, so each rank sums
    one slice of all ranks' values in fp32 and sends the mean as integers again, which rounds a second time.
    """

    def __init__(self, *, block: int = 256) -> None:
        """Creates a compressor.

        Args:
            block: number of values that share a scale of 4 bytes.

        Raises:
            ArgumentError: `block` is not a positive integer.
        """
        super().__init__()
        if whole(block, "block") < 1:
            text = f"a block has at least one value, not {block}"
            raise ArgumentError(text)
        self._block = block

    @property
    def settings(self) -> tuple[object, ...]:
        """The block size, which must be equal on all ranks."""
        return (self._block,)

    def exchange(self, cargo: Cargo) -> Rounds:
        """Reduces slices and gathers their means, as an allreduce does; two members gather all values instead."""
        count = cargo.flat.numel()
        block = max(1, min(self._block, count))  # a small tensor is not padded to a whole block
        numbers, scales = quantized(cargo.flat, block)
        cargo.flat -= dequantized(numbers, scales, block)[:count]
        if cargo.size > 2:
            slices = zip(numbers.view(-1, block).tensor_split(cargo.size), scales.tensor_split(cargo.size), strict=True)
            members = yield Deal(*slices)
            if len(members) == cargo.size:
                members = yield Gather(*quantized(_mean(members, block), block))
                return torch.cat([dequantized(theirs, scale, block) for theirs, scale in members])[:count]
        # There are two members, or a member has joined, so that no rank has reduced its slice.
        members = yield Gather(numbers, scales)
        return _mean(members, block)[:count]


def quantized(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns int8 values, padded with zeros to whole blocks, and one fp32 scale per block."""
    blocks = pad(flat, (0, -flat.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1).div_(_LARGEST).float().clamp_(min=torch.finfo(torch.float32).tiny)
    steps = blocks.div(scales[:, None]).round_()
    return steps.clamp_(-_LARGEST, _LARGEST).to(torch.int8).flatten(), scales


def dequantized(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    """Returns the values of whole blocks as a flat tensor."""
    return numbers.view(-1, block).mul(scales[:, None]).flatten()


def _mean(members: list[tuple[Tensor, Tensor]], block: int) -> Tensor:
    """Returns the mean of the members' values, summed in rank order."""
    total = dequantized(*members[0], block)
    for numbers, scales in members[1:]:
        total += dequantized(numbers, scales, block)
    return total.div_(len(members))
