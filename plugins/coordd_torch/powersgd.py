"""PowerSGD: low-rank compression of gradient matrices.

Source: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019,
algorithms 1 and 2. Each training step makes one step of the power method, which starts from the last step's factor Q.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from coordd.errors import ArgumentError
from coordd.ops.checks import whole
from coordd_torch.compressor import Cargo, Compressor
from coordd_torch.rounds import Mean, Rounds

__all__ = ["PowerSGDCompressor"]


class PowerSGDCompressor(Compressor):
    """Sends M ≈ P Qᵀ as P and Q; adds the compression error to the next step's gradients.

    A gradient's first dimension gives the rows of M, the others its columns. Vectors, and matrices whose size would not
    be halved, are sent uncompressed. Takes two rounds, whose bytes do not grow with the number of ranks.
    """

    feedback = True

    def __init__(self, *, rank: int = 2, seed: int = 0) -> None:
        """Creates a compressor.

        Args:
            rank: number of columns of P and Q; usually 1, 2 or 4.
            seed: seed of the first Q, equal on all ranks.

        Raises:
            ArgumentError: `rank` is not a positive integer.
        """
        super().__init__()
        if whole(rank, "the rank of PowerSGD") < 1:
            text = f"the rank of PowerSGD is at least 1, not {rank}"
            raise ArgumentError(text)
        self._rank = rank
        self._seed = seed

    @property
    def settings(self) -> tuple[object, ...]:
        """The rank and the seed, which must be equal on all ranks."""
        return (self._rank, self._seed)

    def exchange(self, cargo: Cargo) -> Rounds:
        """Reduces M Q and the uncompressed tensors, then Mᵀ P."""
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
        lefts = [torch.linalg.qr(product.to(mean)).Q for product in products]  # if M is zero, any columns are right
        own = [(matrix.mT @ left).to(cargo.dtype) for matrix, left in zip(matrices, lefts, strict=True)]
        rights = yield Mean(*own)
        for index, matrix, left, mine, right in zip(large, matrices, lefts, own, rights, strict=True):
            torch.matmul(left, right.to(left).mT, out=_matrix(means[index]))
            # Subtracts this rank's own contribution, not the mean: otherwise the difference between this rank and the
            # others would stay in its residual forever.
            matrix.addmm_(left, mine.to(left).mT, alpha=-1)
            cargo.remember(cargo.names[index], right.to(left))
        return mean

    def _pays(self, part: Tensor) -> bool:
        """Returns whether P and Q together have at most half as many elements as the matrix."""
        if part.ndim < 2 or not part.numel():
            return False
        rows, columns = _matrix(part).shape
        return 2 * self._columns(rows, columns) * (rows + columns) <= rows * columns

    def _columns(self, rows: int, columns: int) -> int:
        return min(self._rank, rows, columns)

    def _right(self, cargo: Cargo, name: str, matrix: Tensor) -> Tensor:
        """Returns the initial Q: that of the last step, or a random one that is equal on all ranks."""
        known = cargo.recall(name)
        rows, columns = matrix.shape
        shape = columns, self._columns(rows, columns)
        if known is not None and known.shape == shape:
            return known.to(matrix)
        generator = torch.Generator("cpu").manual_seed(crc32(name.encode()) + self._seed)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(matrix)


def _matrix(part: Tensor) -> Tensor:
    return part.view(len(part), -1)
