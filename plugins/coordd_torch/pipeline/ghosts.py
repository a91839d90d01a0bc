"""Parameters without values, which code that initialises them cannot tell from real ones.

A *ghost* is a tensor on the meta device in the place of a real one. Random numbers drawn for a ghost come from the
generator that the real one would have used, so that the stream of numbers stays in step; they are *lent* to the ghost
until the next one's turn comes, for some initialisers look at what they have drawn, and draw again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from coordd.errors import ArgumentError

__all__ = ["Ghosts", "UnreadableError"]

_READING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_OVERWRITING = frozenset({torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_})
_INDEXING = frozenset({torch.ops.aten.index, torch.ops.aten.index_put_})
_CPU = torch.device("cpu")
_unmasked = torch._C.DisableTorchFunction  # noqa: SLF001 - how PyTorch's own code looks behind a guise
_Layout = tuple[torch.dtype, int | torch.SymInt, torch.Size, tuple[int, ...]]


class UnreadableError(ArgumentError):
    """Values are asked for that this rank does not hold."""

    def __init__(self, labels: Iterable[str]) -> None:
        super().__init__(
            f"the builder uses the values of {', '.join(labels) or 'a tensor on the meta device'} when this rank does "
            "not hold them: compute them without parameters, or give the built model instead of its builder"
        )


class Ghosts(TorchDispatchMode):
    """While `entered`, the parameters and buffers that this thread makes are numbered, and are ghosts unless kept.

    Only one is entered at a time in a process. Parameters are numbered when they are made, buffers when they are
    registered, in one sequence.

    Attributes:
        made: by number what was made; ghosts in the place of those that are kept.
    """

    def __init__(self, kept: Collection[int], *, draw: bool) -> None:
        """Decides what will be real.

        Args:
            kept: the numbers of those that are real.
            draw: whether random numbers are drawn for ghosts.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[torch.Tensor] = []
        self._kept = kept
        self._draw = draw
        self._thread = threading.get_ident()
        self._owners: dict[int, str] = {}
        self._guise = _Guise(self)
        self._plain_new: Any = None
        self._turns: set[StorageWeakRef] = set()  # the storages of parameters
        self._sources: dict[StorageWeakRef, frozenset[int]] = {}
        self._homes: dict[StorageWeakRef, torch.device] = {}
        self._lent: dict[StorageWeakRef, tuple[_Layout, torch.Tensor]] = {}

    @contextmanager
    def entered(self) -> Iterator[Self]:
        """Has this thread make ghosts in a block; nothing of it stays, wherever an error or a signal comes."""
        with ExitStack() as leaving:
            leaving.callback(self._lent.clear)
            # Copying a module makes parameters, too, which no hook of PyTorch's shows before they have been registered.
            leaving.callback(setattr, nn.Parameter, "__new__", nn.Parameter.__dict__["__new__"])
            self._plain_new = nn.Parameter.__dict__["__new__"]
            nn.Parameter.__new__ = staticmethod(self._new)  # type: ignore[method-assign,assignment]
            leaving.callback(register_module_buffer_registration_hook(self._register).remove)  # type: ignore[arg-type]
            leaving.callback(register_module_parameter_registration_hook(self._own).remove)
            leaving.enter_context(self._guise)
            yield leaving.enter_context(self)

    def sources(self, tensor: torch.Tensor) -> frozenset[int]:
        """Tells by number from which parameters and buffers a tensor's values were computed; itself included."""
        return self._sources.get(_storage(tensor), frozenset())

    def ghost(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes the ghost of a tensor: of the same layout and sources, with the same generator."""
        if tensor.is_meta:
            return tensor
        ghost = tensor.to("meta")
        self._homes[_storage(ghost)] = tensor.device
        self._sources[_storage(ghost)] = self.sources(tensor)
        return ghost

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Finds the values of a tensor: its own, or what it has been lent."""
        if not tensor.is_meta:
            return tensor
        layout, lent = self._lent.get(_storage(tensor), (None, None))
        return lent if layout == _layout(tensor) else None

    def home(self, ghost: torch.Tensor) -> torch.device:
        """Tells the device of what a ghost stands for."""
        return self._homes.get(_storage(ghost), _CPU)

    def matched(self, target: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes ready what is assigned to ``target.data``: PyTorch takes a ghost for a ghost only, and real for real.

        Raises:
            UnreadableError: the target is real, and the tensor has no values.
        """
        fitting = self.ghost(tensor) if target.is_meta else self.value(tensor)
        if fitting is None:
            raise self._refusal([tensor])
        return target, fitting

    def _refusal(self, tensors: Iterable[torch.Tensor]) -> UnreadableError:
        numbers = sorted(frozenset().union(*(self.sources(tensor) for tensor in tensors if self.value(tensor) is None)))
        return UnreadableError(self._label(number) for number in numbers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carries out one operation: with values where all that it needs are there, else on ghosts."""
        kwargs = kwargs or {}
        with _unmasked():
            tensors = _tensors((args, kwargs))
            if not any(tensor.is_meta for tensor in tensors):
                result = func(*args, **kwargs)
            elif torch.Tag.nondeterministic_seeded in func.tags and self._draw:
                result = self._random(func, args, kwargs)
            else:
                result = self._haunt(func, args, kwargs)
            self._trace(tensors, [*_written(func, args, kwargs), *_tensors(result)])
        return result

    def _haunt(self, func: Any, args: Any, kwargs: Any) -> Any:
        written, tensors = list(_written(func, args, kwargs)), _tensors((args, kwargs))
        if func.overloadpacket in _OVERWRITING and _storage(tensors[0]) not in self._turns and self._known(tensors[1:]):
            self._lend(tensors[0])
        makes = not any(value.alias_info for value in func._schema.returns)  # noqa: SLF001 - as PyTorch's own modes do
        if self._known(tensors) and (written or makes):
            args_, kwargs_ = tree_map_only(torch.Tensor, self.value, (args, kwargs))
            result = func(*args_, **kwargs_)
            if makes or not all(tensor.is_meta for tensor in written):
                return tree_map_only(torch.Tensor, self._borrower, result) if makes else result
        elif not all(tensor.is_meta for tensor in written):
            raise self._refusal(tensors)
        elif func.overloadpacket in _INDEXING and self._known(_tensors(args[1])):
            return self._index(func, args, kwargs, written)
        elif not _READING.isdisjoint(func.tags):
            raise self._refusal(tensors)
        else:
            self._forget(written)
        return self._outline(func, args, kwargs)

    def _index(self, func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
        """How many elements a mask selects is known by the mask alone, but not on the meta device."""
        args, kwargs = tree_map_only(torch.Tensor, self._stand_in, (args, kwargs))
        result = func(*args, **kwargs)
        self._forget(written)
        return written[0] if written else self.ghost(result)

    def _random(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = list(_written(func, args, kwargs))
        for tensor in written:
            self._lend(tensor)
        if self._known(_tensors((args, kwargs))):
            return self._haunt(func, args, kwargs)
        if not all(tensor.is_meta for tensor in written):
            raise self._refusal(_tensors((args, kwargs)))
        # How many numbers are drawn depends on the layout only, never on probabilities or means that are not known.
        args_, kwargs_ = tree_map_only(torch.Tensor, self._stand_in, (args, kwargs))
        func(*args_, **kwargs_)
        self._forget(written)
        return self._outline(func, args, kwargs)

    def _known(self, tensors: Iterable[torch.Tensor]) -> bool:
        return all(self.value(tensor) is not None for tensor in tensors)

    def _forget(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._lent.pop(_storage(tensor), None)

    def _outline(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self.ghost, (args, kwargs))
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        result = func(*args, **kwargs | {"device": torch.device("meta")})
        self._homes |= {_storage(tensor): torch.device(device) for tensor in _tensors(result)}
        return result

    def _lend(self, tensor: torch.Tensor) -> None:
        if self.value(tensor) is not None:
            return
        storage = _storage(tensor)
        if storage in self._turns:
            self._lent.clear()
        lent = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.home(tensor))
        self._lent[storage] = _layout(tensor), lent

    def _borrower(self, tensor: torch.Tensor) -> torch.Tensor:
        self._lent = {storage: lent for storage, lent in self._lent.items() if not storage.expired()}
        ghost = self.ghost(tensor)
        self._lent[_storage(ghost)] = _layout(ghost), tensor
        return ghost

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self.value(tensor)
        return torch.zeros_like(tensor, device=self.home(tensor)) if value is None else value

    def _trace(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        sources = frozenset().union(*map(self.sources, inputs))
        home = next((self.home(tensor) for tensor in inputs if tensor.is_meta), _CPU)
        for tensor in outputs:
            if sources:
                self._sources[_storage(tensor)] = sources | self.sources(tensor)
            if tensor.is_meta:
                self._homes.setdefault(_storage(tensor), home)

    def _new(self, cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> torch.Tensor:
        if self._elsewhere():
            elsewhere: torch.Tensor = self._plain_new.__func__(cls, data, requires_grad)
            return elsewhere
        with _unmasked():
            data = torch.empty(0) if data is None else data
            data = data if len(self.made) in self._kept else self.ghost(data)
            made: torch.Tensor = self._plain_new.__func__(cls, data, requires_grad)
            self._turns.add(_storage(made))
            return self._number(made)

    def _register(self, _module: nn.Module, _name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if buffer is None or self._elsewhere():
            return None
        with _unmasked():
            return self._number(buffer if len(self.made) in self._kept else self.ghost(buffer))

    def _elsewhere(self) -> bool:
        """Other threads make parameters of their own in the meantime; modes are a thread's, but not what is patched."""
        return threading.get_ident() != self._thread

    def _number(self, made: torch.Tensor) -> torch.Tensor:
        self._sources[_storage(made)] = self.sources(made) | {len(self.made)}
        self.made.append(made if made.is_meta else made.detach().to("meta"))
        return made

    def _own(self, module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
        if parameter is not None and not self._elsewhere():
            self._owners.setdefault(id(parameter), f"{type(module).__name__}.{name}")

    def _label(self, number: int) -> str:
        owner = self._owners.get(id(self.made[number]), "a parameter")
        return f"{owner} (number {number}, of shape {tuple(self.made[number].shape)})"


class _Guise(TorchFunctionMode):
    """Shows ghosts as what they stand for: some initialisers leave out what says that it is on the meta device."""

    def __init__(self, ghosts: Ghosts) -> None:
        super().__init__()
        self._ghosts = ghosts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:
            return func(*self._ghosts.matched(*args))
        if func in _GUISES and args[0].is_meta:
            return _GUISES[func](self._ghosts.home(args[0]))
        return func(*args, **(kwargs or {}))


_SHOWN: Any = torch.Tensor
_SET_DATA = _SHOWN.data.__set__
_GUISES: dict[Any, Callable[[torch.device], Any]] = {
    _SHOWN.device.__get__: lambda home: home,
    _SHOWN.is_cpu.__get__: lambda home: home.type == "cpu",
    _SHOWN.is_cuda.__get__: lambda home: home.type == "cuda",
    _SHOWN.is_meta.__get__: lambda _: False,
}


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    arguments = func._schema.arguments  # noqa: SLF001 - what PyTorch's own modes read
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(given.get(argument.name))
