"""Writes a picture to a file, in the format given by the file's extension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from coordd.errors import ArgumentError

__all__ = ["check_ending", "save"]

_SHARP = 2
"""Pixels of a PNG per pixel of the picture, so that small numbers are readable."""


def check_ending(path: Path) -> None:
    """Checks that a picture can be written to a file of this name, before any work is done for it.

    Raises:
        ArgumentError: the format is unknown, or its converter is not installed.
    """
    if path.suffix not in {".svg", ".png"}:
        raise ArgumentError(f"a picture is an SVG or a PNG: let {path.name} end in .svg or .png")
    if path.suffix == ".png":
        _converter()


def save(picture: str, path: Path) -> None:
    """Writes an SVG as it is, or as a PNG.

    Raises:
        ArgumentError: the format is unknown, or its converter is not installed.
        OSError: the file cannot be written.
    """
    check_ending(path)
    if path.suffix == ".svg":
        path.write_text(picture, "utf-8")
        return
    path.write_bytes(_converter()(bytestring=picture.encode(), scale=_SHARP))


def _converter() -> Callable[..., bytes]:
    """Returns the converter from SVG to PNG; it is optional, and loads a library that may be missing."""
    try:
        from cairosvg import svg2png
    except (ImportError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            f"PNGs are made by CairoSVG, which cannot be loaded ({reason}): pip install 'coordd[picture]', which needs "
            "the Cairo library, or name a file that ends in .svg"
        ) from error
    return cast("Callable[..., bytes]", svg2png)
