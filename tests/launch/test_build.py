from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from coordd.launch import build
from coordd.launch.cli import main
from coordd.launch.launcher import Launcher, LauncherError


@pytest.fixture
def machine(monkeypatch):
    """A machine with these distributions and these plugins; with an MPI launcher unless it is taken away."""
    plugins = [EntryPoint("torch", "coordd_torch", "coordd.plugins"), EntryPoint("mxnet", "other", "coordd.plugins")]
    there = {"torch": "2.13.0", "tensorflow": "2.20", "mpi4py": "4.1"}
    monkeypatch.setattr(build, "entry_points", lambda group: plugins if group == "coordd.plugins" else [])
    monkeypatch.setattr(build, "installed", there.get)
    monkeypatch.setattr(Launcher, "find", lambda: "mpirun")
    return there


def boxes(text):
    """The crosses in order, by line."""
    return [line.strip() for line in text.splitlines() if line.startswith("    [X] ")]


def test_only_what_is_installed_and_has_a_plugin_gets_a_cross(machine, capsys):
    assert main(["run", "--as-horovod", "--check-build"]) == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("Available ")] == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
    ]
    assert boxes(told) == ["[X] PyTorch", "[X] MPI", "[X] MPI", "[X] common memory of a host"]
    assert "coordd doctor" in told


def test_mpi_takes_both_a_library_and_a_launcher(machine, monkeypatch):
    def missing():
        raise LauncherError.missing()

    del machine["mpi4py"]
    assert "[X] MPI" not in build.build()
    machine["mpi4py"] = "4.1"
    monkeypatch.setattr(Launcher, "find", missing)
    assert "[X] MPI" not in build.build()


def test_without_as_horovod_the_flag_is_none(capsys):
    assert main(["run", "--check-build"]) == 2
    assert capsys.readouterr().err.startswith("coordd: --check-build is a flag of horovodrun: give --as-horovod too")


def test_the_first_name_that_is_installed_tells_its_version():
    assert build.installed("no-such-distribution", "pytest") == pytest.__version__
    assert build.installed("no-such-distribution") is None
