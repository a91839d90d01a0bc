"""Matrices of low rank instead of matrices.

Source: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019,
algorithms 1 and 2. One step of the power method a training step; the factor Q of one step is where the next begins.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from coordd.checks import whole
from coordd.errors import ArgumentError
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.rounds import Mean, Rounds

__all__ = ["PowerSGDCompressor"]


class PowerSGDCompressor(Compressor):
    """Sends M ≈ P Qᵀ as P and Q; what is lost is added to the next step's gradients.

    A gradient's first dimension makes the rows of M, the others its columns. Vectors, and matrices that would not
    become half as large, travel as they are. Two rounds, whose bytes do not grow with the number of ranks.
    """

    feedback = True

    def __init__(self, *, rank: int = 2, seed: int = 0) -> None:
        """Makes one.

        Args:
            rank: columns of P and Q; 1, 2 or 4 as a rule.
            seed: of the first Q, equal on all ranks.

        Raises:
            ArgumentError: there is no such rank.
        """
        super().__init__()
        if whole(rank, "the rank of PowerSGD") < 1:
            text = f"the rank of PowerSGD is at least 1, not {rank}"
            raise ArgumentError(text)
        self._rank = rank
        self._seed = seed

    @property
    def settings(self) -> tuple[object, ...]:
        """What all ranks must have alike."""
        return (self._rank, self._seed)

    def exchange(self, cargo: Cargo) -> Rounds:
        """Reduces M Q and what is not compressed, then Mᵀ P."""
        mean = torch.zeros_like(cargo.flat)
        means = cargo.views(mean)
        large = [index for index, part in enumerate(cargo.parts) if self._pays(part)]
        small = [index for index, part in enumerate(cargo.parts) if not self._pays(part)]
        matrices = [_matrix(cargo.parts[index]) for index in large]
        products = [
            matrix @ self._right(cargo, cargo.names[index], matrix)
            for index, matrix in zip(large, matrices, strict=True)
        ]
        exact = torch.cat([cargo.flat[:0], *(cargo.parts[index].flatten() for index in small)])
        *products, exact = yield Mean(*(tensor.to(cargo.dtype) for tensor in (*products, exact)))
        for index, values in zip(small, exact.split([cargo.parts[index].numel() for index in small]), strict=True):
            means[index].copy_(values.view_as(means[index]))
            cargo.parts[index].zero_()
        if not large:
            return mean
        lefts = [torch.linalg.qr(product.to(mean)).Q for product in products]  # any columns will do where M is zero
        own = [(matrix.mT @ left).to(cargo.dtype) for matrix, left in zip(matrices, lefts, strict=True)]
        rights = yield Mean(*own)
        for index, matrix, left, mine, right in zip(large, matrices, lefts, own, rights, strict=True):
            torch.matmul(left, right.to(left).mT, out=_matrix(means[index]))
            # Less this rank's own share: else it would keep for ever what tells it from the others.
            matrix.addmm_(left, mine.to(left).mT, alpha=-1)
            cargo.remember(cargo.names[index], right.to(left))
        return mean

    def _pays(self, part: Tensor) -> bool:
        """Says whether P and Q are at most half as large as the matrix."""
        if part.ndim < 2 or not part.numel():
            return False
        rows, columns = _matrix(part).shape
        return 2 * self._columns(rows, columns) * (rows + columns) <= rows * columns

    def _columns(self, rows: int, columns: int) -> int:
        return min(self._rank, rows, columns)

    def _right(self, cargo: Cargo, name: str, matrix: Tensor) -> Tensor:
        """Returns the Q to begin with: the last step's, or a random one that is equal on all ranks."""
        known = cargo.recall(name)
        rows, columns = matrix.shape
        shape = columns, self._columns(rows, columns)
        if known is not None and known.shape == shape:
            return known.to(matrix)
        generator = torch.Generator("cpu").manual_seed(crc32(name.encode()) + self._seed)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(matrix)


def _matrix(part: Tensor) -> Tensor:
    return part.view(len(part), -1)
