"""Errors that explain why a model cannot be cut: the line of the user's code, and the value there."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Self

import torch
from torch import nn
from torch.fx.proxy import TraceError

from coordd.errors import ArgumentError

__all__ = ["CaptureError", "DataDependentError", "NoExampleError"]

_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))  # noqa: PTH120 - a prefix
_HEAD = 300


class NoExampleError(ArgumentError):
    """A capture method needs an example batch, and there is none."""

    def __init__(self) -> None:
        super().__init__("it needs a batch (`example=`)")


class DataDependentError(TraceError):
    """A forward whose control flow depends on the values of a tensor.

    Attributes:
        module: the path of the module whose forward does so; empty for the model itself.
    """

    def __init__(self, value: str, use: str, module: str) -> None:
        """Composes the message from an expression and forward's use of its value."""
        super().__init__(f"the value of `{value}` {use}, and is known with data only")
        self.module = module

    def remedy(self, cuts: Sequence[str] | None) -> str:
        """Suggests a fix, given the modules where stages may begin; None for any module."""
        inside = [cut for cut in cuts or () if cut.startswith(self.module + ".")] if self.module else []
        move = "move that line, with the layers that it chooses between, into a module of its own"
        if inside:
            return f"leave {', '.join(map(repr, inside))} out of cuts, so that {self.module!r} is called as a whole"
        if cuts is not None:
            return f"{move} that holds none of cuts={list(cuts)!r}, which is then called as a whole"
        if self.module:
            return (
                "name the modules at which stages may begin, as in cuts=['blocks.1', 'head'], and none inside "
                f"{self.module!r}, so that it is called as a whole"
            )
        return f"{move}, and name the modules at which stages may begin, as in cuts=['blocks.1', 'head']"


class CaptureError(ArgumentError):
    """No graph can be made of a model.

    Attributes:
        places: for each method that was tried ``file:line in function``; empty if no line of the user's code was found.
    """

    def __init__(self, text: str, places: Sequence[str]) -> None:
        super().__init__(text)
        self.places = tuple(places)

    @classmethod
    def composed(
        cls, model: nn.Module, errors: Sequence[tuple[str, Exception]], *, cuts: Sequence[str] | None = None
    ) -> Self:
        """Lists the errors of all methods that were tried; one error per method and line."""
        name = type(model).__name__
        if (found := _data_dependent(errors)) is not None:
            what = repr(found.module) if found.module else "the model itself"
            example = any(isinstance(each, NoExampleError) for _, each in errors)
            text = (
                f"{name} cannot be cut into stages by itself, for the forward of {what} has data-dependent control "
                f"flow at {_place(found)} ({found}): {found.remedy(cuts)}"
                f"{', or give an `example` of a batch if it depends on shapes alone' * example}"
            )
            return cls(text, [_place(each) for _, each in errors])
        reasons: dict[tuple[str, str], str] = {}
        for way, error in errors:
            reasons.setdefault((way, _place(error)), _why(error))
        told = "".join(f"\n  {way}: {place and f'at {place}: '}{why}" for (way, place), why in reasons.items())
        text = (
            f"{name} cannot be cut into stages by itself:{told}\n"
            "Change that line, or move it into a module that is one layer; give an `example` of a batch if none was "
            "given, without inputs that only that line needs (such as labels). Experts that are called one by one need "
            "another implementation (experts_implementation='grouped_mm' in transformers). With "
            "cuts=['blocks.1', 'head'] stages begin at these modules only, and modules that hold none of them are "
            "called as a whole, whatever their forward does"
        )
        return cls(text, [place for _, place in reasons])


def _data_dependent(errors: Sequence[tuple[str, Exception]]) -> DataDependentError | None:
    """Returns the error of the first method, if the same line stops all other methods, too."""
    first = errors[0][1]
    if not isinstance(first, DataDependentError):
        return None
    for _, error in errors[1:]:
        dependent = isinstance(error, DataDependentError) or "data-dependent" in str(error)
        if not isinstance(error, NoExampleError) and not (dependent and _place(error) in {"", _place(first)}):
            return None
    return first


def _place(error: BaseException) -> str:
    """Returns the innermost line outside of PyTorch and this package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_LIBRARIES) and not frame.filename.startswith("<")
    ]
    if not frames:
        return ""
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}, `{frame.line}`"


def _why(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    first = text.split("\n\n")[0].replace("\n", " ")
    return f"{type(error).__name__}: {first[:_HEAD]}"
