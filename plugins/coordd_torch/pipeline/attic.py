"""The host's memory, where waits what an accelerator does not need: saved activations, the state of optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Attic", "Stowed", "fetched"]

Stowed = Tensor | tuple[Tensor, torch.device]
"""A tensor that has stayed where it was, or one that lies in the attic, and where it came from."""


class Attic:
    """Takes tensors of one stage, and gives them back.

    What is on the host already stays where it is, so on the CPU an attic changes nothing.

    Attributes:
        stowed: how many tensors of graphs it was given.
    """

    def __init__(self, module: nn.Module) -> None:
        """Prepares it.

        Args:
            module: the stage. Its parameters and buffers are not taken when a graph saves them: they are not freed.
        """
        self.stowed = 0
        self._module = module
        self._lasting: set[int] = set()
        self._homes: dict[tuple[Tensor, str], torch.device] = {}

    def begin(self) -> None:
        """Notes where parameters and buffers lie, before a graph is built."""
        self._lasting = {_place(each) for each in (*self._module.parameters(), *self._module.buffers())}

    def stow(self, tensor: Tensor) -> Stowed:
        """Takes what a graph has saved."""
        if _place(tensor) in self._lasting:
            return tensor
        self.stowed += 1
        return tensor if tensor.device.type == "cpu" else (_on_host(tensor), tensor.device)

    @contextmanager
    def emptied(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Gives an optimizer its state back for a step, and takes it again; what was on the host before stays there."""
        for (parameter, key), home in self._homes.items():
            if key in optimizer.state.get(parameter, {}):
                optimizer.state[parameter][key] = optimizer.state[parameter][key].to(home)
        yield
        self._homes.clear()
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    self._homes[parameter, key] = value.device
                    state[key] = _on_host(value)


def fetched(stowed: Stowed) -> Tensor:
    """Gives a tensor back, where it came from."""
    return stowed if isinstance(stowed, Tensor) else stowed[0].to(stowed[1], non_blocking=True)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_host(tensor: Tensor) -> Tensor:
    """Copies a tensor to memory that accelerators read and write at full speed."""
    quick = torch.cuda.is_available()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device="cpu", pin_memory=quick)
    return pinned.copy_(tensor)
