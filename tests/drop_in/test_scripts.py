"""Scripts that know of Horovod only run unchanged, on two ranks as one process does on the whole batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from coordd.launch.drop_in import python_path
from tests.mpi.job import Outcome
from tests.mpi.launch import environment, launch

pytestmark = pytest.mark.mpi

_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "horovod"


def _run(script: str | Path, *arguments: object, size: int = 2, launcher: str = "as-horovod") -> Outcome:
    """Runs a script; without `coordd run` the way is the one that the documentation tells."""
    script = script if isinstance(script, str) else _FOLDER / script
    variables = {} if launcher == "as-horovod" else {"PYTHONPATH": python_path(environment())}
    outcome = launch(size, script, *map(str, arguments), launcher=launcher, timeout=100, variables=variables)
    assert outcome.returncode == 0, str(outcome)
    return outcome


def _alone(script: Path, *arguments: object) -> Outcome:
    return _run(script, *arguments, size=1, launcher="python")


def _load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


class TestTraining:
    _script = Path("training.py")

    def test_two_ranks_end_with_the_checkpoint_of_a_single_process(self, tmp_path):
        more = ("--epochs", 3, "--warmup-epochs", 0)
        _run(self._script, *more, "--batch-size", 32, "--checkpoint-format", tmp_path / "two-{epoch}.pt")
        alone = ("--batch-size", 64, "--base-lr", 0.04, "--checkpoint-format", tmp_path / "one-{epoch}.pt")
        _alone(self._script, *more, *alone)
        two, one = (_load(tmp_path / f"{name}-2.pt") for name in ("two", "one"))
        torch.testing.assert_close(two["model"], one["model"], rtol=0, atol=1e-4)
        assert two["optimizer"]["param_groups"] == one["optimizer"]["param_groups"]

    @pytest.mark.sweep
    def test_it_learns_and_goes_on_from_its_checkpoint(self, tmp_path):
        more = ("--checkpoint-format", tmp_path / "{epoch}.pt")
        outcome = _run(self._script, *more)
        assert float(re.search(r"epoch 5: .* accuracy ([\d.]+)%", outcome.stdout)[1]) > 80
        first = _load(tmp_path / "5.pt")
        for epoch in (4, 5):
            (tmp_path / f"{epoch}.pt").unlink()
        outcome = _run(self._script, *more)
        assert re.findall(r"epoch (\d): train", outcome.stdout) == ["4", "5"]
        torch.testing.assert_close(_load(tmp_path / "5.pt"), first, rtol=0, atol=0)

    @pytest.mark.parametrize("launcher", ["as-horovod", pytest.param("mpirun", marks=pytest.mark.sweep)])
    def test_its_other_options_work_with_and_without_coordd_run(self, tmp_path, launcher):
        more = ("--fp16-allreduce", "--batches-per-allreduce", 2, "--checkpoint-format", tmp_path / "{epoch}.pt")
        outcome = _run(self._script, "--epochs", 1, *more, launcher=launcher)
        assert outcome.stdout.count("epoch 0: validation") == 1


class TestGan:
    _script = Path("gan.py")

    def test_both_networks_end_as_in_a_single_process(self, tmp_path):
        more = ("--steps", 40, "--double")
        _run(self._script, *more, "--save", tmp_path / "two")
        _alone(self._script, *more, "--batch-size", 128, "--save", tmp_path / "one")
        torch.testing.assert_close(_load(tmp_path / "two"), _load(tmp_path / "one"), rtol=0, atol=1e-9)

    @pytest.mark.sweep
    def test_the_points_come_to_lie_on_the_ring(self):
        outcome = _run(self._script)
        assert 0.8 < float(re.search(r"points are ([\d.]+) from", outcome.stdout)[1]) < 1.2


class TestMixedPrecision:
    _script = Path("mixed_precision.py")

    def test_it_learns_as_a_single_process_does(self, tmp_path):
        two = _run(self._script, "--save", tmp_path / "two")
        one = _alone(self._script, "--batch-size", 128, "--save", tmp_path / "one")
        losses = [float(re.findall(r"loss ([\d.]+)", outcome.stdout)[-1]) for outcome in (two, one)]
        assert losses[0] == pytest.approx(losses[1], abs=0.05)
        assert max(losses) < 0.3
        torch.testing.assert_close(_load(tmp_path / "two"), _load(tmp_path / "one"), rtol=0, atol=0.02)

    def test_a_step_is_skipped_on_all_ranks_or_on_none(self):
        more = ("--steps", 20, "--init-scale", 2.0**24)
        outcome = _run(self._script, *more)
        first, second = map(int, re.search(r"skipped \[(\d+), (\d+)\]", outcome.stdout).groups())
        assert first == second > 0
        alone = _alone(self._script, *more, "--batch-size", 128)
        assert abs(int(re.search(r"skipped \[(\d+)\]", alone.stdout)[1]) - first) <= 1


_PLACES = """
import os, subprocess, sys
import horovod.torch as hvd
import torch
from mpi4py import MPI

before = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
hvd.init(comm=MPI.COMM_WORLD)
assert hvd.mpi_enabled() and hvd.mpi_threads_supported()
assert MPI.COMM_WORLD.allreduce(1) == hvd.size() == 2
for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
    value = str(getattr(hvd, name)())
    assert os.environ[f"HOROVOD_{name.upper()}"] == value
    assert before.get(f"HOROVOD_{name.upper()}", value) == value, (name, before)
hvd.init(process_sets=[MPI.COMM_WORLD, MPI.COMM_SELF])
assert hvd.ProcessSet(MPI.COMM_WORLD).ranks == (0, 1)
assert hvd.ProcessSet(MPI.COMM_SELF) == hvd.ProcessSet([hvd.rank()])
try:
    hvd.init(comm=MPI.COMM_SELF)
except ValueError as error:
    print("refused:", error)
assert ("HOROVOD_RANK" in before) == (sys.argv[1] == "as-horovod")
print(subprocess.check_output([sys.executable, "-c", "import horovod.torch as h; print(h.__name__)"], text=True))
"""


@pytest.mark.parametrize("launcher", ["as-horovod", "mpirun"])
def test_ranks_and_what_they_start_know_their_place(launcher):
    outcome = _run(_PLACES, launcher, launcher=launcher)
    assert outcome.stdout.count("coordd runs on all 2 ranks that were launched; call init() on each") == 2
    assert outcome.stdout.count("horovod.torch\n") == 2


@pytest.mark.parametrize("script", sorted(_FOLDER.glob("*.py")), ids=lambda script: script.stem)
def test_a_script_does_not_know_of_coordd(script):
    code = script.read_text("utf-8").split('"""')[2]
    assert "coordd" not in code
    assert "import horovod.torch as hvd" in code
