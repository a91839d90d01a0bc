"""One stage of a model: a range of consecutive layers with only their own parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError
from coordd_torch.pipeline.cut import Cut
from coordd_torch.pipeline.fake_execution import versions
from coordd_torch.pipeline.trace import Trace
from coordd_torch.pipeline.trace_cache import KEPT, Traces
from coordd_torch.pipeline.views import ALIASED

__all__ = ["OUTPUT", "StageModule"]

OUTPUT = "output"
"""The name of the last stage's result: the model's output, in its own structure."""


@dataclass(eq=False)
class _Program:
    """The code that a stage runs for one trace."""

    cut: Cut
    run: Callable[..., Any]
    output: pytree.TreeSpec
    written: dict[str, set[int]] | None = None
    """The values that the stage writes to in place, and which of their tensors; known after the first run."""

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of its arguments."""
        return (*self.cut.inputs, *self.cut.reads)


class StageModule(nn.Module):
    """Consecutive layers of a model.

    It shares parameters, buffers and modules with the model it was made from, under the names they have there: only
    those of its layers, a tied parameter under all of its names.
    """

    def __init__(self, model: nn.Module, traces: Traces, first: int, last: int) -> None:
        super().__init__()
        self._traces = traces
        self._span = (first, last)
        self._programs: dict[Trace, _Program] = {}
        self.training = self._trains = model.training
        _furnish(self, model, Cut(traces.first, first, last))
        self._program(traces.first)
        self._modes = [(module, module.training) for module in self.modules()]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The model inputs that the stage reads, in the mode and for the shapes of the capture."""
        return self._program(self._traces.first).cut.inputs

    @property
    def reads(self) -> tuple[str, ...]:
        """The values of earlier stages that the stage reads, likewise."""
        return self._program(self._traces.first).cut.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """The values that the stage sends to later stages, likewise."""
        return self._program(self._traces.first).cut.writes

    def interface(self, values: Mapping[str, Any]) -> Cut:
        """Returns what the stage reads and writes for these inputs of the model, in its current mode."""
        return self._program(self._traces.find(values, training=self.training)).cut

    def forward(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the layers.

        Args:
            values: all inputs of the model, as `Captured.inputs` names them, and the values that the stage reads from
                others.

        Returns:
            The results by name; of the last stage, the model's output is ``"output"``.

        Raises:
            ArgumentError: a value is missing.
        """
        program = self._program(self._traces.find(values, training=self.training))
        cut = program.cut
        missing = [name for name in program.takes if name not in values]
        if missing:
            raise ArgumentError(f"layers {self._span[0]} to {self._span[1]} also read {', '.join(missing)}")
        received = _Received(program, values)
        results = program.run(self, *received.values)
        received.note(program)
        given = dict(zip(cut.writes, results, strict=False))
        if cut.is_last:
            given[OUTPUT] = pytree.tree_unflatten(results, program.output)
        return given

    def train(self, mode: bool = True) -> StageModule:
        """Sets the mode of all modules that are not frozen.

        A module that was in evaluation mode when the stage was made, in a model in training mode, is frozen and stays
        so.
        """
        super().train(mode)
        for module, trains in self._modes if self._trains else ():
            module.training = mode and trains
        return self

    def restore(self) -> None:
        """Restores the modes that the layers had when the stage was made."""
        for module, trains in self._modes:
            module.training = trains

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StageModule:
        """Keeps tied parameters tied when they are replaced, as by `to_empty`."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # it has no types
        for first, *others in names.values():
            for name in others:
                setattr(_owner(self, name), name.rpartition(".")[2], self.get_parameter(first))
        return self

    def _program(self, trace: Trace) -> _Program:
        if trace not in self._programs:
            cut = Cut(trace, *self._span)
            _add_constants(self, trace, cut)
            # The generated code refers to attributes of the module that runs it.
            run = type(fx.GraphModule(self, cut.graph())).forward
            self._programs[trace] = _Program(cut, run, trace.output)
            if len(self._programs) > KEPT:
                del self._programs[next(iter(self._programs))]
        return self._programs[trace]


class _Received:
    """A stage's received values, protected against in-place writes, because a recomputation needs them unchanged.

    Also, microbatches of inputs are slices of one tensor, the user's, and a write to one counts as a write to all. The
    first run copies all values; later runs copy the values that the first run wrote to.
    """

    def __init__(self, program: _Program, values: Mapping[str, Any]) -> None:
        self.values = [
            pytree.tree_map_only(torch.Tensor, torch.clone, values[name])
            if program.written is None or name in program.written
            else values[name]
            for name in program.takes
        ]
        self._versions = [versions(value) for value in self.values] if program.written is None else []
        self._aliased = {name: set(values.get(name + ALIASED, ())) for name in program.cut.reads}

    def note(self, program: _Program) -> None:
        """Records after the first run which values were written to.

        Raises:
            ArgumentError: one is a view of memory that another value shares, which would not see the write.
        """
        if program.written is None:
            told = zip(program.takes, map(versions, self.values), self._versions, strict=True)
            changed = {name: _unequal(now, then) for name, now, then in told}
            program.written = {name: numbers for name, numbers in changed.items() if numbers}
        for name, numbers in program.written.items():
            if numbers & self._aliased.get(name, set()):
                first, last = program.cut.span
                raise ArgumentError(
                    f"layers {first} to {last} write in place to {name!r}, which shares memory with something else "
                    "that comes from the same stage: across a cut they are apart, and the other would not be written "
                    "to; clone() it, or do not work in place, or let no cut be between"
                )


def _unequal(now: list[int], then: list[int]) -> set[int]:
    return {number for number, (one, other) in enumerate(zip(now, then, strict=True)) if one != other}


def _furnish(stage: nn.Module, model: nn.Module, cut: Cut) -> None:
    """Gives a stage the modules and tensors of its layers, in the model's order and under the model's names."""
    wanted = cut.tensors(model)
    inside = "\0"
    for path, module in model.named_modules(remove_duplicate=False):
        if (path + ".").startswith(inside):
            continue
        if path in cut.modules:
            inside = path + "."
            _owner(stage, path).add_module(path.rpartition(".")[2], module)
            continue
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in wanted:
                _owner(stage, _join(path, name)).register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) in wanted:
                persistent = name not in module._non_persistent_buffers_set  # noqa: SLF001 - no public accessor
                _owner(stage, _join(path, name)).register_buffer(name, buffer, persistent=persistent)


def _add_constants(stage: nn.Module, trace: Trace, cut: Cut) -> None:
    """Adds tensors that are not part of the model's state, and the bodies of higher-order operators."""
    for path, value in cut.constants(trace.root, known=stage):
        name = path.rpartition(".")[2]
        if isinstance(value, nn.Module):
            _owner(stage, path).add_module(name, value)
        elif _is_constant(value):
            _owner(stage, path).register_buffer(name, value, persistent=False)
        else:
            raise ArgumentError(
                f"in this mode, or for inputs of this kind, layers {cut.span[0]} to {cut.span[1]} need {path!r}, which "
                "they do not use in training with the first batch, so their stage does not have it: use it in both, or "
                "in a module that is one layer"
            )


def _is_constant(value: Any) -> bool:
    """Returns whether the value is a tensor that the trace owns; its parameters and buffers have no data."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter | FakeTensor)
    return plain and not value.is_meta


def _owner(root: nn.Module, path: str) -> nn.Module:
    """Returns the module that an attribute belongs to, and creates it if it does not exist."""
    found = root
    for name in path.split(".")[:-1]:
        if not hasattr(found, name):
            found.add_module(name, nn.Module())
        found = found.get_submodule(name)
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
