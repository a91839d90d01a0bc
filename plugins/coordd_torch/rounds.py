"""Rounds of a compressor: the mean of all ranks' tensors, or an allgather or alltoall of tensors.

A compressor is a generator of rounds. A round packs tensors into an array to exchange, and unpacks the result. The
first round of gradients also carries their tail: a few numbers that are summed uncompressed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordd.ops.messages import Kind
from coordd_torch.compression_stats import reduced
from coordd_torch.tensors import as_bytes, borrow, from_array

__all__ = ["Deal", "Gather", "Mean", "Round", "Rounds"]

_NUMBER = torch.int64


class Round(ABC):
    """One exchange between all members, which must make the same rounds in the same order."""

    kind: Kind
    splits: np.ndarray | None = None
    """How many elements of the packed array each member gets, for an alltoall."""

    def __init__(self, *tensors: Tensor) -> None:
        """Describes an exchange of these tensors, which may have any shape."""
        self._tensors = tensors
        self._device = tensors[0].device
        self._array: np.ndarray = np.empty(0)

    @abstractmethod
    def pack(self, tail: Tensor | None) -> np.ndarray:
        """Returns the array to exchange, with the tail, if any."""

    @abstractmethod
    def open(self, array: np.ndarray, size: int, present: int) -> tuple[list[Any], Tensor | None]:
        """Returns the result for the compressor, and the sum of the tails.

        Args:
            array: the result of the operation.
            size: number of members.
            present: number of members that have not joined; 0 if unknown, then the sum of the tails' last numbers,
                which are 1, gives it.
        """

    @abstractmethod
    def received(self, size: int) -> float:
        """Returns the number of bytes received from the other members."""


Rounds = Generator[Round, list[Any], Tensor]


class Mean(Round):
    """Means of tensors over the members; all tensors have the same dtype, and equal shapes on all ranks.

    16-bit floats are summed in fp32. The result is a list of tensors in the order of the arguments.
    """

    kind = Kind.ALLREDUCE

    def pack(self, tail: Tensor | None) -> np.ndarray:
        """Concatenates the tensors and the tail into one flat array."""
        flat = [tensor.reshape(-1) for tensor in self._tensors]
        self._tail = 0 if tail is None else tail.numel()
        if tail is not None:
            flat.append(tail.to(flat[0]))
        self._array, _ = borrow(torch.cat(flat))
        return self._array

    def open(self, array: np.ndarray, size: int, present: int) -> tuple[list[Any], Tensor | None]:
        """Splits the array into tensors; scales the mean if members have joined."""
        sizes = [tensor.numel() for tensor in self._tensors]
        flat = from_array(array).to(self._device)
        tail = flat[sum(sizes) :].float() * size if self._tail else None
        present = present or (size if tail is None else round(float(tail[-1])))
        if present != size:
            flat.mul_(size / present)
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)], tail

    def received(self, size: int) -> float:
        """Returns the bytes of the slices and of their reduced values."""
        return reduced(self._array.nbytes, size)


class Gather(Round):
    """Allgather of tensors of any dtypes and sizes.

    The result has one list of flat tensors per member, in rank order; joined ranks are left out.
    """

    kind = Kind.ALLGATHER

    def pack(self, tail: Tensor | None) -> np.ndarray:
        """Packs the tensors and the tail into one byte array."""
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        self._array = _parcel(self._tensors, tail).numpy()
        return self._array

    def open(self, array: np.ndarray, size: int, present: int) -> tuple[list[Any], Tensor | None]:  # noqa: ARG002 - as below
        """Unpacks the byte arrays of all members that have not joined."""
        self._received = array.nbytes - self._array.nbytes
        return _unpacked(array, self._dtypes, self._device)

    def received(self, size: int) -> float:  # noqa: ARG002 - what every round has
        """Returns the bytes that the other members sent."""
        return self._received


class Deal(Round):
    """Alltoall of tensors, of the same dtypes for all members and any sizes.

    The result has one list of flat tensors per member, in rank order: those that the member sent to this rank. Joined
    ranks are left out, and tensors sent to a joined rank are lost.
    """

    kind = Kind.ALLTOALL

    def __init__(self, *hands: Sequence[Tensor]) -> None:
        """Describes an exchange of tensors, with one sequence per receiving member."""
        super().__init__(*hands[0])
        self._hands = hands

    def pack(self, tail: Tensor | None) -> np.ndarray:
        """Packs one byte array per member, each with the tail."""
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        parcels = [_parcel(hand, tail) for hand in self._hands]
        self.splits = np.array([parcel.numel() for parcel in parcels])
        return torch.cat(parcels).numpy()

    def open(self, array: np.ndarray, size: int, present: int) -> tuple[list[Any], Tensor | None]:  # noqa: ARG002 - as below
        """Unpacks the byte arrays of all members that have not joined."""
        self._received = array.nbytes
        return _unpacked(array, self._dtypes, self._device)

    def received(self, size: int) -> float:
        """Returns the bytes that the other members sent, assuming that all members sent equally many."""
        return self._received * (size - 1) / size


def _parcel(tensors: Sequence[Tensor], tail: Tensor | None) -> Tensor:
    """Returns bytes: the lengths of the parts in bytes, then the parts, with the tail last."""
    parts = [as_bytes(tensor) for tensor in (*tensors, torch.empty(0, device="cpu") if tail is None else tail)]
    lengths = torch.tensor([part.numel() for part in parts], dtype=_NUMBER, device="cpu")
    return torch.cat([as_bytes(lengths), *parts])


def _unpacked(
    array: np.ndarray, dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[list[Any], Tensor | None]:
    """Unpacks concatenated parcels; returns their tensors, and the sum of the tails."""
    rest, kinds, found, tails = from_array(array), [*dtypes, torch.float32], [], []
    head = _NUMBER.itemsize * len(kinds)
    while rest.numel():
        lengths = rest[:head].clone().view(_NUMBER).tolist()
        *parts, rest = rest[head:].split([*lengths, rest.numel() - head - sum(lengths)])
        # Copies, because parts may be unaligned for their dtypes.
        *tensors, tail = [part.clone().view(kind) for part, kind in zip(parts, kinds, strict=True)]
        found.append([tensor.to(device) for tensor in tensors])
        tails.append(tail)
    return found, torch.stack(tails).sum(0) if tails[0].numel() else None
