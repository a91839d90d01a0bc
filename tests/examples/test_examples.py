"""The examples do what their README says, on real ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.mpi.job import Outcome
from tests.mpi.launch import launch

pytestmark = pytest.mark.mpi

_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "pytorch"
_DIGITS = _FOLDER / "digits.py"
_CHARLM = _FOLDER / "charlm.py"


def _run(size: int, script: Path, *arguments: object, launcher: str = "coordd") -> Outcome:
    outcome = launch(size, script, *map(str, arguments), launcher=launcher, timeout=100)
    assert outcome.returncode == 0, str(outcome)
    return outcome


def _accuracy(outcome: Outcome) -> float:
    found = re.search(r"test accuracy ([\d.]+)%", outcome.stdout)
    assert found, str(outcome)
    return float(found[1])


@dataclass(frozen=True)
class Training:
    """A finished training."""

    outcome: Outcome
    parameters: dict[str, torch.Tensor]


def _train(path: Path, size: int, launcher: str) -> Training:
    outcome = _run(size, _DIGITS, "--save", path, launcher=launcher)
    return Training(outcome, torch.load(path, weights_only=True))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Digits in full, on two ranks."""
    return _train(tmp_path_factory.mktemp("digits") / "pair", 2, "coordd")


@pytest.mark.slow
def test_digits_are_recognised(pair: Training) -> None:
    assert _accuracy(pair.outcome) >= 97
    assert "on 2 rank(s)" in pair.outcome.stdout
    assert "440/440" in pair.outcome.stderr


@pytest.mark.slow
def test_two_ranks_end_with_the_parameters_of_a_single_process(pair: Training, tmp_path: Path) -> None:
    alone = _train(tmp_path / "alone", 1, "python")
    torch.testing.assert_close(pair.parameters, alone.parameters, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_runs_are_bitwise_equal(pair: Training, tmp_path: Path) -> None:
    again = _train(tmp_path / "again", 2, "coordd")
    torch.testing.assert_close(pair.parameters, again.parameters, rtol=0, atol=0)


def test_digits_for_a_few_steps_without_coordd_run() -> None:
    assert _accuracy(_run(2, _DIGITS, "--max-steps", 3, launcher="mpirun")) > 0


@pytest.mark.parametrize(("size", "launcher"), [(2, "coordd"), (2, "mpirun"), (1, "python")])
def test_charlm_for_a_few_steps(size: int, launcher: str) -> None:
    small = ("--width", 32, "--layers", 1, "--context", 32)
    outcome = _run(size, _CHARLM, "--max-steps", 30, *small, launcher=launcher)
    loss = float(re.search(r"held-out loss ([\d.]+)", outcome.stdout)[1])
    assert loss < 5.4, "nothing was learned: a guess costs log(256) = 5.55"
    assert "tokens/s" in outcome.stdout
    assert "def " in outcome.stdout


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    outcome = launch(2, _DIGITS, "--batch-size", "63", launcher="coordd")
    assert outcome.returncode == 1
    assert "--batch-size 63 cannot be shared equally by 2 ranks" in outcome.stderr


@pytest.mark.parametrize("script", [_DIGITS, _CHARLM], ids=lambda script: script.stem)
def test_examples_are_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) < 120


def test_the_difference_in_the_readme_is_that_of_the_script() -> None:
    difference = re.search(r"```diff\n(.*?)```", (_FOLDER / "README.md").read_text(), re.DOTALL)[1].splitlines()
    script = _DIGITS.read_text().splitlines()
    new = [line[1:] for line in difference if line[:1] in {"+", " "} and not line.startswith("+++")]
    assert [line for line in new if line not in script] == []
    assert sum(line.startswith("+") for line in difference) == 6
