"""CPU offload: keeps saved activations and optimizer state in host memory while the accelerator does not need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Attic", "Stowed", "fetched"]

Stowed = Tensor | tuple[Tensor, torch.device]
"""A tensor that stayed in place, or an offloaded tensor and its original device."""


class Attic:
    """CPU offload of one stage's tensors.

    Tensors that are on the host already stay in place, so an attic does nothing on the CPU.

    Attributes:
        stowed: number of saved graph tensors that were passed to `stow`, parameters and buffers not included.
    """

    def __init__(self, module: nn.Module) -> None:
        """Creates an empty attic.

        Args:
            module: the stage. Its parameters and buffers are not offloaded when a graph saves them: that would not free
                them.
        """
        self.stowed = 0
        self._module = module
        self._lasting: set[int] = set()
        self._homes: dict[tuple[Tensor, str], torch.device] = {}

    def begin(self) -> None:
        """Records the memory of parameters and buffers, before a graph is built."""
        self._lasting = {_place(each) for each in (*self._module.parameters(), *self._module.buffers())}

    def stow(self, tensor: Tensor) -> Stowed:
        """Offloads a tensor that a graph has saved."""
        if _place(tensor) in self._lasting:
            return tensor
        self.stowed += 1
        return tensor if tensor.device.type == "cpu" else (_on_host(tensor), tensor.device)

    @contextmanager
    def emptied(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Moves an optimizer's state to its device for a step, and offloads it afterwards.

        State that was on the host before stays there.
        """
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
    """Returns a tensor on its original device."""
    return stowed if isinstance(stowed, Tensor) else stowed[0].to(stowed[1], non_blocking=True)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_host(tensor: Tensor) -> Tensor:
    """Copies a tensor to host memory, which is pinned if CUDA is available, so that accelerators copy at full speed."""
    quick = torch.cuda.is_available()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device="cpu", pin_memory=quick)
    return pinned.copy_(tensor)
