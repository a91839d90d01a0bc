"""How a job ends when one rank does: soon, with the culprit's exit code, told by everybody, and with nothing left."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.mpi.job import Job, Outcome
from tests.mpi.launch import command, environment, launch

pytestmark = pytest.mark.mpi

# One rank does FAULT while the others wait for it in an operation; they tell what they hear, and when.
_PROGRAM = """
import os, signal, sys, threading, time
ARRAYS
from coordd.errors import PeerError

cd.init()
try:
    cd.barrier()
    if cd.rank() == int(sys.argv[1]):
        print(f"at {time.monotonic()}", flush=True)
        FAULT
    cd.allreduce(ones(3), name="gradient")
except PeerError as error:
    print(f"heard {time.monotonic()} of rank {error.rank}", flush=True)
    raise
"""
# One rank's data are a batch longer, long after plans have been locked.
_UNEVEN = """
import sys
import torch
import coordd.torch as cd

cd.init()
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for _ in range(20 + (cd.rank() == int(sys.argv[1]))):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
# Two ranks of a set train with uneven data. A third rank does something else and ends first, or takes part in
# operations of all ranks; or there is none, and another optimizer is of all ranks.
_UNEVEN_IN_A_SET = """
import sys
import threading
import torch
import coordd.torch as cd

cd.init()
torch.manual_seed(1)
other = sys.argv[1]
trainers = cd.ProcessSet([0, 1])


def made(**details):
    model = torch.nn.Linear(4, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, cd.DistributedOptimizer(plain, model.named_parameters(), uneven="join", **details)


if cd.rank() < 2 or other == "meets":
    pairs = [made(process_set=trainers)] + ([made()] if other == "none" else [])
    for step in range(3 + 20 * cd.rank()):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        if other == "meets":
            cd.allreduce(torch.ones(1), name="loss")
        threading.Event().wait(0.05 * cd.rank())  # so that the other ranks are long at their end
    print("steps", step + 1, flush=True)
"""
# One rank cannot make the last step, says so, and ends at once.
_LAST = """
import time
import torch
import coordd.torch as cd

cd.init()
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(4):
    try:
        optimizer.zero_grad()
        if step == 3:
            time.sleep(1.0 * cd.rank())
            1 / cd.rank()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    except (ZeroDivisionError, cd.CoorddError) as error:
        print(step, type(error).__name__, flush=True)
        optimizer.discard_step()
"""
# Whichever rank is first, and has the others' barrier fail.
_ALIKE = """
import coordd as cd

cd.init()
try:
    cd.barrier()
finally:
    raise ValueError("a bad file") from None
"""
# PyTorch takes seconds to load, and how a job ends is the daemon's: one job of each kind has tensors, the others have
# NumPy's arrays.
_TENSORS = "from torch import ones; import coordd.torch as cd"
_ARRAYS = "from numpy import ones; import coordd as cd"
_SECONDS = 10.0  # the aim is 2; a loaded machine gets more


def _program(fault: str, arrays: str) -> str:
    return _PROGRAM.replace("ARRAYS", arrays).replace("FAULT", fault)


def _end(fault: str, *, launcher: str, culprit: int, size: int = 2) -> Outcome:
    """Lets the culprit do the fault."""
    arrays = _TENSORS if (launcher, size, culprit) == ("coordd", 2, 1) else _ARRAYS
    outcome = launch(size, _program(fault, arrays), str(culprit), launcher=launcher)
    assert outcome.returncode != 0, str(outcome)
    return outcome


def _times(outcome: Outcome, word: str) -> list[float]:
    return [float(line.text.split()[1]) for line in outcome.lines if line.text.startswith(word)]


def _assert_all_heard(outcome: Outcome, *, culprit: int, size: int) -> None:
    (fault,) = _times(outcome, "at ")
    heard = _times(outcome, "heard ")
    assert len(heard) == size - 1, str(outcome)
    assert max(heard) - fault < _SECONDS, str(outcome)
    assert outcome.stdout.count(f"of rank {culprit}") == size - 1, str(outcome)


@pytest.mark.parametrize("launcher", ["mpirun", "coordd"])
@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (2, 1), (4, 2)])
def test_an_exception_is_raised_on_all_ranks(launcher: str, size: int, culprit: int) -> None:
    outcome = _end("raise ValueError('a bad batch')", launcher=launcher, culprit=culprit, size=size)
    assert outcome.returncode == 1, str(outcome)
    _assert_all_heard(outcome, culprit=culprit, size=size)
    assert outcome.stderr.count("Traceback (most recent call last)") == 1, str(outcome)
    told = f"PeerError: rank {culprit} failed: ValueError: a bad batch\n"
    assert outcome.stderr.count("  this rank was at ") == outcome.stderr.count(told), str(outcome)
    each = outcome.stderr.count(told) == size - 1
    assert each or (launcher == "coordd" and told in outcome.stderr and "the same on rank" in outcome.stderr)
    assert "the job has failed" not in outcome.stderr, str(outcome)


def test_others_hear_of_the_last_step_that_a_rank_discards_before_it_leaves() -> None:
    outcome = launch(2, _LAST, launcher="coordd")
    assert outcome.returncode == 0, str(outcome)
    assert outcome.stdout.count("3 ZeroDivisionError") == 1, str(outcome)
    assert outcome.stdout.count("3 DiscardedStepError") == 1, str(outcome)


@pytest.mark.parametrize("end", ["raise ValueError('two  spaces' * 1000)", "sys.exit('two  spaces')"])
def test_what_all_have_heard_is_not_told_again(end: str) -> None:
    outcome = launch(2, _program(end, _ARRAYS), "0", launcher="coordd")
    assert outcome.returncode == 1, str(outcome)
    assert outcome.stderr.count("PeerError: rank 0 ") == 1, str(outcome)
    assert "the job has failed" not in outcome.stderr, str(outcome)


def test_what_is_raised_on_all_ranks_is_shown_once() -> None:
    outcome = launch(4, _ALIKE, launcher="coordd")
    assert outcome.returncode == 1, str(outcome)
    assert outcome.stderr.count("Traceback (most recent call last)") == 1, str(outcome)
    assert "coordd: the same on ranks 1-3" in outcome.stderr, str(outcome)


@pytest.mark.parametrize("launcher", ["mpirun", "coordd"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_exit_code_is_that_of_the_rank_that_left(launcher: str, culprit: int) -> None:
    outcome = _end("sys.exit(3)", launcher=launcher, culprit=culprit)
    assert outcome.returncode == 3, str(outcome)
    _assert_all_heard(outcome, culprit=culprit, size=2)


def test_an_exit_is_told_while_python_waits_for_a_thread() -> None:
    """Python runs its exit handlers when the thread has ended, and that waits for another rank."""
    waits = (
        "import threading; threading.Thread(target=lambda: cd.allreduce(ones(3), name='other')).start(); sys.exit(3)"
    )
    outcome = _end(waits, launcher="coordd", culprit=0)  # with the exit code of the rank that ends first
    assert "rank 0 called sys.exit(3) at " in outcome.stderr, str(outcome)
    _assert_all_heard(outcome, culprit=0, size=2)


@pytest.mark.parametrize("launcher", ["mpirun", "coordd"])
@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("end", ["sys.exit()", "cd.shutdown(); sys.exit()"])
def test_a_rank_that_leaves_while_others_need_it_is_the_cause(launcher: str, size: int, culprit: int, end: str) -> None:
    outcome = _end(end, launcher=launcher, culprit=culprit, size=size)
    assert outcome.returncode == 1, str(outcome)
    cause = "this rank left the job while others still waited for 'gradient'; give all ranks"
    assert cause in outcome.of_rank(culprit), str(outcome)
    if launcher == "coordd":
        last = outcome.stderr.splitlines()[-1]
        assert last.startswith(f"coordd: rank {culprit} exited with code 1: it left the job while others"), str(outcome)


@pytest.mark.parametrize(("launcher", "longer"), [("mpirun", 0), ("coordd", 0), ("coordd", 1)])
def test_a_rank_with_a_batch_too_few_is_the_cause(launcher: str, longer: int) -> None:
    outcome = launch(2, _UNEVEN, str(longer), launcher=launcher)
    assert outcome.returncode == 1, str(outcome)
    cause = "left the job while others still waited for 'gradients.0'; give all ranks the same number of batches"
    assert f"this rank {cause}" in outcome.of_rank(1 - longer), str(outcome)
    if launcher == "coordd":
        last = outcome.stderr.splitlines()[-1]
        assert last.startswith(f"coordd: rank {1 - longer} exited with code 1: it {cause}"), str(outcome)


@pytest.mark.parametrize(("count", "other"), [(3, "leaves"), (3, "meets"), (2, "none")])
def test_ranks_with_uneven_data_join_in_their_process_set_too(count: int, other: str) -> None:
    outcome = launch(count, _UNEVEN_IN_A_SET, other, launcher="coordd")
    assert outcome.returncode == 0, str(outcome)
    assert "steps 3" in outcome.of_rank(0), str(outcome)
    assert "steps 23" in outcome.of_rank(1), str(outcome)


@pytest.mark.parametrize("launcher", ["mpirun", "coordd"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_killed_rank_is_named_with_its_signal(launcher: str, culprit: int) -> None:
    outcome = _end("os.kill(os.getpid(), signal.SIGKILL)", launcher=launcher, culprit=culprit)
    (fault,) = _times(outcome, "at ")
    assert "signal 9" in outcome.stderr or "SIGKILL" in outcome.stderr, str(outcome)
    assert f"rank {culprit}" in outcome.stderr or f",{culprit}]" in outcome.stderr, str(outcome)
    assert all(heard - fault < _SECONDS for heard in _times(outcome, "heard ")), str(outcome)


@pytest.mark.parametrize(("culprit", "seconds"), [(0, 0.0), (1, 1.0)], ids=["wait", "compute"])
def test_a_rank_that_ends_with_code_0_at_once_is_the_cause(culprit: int, seconds: float) -> None:
    """The others wait for it, or compute so long before they do."""
    fault = f"os._exit(0)\n    else:\n        threading.Event().wait({seconds})"
    outcome = launch(2, _program(fault, _ARRAYS), str(culprit), launcher="coordd")
    assert outcome.returncode == 1, str(outcome)
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith(f"coordd: rank {culprit} exited with code 0 but without shutdown()"), str(outcome)


def test_a_coordinator_that_is_stopped_ends_the_job_in_time_and_is_the_cause() -> None:
    fault = "os.kill(os.getpid(), signal.SIGSTOP)"
    limits = {"COORDD_STALL_ABORT_SECONDS": "1"}
    outcome = launch(2, _program(fault, _ARRAYS), "0", launcher="coordd", timeout=40, variables=limits)
    assert outcome.returncode == 1, str(outcome)
    last = outcome.stderr.splitlines()[-1]
    told = "coordd: rank 0 does not answer, and kept 'gradient' waiting for 1 s (stall_abort_seconds): its process is"
    assert last.startswith(f"{told} stopped"), str(outcome)


def test_what_open_mpi_leaves_behind_when_it_is_killed_is_removed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_program("threading.Event().wait()", _ARRAYS))
    (folder := tmp_path / "temporary").mkdir()
    program = [*command("coordd", 2), sys.executable, str(script), "0"]
    with Job(program, environment({"TMPDIR": str(folder)}), timeout=60) as job:
        job.wait_for("at ")
        (daemon,) = [process for process in job.processes() if process.name() in {"mpirun", "prterun"}]
        segments = Path(daemon.environ()["OMPI_MCA_btl_sm_backing_directory"])
        assert list(segments.glob("sm_segment.*"))
        assert list(folder.glob("coordd-run-*/ompi.*"))
        daemon.kill()
        outcome = job.wait(30)
    assert outcome.returncode == 137, str(outcome)
    assert not segments.exists()
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("launcher", "arrays"), [("mpirun", _ARRAYS), ("coordd", _TENSORS)], ids=["mpirun", "coordd"])
def test_ctrl_c_ends_everything(launcher: str, arrays: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_program("threading.Event().wait()", arrays))
    program = [*command(launcher, 2), sys.executable, str(script), "0"]
    with Job(program, environment(), timeout=60) as job:
        job.wait_for("at ")
        job.signal(signal.SIGINT)
        asked = time.monotonic()
        outcome = job.wait(30)
        assert time.monotonic() - asked < _SECONDS, str(outcome)
    assert outcome.returncode != 0, str(outcome)
    if launcher == "coordd":
        assert outcome.returncode == 130, str(outcome)
