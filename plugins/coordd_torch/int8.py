"""Eight-bit integers with a scale for each block of values: a quarter of the bytes, with the range of fp32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from coordd.checks import whole
from coordd.errors import ArgumentError
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.rounds import Deal, Gather, Rounds

__all__ = ["Int8Compressor", "dequantized", "quantized"]

_LARGEST = 127


class Int8Compressor(Compressor):
    """Sends each value as a multiple of its block's scale, the largest of the block divided by 127.

    A value is changed by at most half a scale. As integers of different scales cannot be added up, each rank adds up a
    slice of everybody's in fp32, and sends its mean to all as integers again, which changes it once more.
    """

    def __init__(self, *, block: int = 256) -> None:
        """Makes one.

        Args:
            block: values that share a scale of four bytes.

        Raises:
            ArgumentError: there can be no such block.
        """
        super().__init__()
        if whole(block, "block") < 1:
            text = f"a block has at least one value, not {block}"
            raise ArgumentError(text)
        self._block = block

    @property
    def settings(self) -> tuple[object, ...]:
        """What all ranks must have alike."""
        return (self._block,)

    def exchange(self, cargo: Cargo) -> Rounds:
        """Adds up slices, as an allreduce does; two members simply give each other all."""
        count = cargo.flat.numel()
        block = max(1, min(self._block, count))  # a tensor is not padded to more than it has
        numbers, scales = quantized(cargo.flat, block)
        cargo.flat -= dequantized(numbers, scales, block)[:count]
        if cargo.size > 2:
            slices = zip(numbers.view(-1, block).tensor_split(cargo.size), scales.tensor_split(cargo.size), strict=True)
            members = yield Deal(*slices)
            if len(members) == cargo.size:
                members = yield Gather(*quantized(_mean(members, block), block))
                return torch.cat([dequantized(theirs, scale, block) for theirs, scale in members])[:count]
        # Two members, or one has joined, whose slice nobody has added up.
        members = yield Gather(numbers, scales)
        return _mean(members, block)[:count]


def quantized(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns integers, of a whole number of blocks, and a scale in fp32 for each block."""
    blocks = pad(flat, (0, -flat.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(1).div_(_LARGEST).float().clamp_(min=torch.finfo(torch.float32).tiny)
    steps = blocks.div(scales[:, None]).round_()
    return steps.clamp_(-_LARGEST, _LARGEST).to(torch.int8).flatten(), scales


def dequantized(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    """Returns the values of whole blocks, one behind the other."""
    return numbers.view(-1, block).mul(scales[:, None]).flatten()


def _mean(members: list[tuple[Tensor, Tensor]], block: int) -> Tensor:
    """Returns the mean of what the members have sent, added up in their order."""
    total = dequantized(*members[0], block)
    for numbers, scales in members[1:]:
        total += dequantized(numbers, scales, block)
    return total.div_(len(members))
