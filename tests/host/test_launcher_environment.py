"""What the environment tells of other ranks, and which processes are refused for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import coordd
from coordd.config import Config
from coordd.daemon.rendezvous import meet
from coordd.errors import StartError
from coordd.host.launcher_environment import identifying, launched_ranks, more_ranks

ROOT = Path(__file__).resolve().parents[2]
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
CLUSTER = {"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}
MANY = {
    "a step of srun": (STEP, "SLURM_STEP_NUM_TASKS"),
    "its second task": ({**STEP, "SLURM_PROCID": "1"}, "SLURM_STEP_NUM_TASKS"),
    "a task that knows its number only": ({"SLURM_PROCID": "3"}, "SLURM_PROCID"),
    "a step of an old Slurm": ({**BATCH, "SLURM_STEP_ID": "0"}, "SLURM_NTASKS"),
    "torchrun": ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE"),
    "pbsdsh, another host": ({"PBS_JOBID": "1", "PBS_NODENUM": "1", "PBS_TASKNUM": "1"}, "PBS_NODENUM"),
    "pbsdsh, the same host": ({"PBS_JOBID": "1", "PBS_NODENUM": "0", "PBS_TASKNUM": "2"}, "PBS_TASKNUM"),
    "pbsdsh of Torque": ({"PBS_JOBID": "1", "PBS_VNODENUM": "3", "PBS_TASKNUM": "5"}, "PBS_VNODENUM"),
    "blaunch": ({"LSB_JOBID": "1", "LSB_DJOB_NUMPROC": "8", "LSF_PM_TASKID": "1"}, "LSB_DJOB_NUMPROC"),
    "a later task of blaunch": ({"LSB_JOBID": "1", "LSF_PM_TASKID": "3"}, "LSF_PM_TASKID"),
    "jsrun": ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "6"}, "JSM_NAMESPACE_SIZE"),
    "aprun": ({"ALPS_APP_PE": "2"}, "ALPS_APP_PE"),
    "Cray's PALS": ({"PALS_RANKID": "0", "PALS_NRANKS": "4"}, "PALS_NRANKS"),
    "Flux": ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE"),
    "horovodrun over gloo": ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4"}, "HOROVOD_SIZE"),
    "an MPI that tells the rank only": ({"MPIRUN_RANK": "1"}, "MPIRUN_RANK"),
    "IBM's poe": ({"MP_CHILD": "1"}, "MP_CHILD"),
    "workers of TensorFlow": ({"TF_CONFIG": json.dumps(CLUSTER)}, "TF_CONFIG"),
}
ONE = {
    "nothing": {},
    "a batch script, or a shell in salloc": BATCH,
    "a step of one task": {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "a shell on salloc's node": {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
    "a terminal of srun": {**STEP, "SLURM_PTY_PORT": "40000"},
    "a batch script of PBS": {"PBS_JOBID": "1", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_NP": "8"},
    "a batch script of LSF": {"LSB_JOBID": "1", "LSB_DJOB_NUMPROC": "8"},
    "torchrun with one": {"RANK": "0", "WORLD_SIZE": "1"},
    "a size that is nobody's": {"WORLD_SIZE": "2"},
    "words": {"SLURM_PROCID": "x", "RANK": "0", "WORLD_SIZE": "many", "TF_CONFIG": "[]"},
    "TensorFlow's only worker": {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}'},
    "an evaluator of TensorFlow": {"TF_CONFIG": json.dumps({**CLUSTER, "task": {"type": "evaluator"}})},
}


@pytest.fixture(autouse=True)
def _nothing_is_launched(monkeypatch):
    for name in {name for environment, _ in MANY.values() for name in environment} & {*os.environ}:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("which", MANY)
def test_one_of_many_processes_is_no_world_of_one(monkeypatch, which):
    environment, variable = MANY[which]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartError, match=f"{variable}=.*coordd run -n N.*set COORDD_ALONE=1") as caught:
        meet(Config())
    assert environment[variable][:200] in str(caught.value)
    with pytest.raises(StartError, match=variable):
        coordd.init()
    assert not coordd.is_initialized()


@pytest.mark.parametrize("which", MANY)
def test_it_is_one_if_it_is_told_to_be(monkeypatch, which):
    for name, value in MANY[which][0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COORDD_ALONE", "1")
    coordd.init()
    assert (coordd.rank(), coordd.size()) == (0, 1)
    coordd.shutdown()


@pytest.mark.parametrize("which", ONE)
def test_a_process_alone_may_have_such_variables(monkeypatch, which):
    assert more_ranks(ONE[which], 1) is None
    for name, value in ONE[which].items():
        monkeypatch.setenv(name, value)
    meet(Config())


def test_the_nearest_launcher_counts():
    """MPI's daemons are tasks of srun, one a host, and ranks inherit their variables."""
    ranks = {**STEP, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
    assert launched_ranks(ranks) == 2
    assert more_ranks(ranks, 2) is None
    assert more_ranks({**ranks, "RANK": "1", "WORLD_SIZE": "2"}, 2) is None
    assert more_ranks({**ranks, "RANK": "1", "WORLD_SIZE": "8"}, 2).variable == "WORLD_SIZE"  # torchrun under mpirun


def test_alone_is_alone_under_an_mpi_launcher_too(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    coordd.init(alone=True)
    assert (coordd.rank(), coordd.size()) == (0, 1)
    assert os.environ["OMPI_COMM_WORLD_RANK"] == "3"  # the script may start MPI
    coordd.shutdown()


def test_what_identifies_a_rank_is_told_from_settings():
    rank = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "a", "PMI_FD": "7", "MPI_LOCALRANKID": "0"}
    settings = {"OMPI_MCA_btl": "^sm", "PMIX_MCA_gds": "hash", "PMIX_PREFIX": "/usr", "SLURM_JOB_ID": "7"}
    assert identifying({**rank, **settings}) == rank


CHILD = "import coordd; coordd.init(); print(coordd.rank(), coordd.size())"
WORKER = """
import multiprocessing, sys
import coordd

def work(_):
    try:
        coordd.init()
    except coordd.errors.WorkerProcessError:
        return "worker"
    return "alone"

if __name__ == "__main__":
    if sys.argv[2] == "rank":
        import os
        os.environ["_COORDD_RANK_PID"] = str(os.getpid())
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(work, [0]))
else:
    print("imports", work(0), flush=True)
"""


def ran(*arguments: str, **variables: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_that_a_rank_starts_is_a_world_of_its_own():
    """Whatever the rank's launcher has left in the environment, and though Python always has a ``__mp_main__``."""
    code = "import multiprocessing; " + CHILD
    assert ran("-c", code, **STEP, _COORDD_RANK_PID=str(os.getpid())) == "0 1\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(("parent", "told"), [("rank", "worker"), ("program", "alone")])
def test_a_worker_is_one_of_the_rank_that_has_started_it(tmp_path, method, parent, told):
    """A worker of a program that a rank has started is none of the rank's."""
    script = tmp_path / "script.py"
    script.write_text(WORKER)
    output = ran(str(script), method, parent, _COORDD_RANK_PID=str(os.getpid()))
    assert output == f"imports {told}\n['{told}']\n"
