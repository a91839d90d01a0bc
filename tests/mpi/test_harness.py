"""The harness tells the truth: each specimen meets its fate, and the cases after it are none the worse."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.mpi.cases import Case, find
from tests.mpi.job import HangError, Job
from tests.mpi.launch import environment, launch
from tests.mpi.session import Session
from tests.scaled_timeout import MAX_SLOWDOWN, ScaledTimeout

pytestmark = pytest.mark.mpi

_SPECIMENS = {case.name: case for case in find("tests.mpi.specimens", Path(__file__).parent / "specimens")}
_PASSES = _SPECIMENS["case_passes"]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    session = Session(2)
    yield session
    assert not session.close()


def test_cases_are_found_with_their_sizes() -> None:
    assert str(_PASSES) == "specimen.passes"
    assert _PASSES.sizes == (2, 4)
    assert _SPECIMENS["case_hangs"].sizes == (2,)
    assert _SPECIMENS["case_hangs"].deadline == 1


@pytest.mark.parametrize(("runnable", "slower"), [(1, 1.0), (4, 2.0), (1000, MAX_SLOWDOWN)])
def test_limits_are_reached_later_on_a_busy_machine(
    runnable: int, slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("tests.scaled_timeout.time", SimpleNamespace(monotonic=lambda: now))
    load = f"0.5 0.5 0.5 {runnable}/100 4711".encode()
    system = SimpleNamespace(sched_getaffinity=lambda _: {0, 1}, pread=lambda *_: load)
    monkeypatch.setattr("tests.scaled_timeout.os", system)
    limit = ScaledTimeout(10)
    while wait := limit.next_wait():
        assert wait <= 1
        now += 0.5
    assert now == pytest.approx(10 * slower, abs=0.5)


def test_one_start_serves_many_cases(session: Session) -> None:
    assert not session.run(_PASSES)
    before = _worker_ids()
    assert not session.run(_PASSES)
    assert _worker_ids() == before


def test_every_rank_is_heard_and_the_culprit_first(session: Session) -> None:
    problem = session.run(_SPECIMENS["case_fails_on_rank_1"])
    culprit, _, other = problem.partition("rank 0 passed")
    assert "rank 1 failed" in culprit
    assert "assert rank == 0 or value == 42" in culprit
    assert "value = 41" in culprit
    assert "written by 1" in culprit
    assert "written by 0" in other
    assert not session.run(_PASSES)


def test_a_rank_left_waiting_is_shown_with_its_stack(session: Session) -> None:
    problem = session.run(_SPECIMENS["case_fails_while_rank_0_waits"])
    culprit, _, other = problem.partition("rank 0 did not come back")
    assert "SystemExit: 7" in culprit
    assert "case_fails_while_rank_0_waits" in other
    assert not session.run(_PASSES)


def test_a_hang_is_shown_with_the_stacks_of_all_ranks(session: Session) -> None:
    assert not session.run(_PASSES)  # the second that the next case has is not for the start of MPI
    problem = session.run(_SPECIMENS["case_hangs"])
    assert problem.count("did not come back") == 2
    assert problem.count("in _wait_for_nobody") == 2
    assert not session.run(_PASSES)


def test_a_death_is_shown_with_the_words_of_the_launcher(session: Session) -> None:
    problem = session.run(_SPECIMENS["case_dies_on_rank_1"])
    assert problem.index("rank 1 ended") < problem.index("rank 0 ")
    assert "signal 9" in problem
    assert not session.run(_PASSES)


def test_the_folder_of_a_killed_launcher_is_removed(session: Session) -> None:
    """Else a later launcher with the same process id does not start."""
    problem = session.run(_SPECIMENS["case_fails_and_tells_the_session_folder"])
    (folder,) = set(re.findall(r"RuntimeError: (/.+/ompi\.\d+)$", problem, re.MULTILINE))
    assert not Path(folder).exists()
    assert not session.run(_PASSES)


def test_a_framework_surrounds_the_cases() -> None:
    session = Session(2, framework="tests.mpi.specimens.framework")
    assert not session.run(Case("tests.mpi.specimens.framework", "is_initialized"))
    assert "shutdown was called" in session.close()


def test_a_framework_that_does_not_start_is_told() -> None:
    session = Session(2, framework="tests.mpi.no_such_module")
    assert "ModuleNotFoundError" in session.run(_PASSES)
    assert not session.close()


def test_launch_tells_output_by_stream_and_rank() -> None:
    program = "import os, sys\nprint('out', os.environ['OMPI_COMM_WORLD_RANK'])\nprint('err', file=sys.stderr)\n"
    outcome = launch(2, program)
    assert outcome.returncode == 0
    assert sorted(outcome.stdout.splitlines()) == ["out 0", "out 1"]
    assert outcome.stderr == "err\nerr\n"
    assert sorted(outcome.of_rank(1).splitlines()) == ["err", "out 1"]


def test_launch_returns_the_exit_code() -> None:
    assert launch(2, "import sys; sys.exit(3)").returncode == 3


def test_a_job_that_hangs_is_ended_with_stacks() -> None:
    program = "import threading\ndef wait_for_nobody():\n    threading.Event().wait()\nwait_for_nobody()\n"
    with pytest.raises(HangError) as hang:
        launch(2, program, timeout=2)
    assert str(hang.value).count("in wait_for_nobody") == 2


def test_a_job_leaves_nothing_behind_not_even_what_has_left_its_group() -> None:
    away = "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, start_new_session=True)"
    program = f"import subprocess, sys\nchild = {away}\nprint('ready', flush=True)\nchild.wait()\n"
    with Job([sys.executable, "-c", program], environment(), timeout=30) as job:
        job.wait_for("ready")
        processes = job.processes()
        assert len(processes) == 2
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def _worker_ids() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return sorted(child.pid for child in children if "tests.mpi.worker" in child.cmdline())
