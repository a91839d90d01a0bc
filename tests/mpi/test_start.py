"""How real ranks start: what one fails with, and what becomes of the process, its environment and its children."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.mpi.launch import launch

pytestmark = pytest.mark.mpi

_AGAIN = """
import os, time
import coordd

rank = os.environ["OMPI_COMM_WORLD_RANK"]
for number, (name, value, culprit) in enumerate([
    ("COORDD_INTERFACE", "bogus0", "0"),  # found when rank 0 begins to listen
    ("COORDD_FUSION_MB", "abc", "1"),  # found before this rank has looked for any other
    ("COORDD_DAEMON_CORES", "99999", "1"),  # found by the daemon's thread
    ("COORDD_TRANSPORT", "pigeons", "0"),
]):
    if rank == culprit:
        os.environ[name] = value
    begun = time.monotonic()
    try:
        coordd.init()
    except coordd.errors.CoorddError as error:
        print(number, type(error).__name__, str(error), flush=True)
    assert time.monotonic() - begun < 50, "it has waited for start_seconds"
    os.environ.pop(name, None)
coordd.init()
print("again", coordd.allreduce([1.0 + coordd.rank()]).tolist(), flush=True)
"""
_LATE = """
import os, sys, time
from pathlib import Path
import coordd

rank, given_up = os.environ["OMPI_COMM_WORLD_RANK"], Path(sys.argv[1])
if rank == "1" and sys.argv[2] == "stops":  # after it has joined the others, before it has told them anything
    from coordd.daemon import rendezvous
    rendezvous._split = lambda *_: time.sleep(60)
while rank == "1" and sys.argv[2] != "stops" and not given_up.exists():
    time.sleep(0.05)
try:
    coordd.init(start_seconds=1.0 if rank == "0" else 60.0)
except coordd.errors.CoorddError as error:
    print(type(error).__name__, str(error), flush=True)
given_up.touch()
if sys.argv[2] != "again":
    sys.exit(7 if rank == "0" else 0)
coordd.init()
print("again", coordd.allreduce([1.0 + coordd.rank()]).tolist(), flush=True)
"""
_CHILDREN = """
import os, subprocess, sys
import coordd

def size_for_accelerate():
    # As accelerate.utils.get_int_from_env reads it, and by it transformers.Trainer.
    names = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
    return next((int(os.environ[name]) for name in names if int(os.environ.get(name, -1)) >= 0), 1)

code = "import multiprocessing, coordd; coordd.init(); print('child', coordd.rank(), coordd.size())"
run = lambda *words: print(subprocess.run(words, capture_output=True, text=True).stdout.strip(), flush=True)
before = dict(os.environ)
coordd.init()
print("size", size_for_accelerate(), flush=True)
run(sys.executable, "-c", code)
run(sys.executable, "-c", "from mpi4py import MPI; print('mpi', MPI.COMM_WORLD.size)")
if coordd.rank() == 0:
    run(sys.executable, "-m", "coordd.launch.cli", "run", "-n", "2", sys.executable, "-c", code)
given = {**os.environ, **coordd.launcher_variables()}
given.pop("_COORDD_RANK_PID")
print("given back", given == before, flush=True)
coordd.shutdown()
print("after", os.environ == before, flush=True)
coordd.init()
print("again", coordd.allreduce([1.0 + coordd.rank()]).tolist(), flush=True)
"""
_REPLACED = """
import os, sys
import coordd

coordd.init()
print("size", coordd.size(), flush=True)
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    if os.environ["SHUT_DOWN"] == "1":
        coordd.shutdown()
    os.execv(sys.executable, sys.orig_argv)
"""
_CONTAINER = """
import os
import numpy as np
import coordd

coordd.init()
found = coordd.allreduce(np.full(100_000, coordd.rank() + 1.0)).mean(), coordd.allreduce([float(coordd.rank())]).item()
print("pid", os.getpid(), "found", *found, "local", coordd.local_rank(), coordd.local_size(), flush=True)
"""


def test_ranks_hear_what_one_cannot_start_for_and_start_when_that_is_mended() -> None:
    outcome = launch(2, _AGAIN, launcher="coordd", timeout=100)
    assert outcome.returncode == 0, str(outcome)
    causes = (
        "no interface 'bogus0'",
        "COORDD_FUSION_MB='abc' is not usable",
        "daemon_cores='99999' is not usable",
        "transport='pigeons' is not usable",
    )
    for number, (cause, culprit) in enumerate(zip(causes, (0, 1, 1, 0), strict=True)):
        own, other = outcome.of_rank(culprit), outcome.of_rank(1 - culprit)
        assert f"{number} PeerError rank {culprit} could not start: coordd.errors." in other, str(outcome)
        assert own.count(cause) == other.count(cause) == 1, str(outcome)
    assert outcome.stdout.count("again [1.5]") == 2, str(outcome)


def test_a_rank_that_has_given_up_is_heard_by_a_late_one_and_both_can_begin_anew(tmp_path) -> None:
    outcome = launch(2, _LATE, str(tmp_path / "given-up"), "again", launcher="coordd", timeout=60)
    assert outcome.returncode == 0, str(outcome)
    assert "StartError the ranks did not find each other within 1 s" in outcome.of_rank(0), str(outcome)
    assert "PeerError rank 0 could not start: " in outcome.of_rank(1), str(outcome)
    assert outcome.stdout.count("again [1.5]") == 2, str(outcome)


@pytest.mark.parametrize("how", ["never comes", "stops"])
def test_a_rank_that_has_given_up_ends_with_its_own_exit_code_and_no_crash(tmp_path, how: str) -> None:
    """Though a thread of it is inside MPI, which would be finalised under its feet."""
    program = _LATE.replace("given_up.touch()", "")
    outcome = launch(2, program, str(tmp_path / "never"), how, launcher="coordd", timeout=40)
    assert outcome.returncode == 7, str(outcome)
    for word in ("Fatal", "SIGSEGV", "SIGABRT", "corrupted", "rank 1 exited"):
        assert word not in outcome.stderr, str(outcome)


def test_other_libraries_and_children_see_no_world_that_is_not_theirs() -> None:
    outcome = launch(2, _CHILDREN, launcher="coordd", timeout=120)
    assert outcome.returncode == 0, str(outcome)
    counts = {"size 1": 2, "child 0 1": 2, "mpi 1": 2, "child 0 2": 1, "child 1 2": 1}
    counts |= {"given back True": 2, "after True": 2, "again [1.5]": 2}
    assert {line: outcome.stdout.count(line) for line in counts} == counts, str(outcome)


@pytest.mark.parametrize("shut_down", [False, True])
def test_a_program_that_replaces_that_of_a_rank_is_no_world_of_one(shut_down: bool) -> None:
    outcome = launch(2, _REPLACED, launcher="coordd", timeout=60, variables={"SHUT_DOWN": str(int(shut_down))})
    assert outcome.stdout.count("size 2") == 2 + 2 * shut_down, str(outcome)
    assert "size 1" not in outcome.stdout, str(outcome)
    assert (outcome.returncode == 0) == shut_down, str(outcome)
    if not shut_down:
        assert "call coordd.shutdown() before os.exec" in outcome.stderr, str(outcome)


def _can_unshare() -> bool:
    program = shutil.which("unshare")
    words = [program, "--pid", "--fork", "--mount-proc", "true"]
    return program is not None and subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0


@pytest.mark.skipif(not _can_unshare(), reason="needs the right to make namespaces")
def test_ranks_in_containers_of_one_name_use_the_network(tmp_path) -> None:
    """Both have the same process number, by which Open MPI names its own shared memory."""
    script = tmp_path / "script.py"
    script.write_text(_CONTAINER)
    inside = "import os, sys; os.execvp('unshare', ['unshare', '--pid', '--fork', '--mount-proc', *sys.argv[1:]])"
    outcome = launch(2, inside, shutil.which("python") or "python", str(script), timeout=90)
    assert outcome.returncode == 0, str(outcome)
    for rank in (0, 1):
        assert f"pid 1 found 1.5 0.5 local {rank} 2" in outcome.of_rank(rank), str(outcome)
