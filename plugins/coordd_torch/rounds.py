"""What a compressor may ask for: the mean of everybody's tensors, or the tensors themselves, for all or for each.

A compressor is a generator of such rounds. Here they become arrays that travel, and what has arrived becomes tensors.
Behind the first round of gradients travels their tail: few numbers that have to arrive as they are, and are added up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordd.messages import Kind
from coordd_torch.gauge import reduced
from coordd_torch.tensors import borrow, from_array

__all__ = ["Deal", "Gather", "Mean", "Round", "Rounds"]

_NUMBER = torch.int64


class Round(ABC):
    """One exchange between all members; every one must ask for the same in the same order."""

    kind: Kind
    splits: np.ndarray | None = None
    """How many elements of what travels each member gets, if not all of them."""

    def __init__(self, *tensors: Tensor) -> None:
        """Asks for an exchange of these tensors, which may have any shape."""
        self._tensors = tensors
        self._device = tensors[0].device
        self._array: np.ndarray = np.empty(0)

    @abstractmethod
    def pack(self, tail: Tensor | None) -> np.ndarray:
        """Makes what travels, with the tail behind it."""

    @abstractmethod
    def open(self, array: np.ndarray, size: int, present: int) -> tuple[list[Any], Tensor | None]:
        """Returns what the compressor gets, and the sum of the tails.

        Args:
            array: what has arrived.
            size: number of members.
            present: how many of them have not joined; 0 if the tail tells, whose last number is 1 from each of them.
        """

    @abstractmethod
    def received(self, size: int) -> float:
        """Bytes that have come from the other members."""


Rounds = Generator[Round, list[Any], Tensor]


class Mean(Round):
    """Asks for the means of tensors over the members; they have one type and equal shapes everywhere.

    Sixteen-bit floats are added in fp32. The answer is a list of tensors in the order of those given.
    """

    kind = Kind.ALLREDUCE

    def pack(self, tail: Tensor | None) -> np.ndarray:
        """Makes one flat array of all."""
        flat = [tensor.reshape(-1) for tensor in self._tensors]
        self._tail = 0 if tail is None else tail.numel()
        if tail is not None:
            flat.append(tail.to(flat[0]))
        self._array, _ = borrow(torch.cat(flat))
        return self._array

    def open(self, array: np.ndarray, size: int, present: int) -> tuple[list[Any], Tensor | None]:
        """Cuts the array up again."""
        sizes = [tensor.numel() for tensor in self._tensors]
        flat = from_array(array).to(self._device)
        tail = flat[sum(sizes) :].float() * size if self._tail else None
        present = present or (size if tail is None else round(float(tail[-1])))
        if present != size:
            flat.mul_(size / present)
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)], tail

    def received(self, size: int) -> float:
        """Counts slices, and their sums."""
        return reduced(self._array.nbytes, size)


class Gather(Round):
    """Asks for everybody's tensors, of any types and sizes.

    The answer is a list over the members, in the order of ranks, of lists of flat tensors; who has joined is left out.
    """

    kind = Kind.ALLGATHER

    def pack(self, tail: Tensor | None) -> np.ndarray:
        """Makes one parcel, with the tail in it."""
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        self._array = _parcel(self._tensors, tail).numpy()
        return self._array

    def open(self, array: np.ndarray, size: int, present: int) -> tuple[list[Any], Tensor | None]:  # noqa: ARG002 - as below
        """Reads what each member has written that has not joined."""
        self._received = array.nbytes - self._array.nbytes
        return _unpacked(array, self._dtypes, self._device)

    def received(self, size: int) -> float:  # noqa: ARG002 - what every round has
        """Counts what the others have sent."""
        return self._received


class Deal(Round):
    """Gives every member tensors of its own; they have the same types for all of them, and any sizes.

    The answer is a list over the members, in the order of ranks, of lists of the flat tensors that each had for this
    one. Who has joined is left out of it, and what was meant for him is lost.
    """

    kind = Kind.ALLTOALL

    def __init__(self, *hands: Sequence[Tensor]) -> None:
        """Asks for an exchange of tensors, listed by member."""
        super().__init__(*hands[0])
        self._hands = hands

    def pack(self, tail: Tensor | None) -> np.ndarray:
        """Makes one parcel a member, with the tail in each."""
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        parcels = [_parcel(hand, tail) for hand in self._hands]
        self.splits = np.array([parcel.numel() for parcel in parcels])
        return torch.cat(parcels).numpy()

    def open(self, array: np.ndarray, size: int, present: int) -> tuple[list[Any], Tensor | None]:  # noqa: ARG002 - as below
        """Reads what each member has written that has not joined."""
        self._received = array.nbytes
        return _unpacked(array, self._dtypes, self._device)

    def received(self, size: int) -> float:
        """Counts what the others have sent; all parcels count as equally large."""
        return self._received * (size - 1) / size


def _parcel(tensors: Sequence[Tensor], tail: Tensor | None) -> Tensor:
    """Writes the lengths of the parts in bytes, then the parts, the tail last."""
    parts = [_as_bytes(tensor) for tensor in (*tensors, torch.empty(0, device="cpu") if tail is None else tail)]
    lengths = torch.tensor([part.numel() for part in parts], dtype=_NUMBER, device="cpu")
    return torch.cat([_as_bytes(lengths), *parts])


def _unpacked(
    array: np.ndarray, dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[list[Any], Tensor | None]:
    """Reads one parcel after the other; returns their tensors, and the sum of the tails."""
    rest, kinds, found, tails = from_array(array), [*dtypes, torch.float32], [], []
    head = _NUMBER.itemsize * len(kinds)
    while rest.numel():
        lengths = rest[:head].clone().view(_NUMBER).tolist()
        *parts, rest = rest[head:].split([*lengths, rest.numel() - head - sum(lengths)])
        # Copies, because the parts may begin anywhere, and numbers may not.
        *tensors, tail = [part.clone().view(kind) for part, kind in zip(parts, kinds, strict=True)]
        found.append([tensor.to(device) for tensor in tensors])
        tails.append(tail)
    return found, torch.stack(tails).sum(0) if tails[0].numel() else None


def _as_bytes(tensor: Tensor) -> Tensor:
    """Views a tensor's numbers, in this process's memory, as bytes."""
    return tensor.detach().reshape(-1).cpu().view(torch.uint8)
