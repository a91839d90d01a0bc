"""Writes a picture to a file, whose ending says in which form."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from coordd.errors import ArgumentError

__all__ = ["check_ending", "save"]

_SHARP = 2
"""Pixels of a PNG for each of the picture's own, so that small numbers can be read."""


def check_ending(path: Path) -> None:
    """Looks whether a picture can be written to a file of this name, before any work is done for it.

    Raises:
        ArgumentError: there is no such form, or what makes it is not installed.
    """
    if path.suffix not in {".svg", ".png"}:
        raise ArgumentError(f"a picture is an SVG or a PNG: let {path.name} end in .svg or .png")
    if path.suffix == ".png" and find_spec("cairosvg") is None:
        raise ArgumentError(
            "PNGs are made by CairoSVG: pip install 'coordd[picture]', or name a file that ends in .svg"
        )


def save(picture: str, path: Path) -> None:
    """Writes an SVG as it is, or as a PNG.

    Raises:
        ArgumentError: there is no such form, or what makes it is not installed.
        OSError: the file cannot be written.
    """
    check_ending(path)
    if path.suffix == ".svg":
        path.write_text(picture, "utf-8")
        return
    from cairosvg import svg2png  # optional, and loads the Cairo library

    path.write_bytes(svg2png(bytestring=picture.encode(), scale=_SHARP))
