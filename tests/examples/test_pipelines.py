"""The examples of pipelines train on real ranks, in stages and replicas, and say what came of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpi.job import Outcome
from tests.mpi.launch import launch

pytestmark = pytest.mark.mpi

_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "pytorch"
_CNN = _FOLDER / "pipeline_cnn.py"
_GPT = _FOLDER / "pipeline_gpt.py"
_MLP = _FOLDER.parent / "keras" / "pipeline_mlp.py"


def _run(size: int, script: Path, *arguments: object, launcher: str = "coordd") -> Outcome:
    outcome = launch(size, script, *map(str, arguments), launcher=launcher, timeout=110)
    assert outcome.returncode == 0, str(outcome)
    return outcome


def _number(pattern: str, outcome: Outcome) -> float:
    found = re.search(pattern, outcome.stdout)
    assert found, str(outcome)
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "replicas"),
    [(2, 2), *(pytest.param(*sizes, marks=pytest.mark.sweep) for sizes in ((2, 1), (3, 1), (3, 2)))],
)
def test_digits_are_recognised_in_stages_and_replicas(stages: int, replicas: int, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    outcome = _run(stages * replicas, _CNN, "--data-parallel", replicas, "--picture", picture)
    assert _number(r"test accuracy ([\d.]+)%", outcome) >= 97
    assert f"{replicas} replica(s) of" in outcome.stdout
    assert outcome.stdout.count(" layer") == stages
    _assert_shown(outcome, picture)


@pytest.mark.parametrize(("size", "launcher"), [(2, "mpirun"), (1, "python")])
def test_digits_for_a_few_steps_without_coordd_run(size: int, launcher: str, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    outcome = _run(size, _CNN, "--max-steps", 3, "--picture", picture, launcher=launcher)
    assert "after 3 steps of" in outcome.stdout
    _assert_shown(outcome, picture)


def _assert_shown(outcome: Outcome, picture: Path) -> None:
    assert _number(r"the last step, 1f1b: \d+ ms and ([\d.]+)% idle", outcome) >= 0
    assert re.findall(r">(predicted|measured)\b", picture.read_text()) == ["predicted", "measured"]


def test_a_checkpoint_of_two_stages_is_that_of_one_and_of_three(tmp_path: Path) -> None:
    small = ("--width", 32, "--layers", 2)
    saved = _run(2, _GPT, *small, "--max-steps", 60, "--schedule", "zb-h1", "--save", tmp_path)
    loss = _number(r"held-out loss ([\d.]+)", saved)
    assert loss < 2.2, "nothing was learned: a guess costs log(13) = 2.56"
    for size, launcher in ((1, "python"), (3, "coordd")):
        loaded = _run(size, _GPT, *small, "--max-steps", 0, "--load", tmp_path, launcher=launcher)
        assert _number(r"held-out loss ([\d.]+)", loaded) == pytest.approx(loss, abs=2e-4)


@pytest.mark.slow
@pytest.mark.sweep
def test_sums_are_learned() -> None:
    outcome = _run(2, _GPT)
    assert _number(r"(\d+) of 100 sums are right", outcome) > 80
    assert "letters/s" in outcome.stdout


@pytest.mark.parametrize("script", [_CNN, _GPT], ids=lambda script: script.stem)
def test_examples_are_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) < 140


@pytest.mark.parametrize("script", [_CNN, _GPT, _MLP], ids=lambda script: script.stem)
def test_a_picture_that_cannot_be_drawn_is_refused_at_the_start(script: Path) -> None:
    outcome = launch(1, script, "--picture", "step.txt", launcher="python", variables={"KERAS_BACKEND": "torch"})
    assert "ArgumentError: a picture is an SVG or a PNG: let step.txt end in .svg or .png" in outcome.stderr
    assert "step/s" not in outcome.stderr, str(outcome)
    assert outcome.stdout == ""
