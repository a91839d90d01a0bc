"""What a rank builds costs the memory of its part, not of the whole model."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LAYERS, _WIDTH = 8, 3000
pytestmark = pytest.mark.slow
_LAYER_MB = _WIDTH * _WIDTH * 4 / 2**20

_SCRIPT = """
import copy
import sys

import torch
from torch import nn

from coordd_torch.pipeline.build import materialise, outline

layers, width, wanted, initialise = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def builder():
    prototype = nn.Linear(width, width, bias=False)
    model = nn.Sequential(*[copy.deepcopy(prototype) if initialise == "copied" else nn.Linear(width, width, bias=False)
                            for _ in range(layers)])
    for layer in model:
        if initialise == "normal":
            nn.init.normal_(layer.weight)
    return model


materialise(lambda: nn.Linear(4, 4), set())  # whatever is imported on first use
before = peak()
if wanted < 0:
    model = builder()
elif wanted == 0:
    model = outline(builder)
else:
    model = materialise(builder, {f"{layer}.weight" for layer in range(3, 3 + wanted)})
print(peak() - before)
"""


def megabytes(wanted: int, initialise: str) -> float:
    command = [sys.executable, "-c", _SCRIPT, str(_LAYERS), str(_WIDTH), str(wanted), initialise]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=110).stdout)


def test_a_whole_model_costs_all_of_it() -> None:
    assert megabytes(-1, "normal") > 0.95 * _LAYERS * _LAYER_MB


@pytest.mark.parametrize(("initialise", "extra"), [("normal", 1), ("copied", 2)])
def test_a_quarter_costs_a_quarter_and_one_parameter(initialise, extra) -> None:
    """Copies need what they are copied from, too."""
    assert megabytes(2, initialise) < (2 + extra + 0.3) * _LAYER_MB


def test_an_outline_costs_nothing() -> None:
    assert megabytes(0, "normal") < 0.3 * _LAYER_MB
