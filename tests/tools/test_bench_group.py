import os
import sys

import pytest

from coordd_tools.bench.group import GroupError, Launcher, run
from coordd_tools.bench.jobs import StepJob
from coordd_tools.bench.progress import Progress

OPEN_MPI = Launcher("/opt/mpi/bin/mpirun", "mpirun (Open MPI) 5.0.11")
MPICH = Launcher("/opt/mpi/bin/mpirun", "HYDRA build details:")


def test_open_mpi_gets_the_flags_that_it_needs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    command = OPEN_MPI.command(["python", "x.py"], size=4, cores=2)
    flags = "-n 4 --bind-to none --allow-run-as-root --oversubscribe"
    assert command == ["/opt/mpi/bin/mpirun", *flags.split(), "python", "x.py"]


def test_open_mpi_gets_no_other_flags(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert OPEN_MPI.command(["x"], size=2, cores=2)[1:] == ["-n", "2", "--bind-to", "none", "x"]


def test_other_launchers_are_only_told_the_number_of_ranks():
    assert MPICH.command(["x"], size=4, cores=2)[1:] == ["-n", "4", "x"]


def test_progress_survives_the_way_through_standard_output():
    message = Progress(3, 12, "gpt · ddp")
    assert Progress.read(message.line()) == message


@pytest.mark.parametrize("line", ["", "a library says hello", '{"done": 1}'])
def test_what_others_print_is_no_progress(line):
    assert Progress.read(line) is None


@pytest.mark.mpi
def test_a_rank_that_fails_ends_the_group(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    job = StepJob(engines=("none",), rounds=1, seed=0, models=("no such model",))
    with pytest.raises(GroupError, match="a rank failed") as caught:
        run(Launcher.find(), job, size=2, tell=print)
    assert caught.value.code != 0
    assert "KeyError: 'no such model'" in capfd.readouterr().err
