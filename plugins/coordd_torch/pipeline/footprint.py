"""Activation memory of layers, and memory that enters a stage at each cut, in bytes; shared memory counts once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Footprint", "address"]


def address(tensor: Tensor) -> int:
    """Returns the start address of a tensor's memory; its views have the same."""
    return tensor.untyped_storage().data_ptr()


@dataclass
class _Piece:
    """Memory that one layer passes to later layers.

    Attributes:
        size: bytes.
        made: the layer that computes it.
        last: the last layer that reads it.
        keeper: the first layer that saves it for backward; None if none does.
    """

    size: int
    made: int
    last: int
    keeper: int | None


class Footprint:
    """Memory of the values that pass from layer to layer.

    Memory that several layers save counts for the first of them. If a cut lies between them, the later stage has its
    own copy, which counts as entering there.
    """

    def __init__(self, reads: Sequence[Iterable[str]], inputs: Iterable[Any]) -> None:
        """Starts before the first layer.

        Args:
            reads: for each layer the names of the values that it reads.
            inputs: of the model, which do not count.
        """
        self._last = {name: at for at, names in enumerate(reads) for name in names}
        self._there = {address(leaf) for leaf in inputs if isinstance(leaf, Tensor)}
        self._pieces: list[_Piece] = []
        self._living: dict[int, _Piece] = {}

    def crosses(self, name: str, at: int) -> bool:
        """Returns whether a layer after this one reads a value."""
        return self._last.get(name, -1) > at

    def note(self, at: int, saved: Mapping[int, int], outputs: Mapping[str, Any]) -> int:
        """Adds a layer; layers must be added in order.

        Args:
            at: its number.
            saved: the tensors it saves, without its parameters and buffers: bytes by address.
            outputs: its values.

        Returns:
            the bytes of its activations.
        """
        kept = 0
        for place, size in saved.items():
            piece = self._living.get(place)
            if place in self._there or (piece is not None and piece.keeper is not None):
                continue
            kept += size
            if piece is not None:
                piece.keeper = at
        for name, value in outputs.items():
            self._pass_on(at, self._last.get(name, -1), value, saved)
        self._living = {place: piece for place, piece in self._living.items() if piece.last > at}
        return kept

    def entering(self, at: int) -> int:
        """Returns the bytes that a stage starting after this layer keeps, besides the activations of its layers."""
        crossing = (piece for piece in self._pieces if piece.made <= at < piece.last)
        return sum(piece.size for piece in crossing if piece.keeper is None or piece.keeper <= at)

    def _pass_on(self, at: int, last: int, value: Any, saved: Mapping[int, int]) -> None:
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, Tensor) or last <= at or address(leaf) in self._there:
                continue
            place = address(leaf)
            if place in self._living:  # a view of what entered
                self._living[place].last = max(self._living[place].last, last)
                continue
            keeper = at if place in saved else None
            self._living[place] = _Piece(leaf.untyped_storage().nbytes(), at, last, keeper)
            self._pieces.append(self._living[place])
