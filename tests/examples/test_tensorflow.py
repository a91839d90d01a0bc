"""The examples of Keras and TensorFlow do what their README says, on real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.mpi.launch import launch

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
pytest.importorskip("keras", reason="Keras is not installed: pip install 'coordd[tensorflow]'")
pytestmark = [pytest.mark.mpi, pytest.mark.slow]

_FOLDER = Path(__file__).resolve().parents[2] / "examples"


def _trained(
    script: str, size: int, save: Path, *, launcher: str, **environment: str
) -> tuple[float, list[np.ndarray]]:
    """The accuracy that an example tells, and its weights."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    path = save / f"{size}.npz"
    outcome = launch(
        size, _FOLDER / script, "--save", str(path), launcher=launcher, timeout=100, variables=quiet | environment
    )
    assert outcome.returncode == 0, str(outcome)
    found = re.search(r"test accuracy ([\d.]+)%", outcome.stdout)
    assert found, str(outcome)
    with np.load(path) as weights:
        return float(found[1]), [weights[name] for name in weights.files]


@pytest.mark.parametrize(
    ("script", "backend"),
    [
        ("keras/digits.py", "tensorflow"),
        pytest.param("keras/digits.py", "torch", marks=pytest.mark.sweep),
        ("tensorflow/digits.py", "tensorflow"),
    ],
)
def test_two_ranks_recognise_digits_as_a_single_process_does(script: str, backend: str, tmp_path: Path) -> None:
    accuracy, pair = _trained(script, 2, tmp_path, launcher="coordd", KERAS_BACKEND=backend)
    _, alone = _trained(script, 1, tmp_path, launcher="python", KERAS_BACKEND=backend)
    assert accuracy >= 97
    for one, other in zip(pair, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("backend", "size"), [pytest.param("tensorflow", 4, marks=pytest.mark.sweep), ("torch", 2)])
def test_the_paper_s_network_learns_in_stages(backend: str, size: int, tmp_path: Path) -> None:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": backend}
    script, picture = _FOLDER / "keras/pipeline_mlp.py", tmp_path / "step.svg"
    more = ("--picture", str(picture), "--save", str(tmp_path / "model.keras"))
    outcome = launch(size, script, *more, launcher="coordd", timeout=150, variables=quiet)
    assert outcome.returncode == 0, str(outcome)
    assert " | ".join(["2 layers"] * 4) in outcome.stdout or size < 4, str(outcome)
    found = re.search(r"test accuracy ([\d.]+)%", outcome.stdout)
    assert found, str(outcome)
    assert float(found[1]) >= 95  # 96.4 to 98.1: a small perceptron, with dropout
    assert picture.read_text().startswith("<svg")
    assert (tmp_path / "model.keras").stat().st_size > 50_000
