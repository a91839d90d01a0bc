"""Why a model cannot be cut: the line of the user's code, and the value there."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from coordd.errors import ArgumentError

__all__ = ["CaptureError"]

_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))  # noqa: PTH120 - a prefix
_HEAD = 300


class CaptureError(ArgumentError):
    """A model of which no graph can be made.

    Attributes:
        places: for each way that was tried ``file:line in function``, or nothing if none of the user's lines was seen.
    """

    def __init__(self, model: str, reasons: Sequence[tuple[str, str, str]]) -> None:
        """Composes the text; a reason is the way that was tried, the place that prevents it, and why."""
        self.places = tuple(place for _, place, _ in reasons)
        told = "".join(f"\n  {way}: {place and f'at {place}: '}{why}" for way, place, why in reasons)
        super().__init__(
            f"{model} cannot be cut into stages by itself:{told}\n"
            "Change that line, give an `example` of a batch if none was given, or, if the model calls its parts one "
            "after another, name them: cuts=['embed', 'blocks.0', 'blocks.1', 'head']"
        )

    @classmethod
    def composed(cls, model: nn.Module, errors: Sequence[tuple[str, Exception]]) -> Self:
        """Tells of the errors of all ways that were tried; of one way at one place once."""
        reasons: dict[tuple[str, str], str] = {}
        for way, error in errors:
            reasons.setdefault((way, _place(error)), _why(error))
        return cls(type(model).__name__, [(way, place, why) for (way, place), why in reasons.items()])


def _place(error: BaseException) -> str:
    """The innermost line that is neither PyTorch's nor this package's."""
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
