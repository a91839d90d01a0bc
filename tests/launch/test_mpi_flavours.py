"""The command line of each launcher, as a table."""

from __future__ import annotations

import shlex

import pytest

from coordd.errors import ConfigError
from coordd.launch.hosts import read_hosts
from coordd.launch.mpi_flavours import ALONE, FLAVOURS, HYDRA, INTEL, OPEN_MPI, SLURM, Launch, recognise

TWO = Launch(size=2, command=("train",))
ROOT = Launch(size=2, command=("train",), root=True)
CROWD = Launch(size=8, command=("train",), oversubscribed=True)
FAR = Launch(size=4, command=("train",), hosts=read_hosts("a:2,b:2"), forwarded=("PATH", "COORDD_CYCLE_MS"))
UNEVEN = Launch(size=3, command=("train",), hosts=read_hosts("a:2,b:1"))
MORE = Launch(size=2, command=("train",), extra=("--one", "two words"))

SRUN = "--ntasks={} --unbuffered --quit-on-interrupt --cpu-bind=none"
REMOTE = "--nodelist=a,b --nodes=2 --ntasks-per-node=2 --export=PATH,COORDD_CYCLE_MS,HOME,LOGNAME,SHELL,USER"

COMMAND_LINES = [
    (ALONE, TWO, "train"),
    (OPEN_MPI, TWO, "-n 2 --bind-to none train"),
    (OPEN_MPI, ROOT, "-n 2 --allow-run-as-root --bind-to none train"),
    (OPEN_MPI, CROWD, "-n 8 --oversubscribe --mca mpi_yield_when_idle 1 --bind-to none train"),
    (OPEN_MPI, FAR, "-n 4 --host a:2,b:2 --map-by slot --bind-to none -x PATH -x COORDD_CYCLE_MS train"),
    (OPEN_MPI, MORE, "-n 2 --bind-to none --one 'two words' train"),
    (HYDRA, TWO, "-bind-to none -n 2 train"),
    (HYDRA, ROOT, "-bind-to none -n 2 train"),
    (HYDRA, CROWD, "-bind-to none -n 8 train"),
    (HYDRA, FAR, "-genvlist PATH,COORDD_CYCLE_MS -bind-to none -hosts a:2,b:2 -n 4 train"),
    (HYDRA, MORE, "-bind-to none --one 'two words' -n 2 train"),
    (INTEL, TWO, "-genv I_MPI_PIN 0 -n 2 train"),
    (INTEL, FAR, "-genvlist PATH,COORDD_CYCLE_MS -genv I_MPI_PIN 0 -host a -n 2 train : -host b -n 2 train"),
    (INTEL, UNEVEN, "-genv I_MPI_PIN 0 -host a -n 2 train : -host b -n 1 train"),
    (INTEL, MORE, "-genv I_MPI_PIN 0 --one 'two words' -n 2 train"),
    (SLURM, TWO, f"{SRUN.format(2)} train"),
    (SLURM, CROWD, f"{SRUN.format(8)} --overcommit train"),
    (SLURM, FAR, f"{SRUN.format(4)} {REMOTE} train"),
    (SLURM, MORE, f"{SRUN.format(2)} --one 'two words' train"),
]


@pytest.mark.parametrize(("flavour", "launch", "line"), COMMAND_LINES)
def test_each_launcher_gets_its_own_flags(flavour, launch, line):
    assert shlex.join(flavour.flags(launch)) == line


def test_slurm_wants_the_same_number_on_each_host():
    with pytest.raises(ConfigError, match="the same number of ranks for every host under srun"):
        SLURM.flags(UNEVEN)


@pytest.mark.parametrize(
    ("told", "flavour", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", OPEN_MPI, "5.0.11"),
        ("mpiexec (OpenRTE) 4.1.4\n", OPEN_MPI, "4.1.4"),
        ("mpirun (Open MPI) 4.1.4\n", OPEN_MPI, "4.1.4"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc\n", HYDRA, "5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121 (id: e7829d6)\n", INTEL, "2021.14"),
        ("Intel(R) MPI Library for Linux* OS, Version 2018 Update 1 Build 2017\n", INTEL, "2018 Update 1"),
        ("slurm 24.05.3\n", SLURM, "24.05.3"),
        ("slurm-wlm 22.05.8\n", SLURM, "22.05.8"),
    ],
)
def test_a_launcher_is_recognised_by_what_it_says(told, flavour, version):
    assert recognise(told) == (flavour, version)


@pytest.mark.parametrize("told", ["", "ls (GNU coreutils) 9.1", "prterun: command not found", "jsrun 1.2"])
def test_what_is_no_launcher_is_not_recognised(told):
    assert recognise(told) is None


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda flavour: flavour.name)
def test_what_means_the_end_is_not_passed_on(flavour):
    assert not {flavour.interrupt, flavour.terminate, flavour.finish} & set(flavour.passes)
