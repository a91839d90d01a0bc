"""Releases saved tensors of a graph between the two halves of a split backward pass.

In between, the nodes of the second half keep the whole graph below them alive, and so activations that only the first
half needs: inputs of a GELU, outputs of a softmax, masks of dropout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from coordd_torch.pipeline.cpu_offload import Attic, Stowed, fetched

__all__ = ["Shelf", "strangers"]

_SHOWN = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")  # noqa: SLF001 - nowhere else
"""Whether this PyTorch exposes the unpack hook of a saved tensor."""


class _Slot:
    """One saved tensor."""

    __slots__ = ("kept", "version")

    def __init__(self, tensor: Tensor, attic: Attic | None) -> None:
        own = tensor.detach()  # detached, as with its graph it would keep itself alive
        self.kept: Stowed | None = attic.stow(own) if attic else own
        self.version = _version(self.kept)


class Shelf:
    """Storage of the tensors that a graph saves while it is built."""

    def __init__(self, attic: Attic | None = None) -> None:
        """Creates empty storage.

        Args:
            attic: where the tensors are offloaded to, if they do not stay in place.
        """
        self._attic = attic
        self._clearing = False
        self._used: list[_Slot] = []
        self._needed = threading.local()  # an engine thread for each device

    def filling(self) -> saved_tensors_hooks:
        """Returns a context in which saved tensors are stored here."""
        if self._attic:
            self._attic.begin()
        return saved_tensors_hooks(lambda tensor: _Slot(tensor, self._attic), self._tensor)

    @contextmanager
    def clearing(self, needed: Iterable[Node]) -> Iterator[None]:
        """Releases on exit the tensors used inside the block, except those of nodes that are needed again.

        If PyTorch does not expose unpack hooks, nothing is released, as other code, such as a checkpoint, may still
        need it.
        """
        with ExitStack() as stack:
            for node in needed:
                stack.callback(node.register_prehook(self._begin).remove)
                stack.callback(node.register_hook(self._end).remove)
            self._clearing = _SHOWN
            try:
                yield
            finally:
                self._clearing = False
        for slot in self._used:
            slot.kept = None
        self._used.clear()

    def _begin(self, _: Any) -> None:
        self._needed.now = True

    def _end(self, _: Any, __: Any) -> None:
        self._needed.now = False

    def _tensor(self, slot: _Slot) -> Tensor:
        kept = slot.kept
        if kept is None:
            text = "this part of a graph has been gone back through already"
            raise RuntimeError(text)
        tensor = fetched(kept)
        if _version(kept) != slot.version:
            text = (
                f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} that is needed for the backward pass was "
                "changed in place"
            )
            raise RuntimeError(text)
        if self._clearing and not getattr(self._needed, "now", False):
            self._used.append(slot)
        return tensor


def strangers(node: Node) -> Iterator[Callable[..., Any]]:
    """Yields the hooks that return a node's saved tensors from elsewhere than a shelf; they may compute them first.

    An older PyTorch does not expose them.
    """
    for name in _saved(type(node)) if _SHOWN else ():
        found = getattr(node, name) or ()
        for each in found if isinstance(found, tuple | list) else (found,):
            hook = each.unpack_hook
            if hook is not None and not isinstance(getattr(hook, "__self__", None), Shelf):
                yield hook


@cache
def _saved(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _version(kept: Stowed) -> int:
    """Returns PyTorch's count of in-place writes; 0 for an offloaded tensor, whose memory is not shared."""
    return kept._version if isinstance(kept, Tensor) else 0  # noqa: SLF001 - as PyTorch does
