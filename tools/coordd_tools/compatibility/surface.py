"""The public names of Horovod 0.28, part by part; data only."""

from __future__ import annotations

from coordd_tools.compatibility.common import COMMON
from coordd_tools.compatibility.keras import KERAS, KERAS_ALONE, TENSORFLOW_KERAS_ALONE
from coordd_tools.compatibility.name import Part
from coordd_tools.compatibility.tensorflow import TENSORFLOW
from coordd_tools.compatibility.torch import TORCH

__all__ = ["SURFACE"]

SURFACE: tuple[Part, ...] = (COMMON, TORCH, TENSORFLOW, KERAS, TENSORFLOW_KERAS_ALONE, KERAS_ALONE)
"""In the order of the page."""
