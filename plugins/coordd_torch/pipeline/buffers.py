"""Buffers that a forward pass writes to, and what writes to copies of them instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.statistics import Norm

__all__ = ["Held", "WrittenBuffers", "borrowed", "copies", "every"]


class Held(NamedTuple):
    """A buffer under the name that a module has for it."""

    module: nn.Module
    name: str
    tensor: Tensor

    @property
    def current(self) -> Tensor:
        """What the module has under this name now."""
        found: Tensor = getattr(self.module, self.name)
        return found


def copies(held: Sequence[Held]) -> list[Held]:
    """Copies buffers; what was one is one again."""
    copied = {id(each.tensor): each.tensor.detach().clone() for each in held}
    return [each._replace(tensor=copied[id(each.tensor)]) for each in held]


@contextmanager
def borrowed(held: Sequence[Held]) -> Iterator[None]:
    """Has modules use these buffers for a while, and then their own again, unchanged."""
    own = [each._replace(tensor=each.current) for each in held]
    try:
        _put(held)
        yield
    finally:
        _put(own)


class WrittenBuffers:
    """Keeps of a module's buffers what a pass finds and writes to, so that the same pass can be done once more.

    Which ones these are is known after the first pass, of which all are kept. Normalisation that tracks statistics is
    taken to write to its own, as it does when nobody collects them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._norms = [each for each in every(module) if isinstance(each.module, Norm)]
        self._written: set[tuple[nn.Module, str]] | None = None

    def spared(self) -> AbstractContextManager[None]:
        """Lets normalisation write to copies, where layers compute again by themselves, as under `checkpoint`."""
        return borrowed(copies([each._replace(tensor=each.current) for each in self._norms]))

    @contextmanager
    def kept(self) -> Iterator[list[Held]]:
        """Gives, while a pass is done, a list of what it finds; complete afterwards.

        Raises:
            ArgumentError: the pass has written to what the first one has not.
        """
        held = every(self._module)
        versions = [each.tensor._version for each in held]  # noqa: SLF001 - autograd's own counter
        found = copies([each for each in held if self._written is None or each[:2] in self._written])
        yield found
        written = {
            each[:2]
            for each, version in zip(held, versions, strict=True)
            if each.current is not each.tensor or each.tensor._version != version  # noqa: SLF001 - as above
        }
        if self._written is None:
            self._written = written | {each[:2] for each in self._norms}
            found[:] = [each for each in found if each[:2] in self._written]
        elif others := sorted(name for _, name in written - self._written):
            text = f"a forward pass writes to the buffer {others[0]!r}, and the first one did not; activations can be "
            raise ArgumentError(text + "computed again only where each pass writes to the same: set recompute=False")


def every(module: nn.Module) -> list[Held]:
    """All buffers of a module, under all their names."""
    return [
        Held(each, name, tensor)
        for each in module.modules()
        for name, tensor in each.named_buffers(recurse=False, remove_duplicate=False)
    ]


def _put(held: Sequence[Held]) -> None:
    for each in held:
        setattr(each.module, each.name, each.tensor)
