"""Buffers that a forward pass writes to, and context managers that redirect these writes to copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.statistics import Norm

__all__ = ["Held", "WrittenBuffers", "borrowed", "copies", "every"]


class Held(NamedTuple):
    """A buffer with the module and the attribute name that hold it."""

    module: nn.Module
    name: str
    tensor: Tensor

    @property
    def current(self) -> Tensor:
        """The module's present value of this attribute."""
        found: Tensor = getattr(self.module, self.name)
        return found


def copies(held: Sequence[Held]) -> list[Held]:
    """Copies buffers; entries that share a tensor share its copy."""
    copied = {id(each.tensor): each.tensor.detach().clone() for each in held}
    return [each._replace(tensor=copied[id(each.tensor)]) for each in held]


@contextmanager
def borrowed(held: Sequence[Held]) -> Iterator[None]:
    """Makes modules use these buffers inside the block, and restores their own buffers, unchanged, afterwards."""
    own = [each._replace(tensor=each.current) for each in held]
    try:
        _put(held)
        yield
    finally:
        _put(own)


class WrittenBuffers:
    """Saves the buffers that a forward pass of a module reads and writes, so that the same pass can be repeated.

    The set of written buffers is known after the first pass, which saves all buffers. Normalisation with running
    statistics is assumed to write its buffers, as it does when its statistics are not deferred.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._norms = [each for each in every(module) if isinstance(each.module, Norm)]
        self._written: set[tuple[nn.Module, str]] | None = None

    def spared(self) -> AbstractContextManager[None]:
        """Makes normalisation write to copies, for layers that recompute by themselves, as under `checkpoint`."""
        return borrowed(copies([each._replace(tensor=each.current) for each in self._norms]))

    @contextmanager
    def kept(self) -> Iterator[list[Held]]:
        """Yields a list of the buffer values at the start of a pass; the list is complete when the block ends.

        Raises:
            ArgumentError: the pass has written to a buffer that the first pass did not write to.
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
    """Returns all buffers of a module, under all their names."""
    return [
        Held(each, name, tensor)
        for each in module.modules()
        for name, tensor in each.named_buffers(recurse=False, remove_duplicate=False)
    ]


def _put(held: Sequence[Held]) -> None:
    for each in held:
        setattr(each.module, each.name, each.tensor)
