"""Meta-device initialisation: parameters without data that initialisation code cannot tell from real ones.

A *ghost* is a tensor on the meta device in place of a real one. Random numbers for a ghost are drawn from the generator
that the real tensor would use, so that the generator's state stays the same. The drawn values stay available ("lent")
until the next parameter is initialised, because some initialisers read the values they have drawn, and draw again.
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
_unmasked = torch._C.DisableTorchFunction  # noqa: SLF001 - disables torch function modes, as PyTorch's own code does
_Layout = tuple[torch.dtype, int | torch.SymInt, torch.Size, tuple[int, ...]]


class UnreadableError(ArgumentError):
    """The builder reads values that this rank does not hold."""

    def __init__(self, labels: Iterable[str]) -> None:
        super().__init__(
            f"the builder uses the values of {', '.join(labels) or 'a tensor on the meta device'} when this rank does "
            "not hold them: compute them without parameters, or give the built model instead of its builder"
        )


class Ghosts(TorchDispatchMode):
    """Dispatch mode that numbers this thread's new parameters and buffers, and makes ghosts of all but the kept ones.

    Only one can be entered at a time per process. Parameters are numbered when they are made, buffers when they are
    registered, in one sequence.

    Attributes:
        made: the numbered tensors; kept ones are represented by meta tensors.
    """

    def __init__(self, kept: Collection[int], *, draw: bool) -> None:
        """Selects the real tensors.

        Args:
            kept: the numbers of the tensors that are real.
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
        self._turns: set[StorageWeakRef] = set()  # storages of parameters
        self._sources: dict[StorageWeakRef, frozenset[int]] = {}
        self._homes: dict[StorageWeakRef, torch.device] = {}
        self._lent: dict[StorageWeakRef, tuple[_Layout, torch.Tensor]] = {}

    @contextmanager
    def entered(self) -> Iterator[Self]:
        """Makes this thread create ghosts inside the block; all patches are undone on exit, also after an error."""
        with ExitStack() as leaving:
            leaving.callback(self._lent.clear)
            # Copying a module makes parameters, too; PyTorch's hooks report these only when they are registered.
            leaving.callback(setattr, nn.Parameter, "__new__", nn.Parameter.__dict__["__new__"])
            self._plain_new = nn.Parameter.__dict__["__new__"]
            nn.Parameter.__new__ = staticmethod(self._new)  # type: ignore[method-assign,assignment]
            leaving.callback(register_module_buffer_registration_hook(self._register).remove)  # type: ignore[arg-type]
            leaving.callback(register_module_parameter_registration_hook(self._own).remove)
            leaving.enter_context(self._guise)
            yield leaving.enter_context(self)

    def sources(self, tensor: torch.Tensor) -> frozenset[int]:
        """Returns the numbers of the parameters and buffers that a tensor's values depend on, including itself."""
        return self._sources.get(_storage(tensor), frozenset())

    def ghost(self, tensor: torch.Tensor) -> torch.Tensor:
        """Creates the ghost of a tensor, with the same layout, sources and home device."""
        if tensor.is_meta:
            return tensor
        ghost = tensor.to("meta")
        self._homes[_storage(ghost)] = tensor.device
        self._sources[_storage(ghost)] = self.sources(tensor)
        return ghost

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a tensor with values: itself if it is real, or its lent values; None if there are none."""
        if not tensor.is_meta:
            return tensor
        layout, lent = self._lent.get(_storage(tensor), (None, None))
        return lent if layout == _layout(tensor) else None

    def home(self, ghost: torch.Tensor) -> torch.device:
        """Returns the device of the tensor that a ghost replaces."""
        return self._homes.get(_storage(ghost), _CPU)

    def matched(self, target: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepares an assignment to ``target.data``: PyTorch accepts only a ghost for a ghost, and real for real.

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
        """Runs one operation: with values if all that it needs are available, otherwise on ghosts."""
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
        """Runs an indexing operation whose result size depends on the values of a mask, which the meta device lacks."""
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
        # The number of random values depends only on the layout, not on probabilities or means, which may be unknown.
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
        """Returns whether another thread is calling: modes are per thread, but patched functions are process-wide."""
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
    """Makes ghosts report the device of the tensors that they replace, as some initialisers skip meta tensors."""

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
