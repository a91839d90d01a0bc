"""`coordd run` on real ranks, as a user sees it: what is printed, the exit code, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from coordd.launch.launcher import Launcher, LauncherError
from tests.launch.started import FOR_EVER, Started, wait_until

RANK = "import os, signal, sys; rank = int(os.environ['OMPI_COMM_WORLD_RANK']); "
READY = "print('ready', flush=True); "
STUBBORN = "[signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; "


def open_mpi() -> bool:
    try:
        return Launcher.find().flavour.style == "open-mpi"
    except LauncherError:
        return False


mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(not open_mpi(), reason="these ranks are told apart by Open MPI's variables"),
]


def two(source: str, *options: str, **variables: str) -> Started:
    return Started("-n", "2", *options, sys.executable, "-c", RANK + source, **variables)


class TestOneRank:
    """A single rank, which needs no MPI launcher."""

    def test_runs_without_a_launcher(self, tmp_path):
        source = "import os; print(os.environ['COORDD_FUSION_MB'])"
        with Started("-n", 1, "--fusion-mb", 8, sys.executable, "-c", source, PATH=str(tmp_path)) as job:
            assert job.wait() == 0
            assert job.out == "[0] 8\n"
            assert job.err.startswith("coordd: 1 rank of ")

    def test_gives_its_exit_code(self):
        with Started("-n", 1, "--no-prefix", "sh", "-c", "echo out; echo err >&2; exit 7") as job:
            assert job.wait() == 7
            assert job.out == "out\n"
            assert job.err.splitlines()[1:] == ["err", "coordd: rank 0 exited with code 7; it said last: err"]

    def test_survives_output_that_nobody_reads(self):
        with Started("-n", 1, "sh", "-c", "while echo y; do :; done") as job:
            job.wait_for(lambda job: "y" in job.out)
            job._selector.unregister(job.process.stdout)
            job.process.stdout.close()
            assert job.process.wait(10) == 128 + signal.SIGPIPE
            assert wait_until(lambda: not job.left)

    def test_may_be_run_dry(self):
        with Started("-n", 1, "--dry-run", "--cycle-ms", 2, "echo", "a b") as job:
            assert job.wait() == 0
            assert job.out.startswith("COORDD_CYCLE_MS=2 ")
            assert job.out.endswith("-- echo 'a b'\n")


class TestTwoRanks:
    pytestmark = mpi

    def test_print_whole_lines_and_write_logs(self, tmp_path):
        source = "print(rank, 'x' * 3000); print('oops', file=sys.stderr)"
        with two(source, "--output-dir", str(tmp_path / "logs")) as job:
            assert job.wait() == 0
            assert sorted(job.out.splitlines()) == [f"[{rank}] {rank} {'x' * 3000}" for rank in range(2)]
            assert job.err.splitlines()[0].startswith("coordd: 2 ranks of ")
            assert sorted(job.err.splitlines()[1:]) == ["[0] oops", "[1] oops"]
        for rank in range(2):
            log = (tmp_path / "logs" / f"rank.{rank}.log").read_text("utf-8")
            assert sorted(log.splitlines()) == [f"{rank} {'x' * 3000}", "oops"]

    def test_say_once_a_host_how_they_share_its_cores(self):
        with two("pass", "-H", "localhost:2") as job:
            assert job.wait() == 0
            plan, host = job.err.splitlines()
            assert plan == "coordd: 2 ranks on localhost:2; each host divides its cores among its ranks"
            assert host.startswith(f"coordd: {os.uname().nodename}: 2 ranks of ")

    def test_share_the_cores(self):
        ranks = 2 * (os.cpu_count() or 1)
        with Started("-n", ranks, "sh", "-c", "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="") as job:
            assert job.wait() == 0
            assert len(job.out.splitlines()) == ranks

    def test_end_when_one_fails_and_the_cause_is_said_last(self):
        source = f"{READY}\nif rank: raise ValueError('bad sample')\nsignal.pause()"
        with two(source) as job:
            assert job.wait_for_ranks(2).wait() == 1
            assert job.last == "coordd: rank 1 exited with code 1: ValueError: bad sample"
            assert "prterun" not in job.err
            assert wait_until(lambda: not job.left)

    def test_end_with_the_code_of_the_one_that_failed_first_not_of_its_consequence(self):
        source = """
class PeerError(Exception): pass
if rank: print("Traceback (most recent call last):\\nOSError: disk full", file=sys.stderr); sys.exit(3)
raise PeerError("rank 1 exited")"""
        with two(source) as job:
            assert job.wait() == 3
            assert job.last == "coordd: rank 1 exited with code 3: OSError: disk full"

    def test_end_when_one_has_ended_before_init_in_which_the_other_waits(self):
        source = "sys.exit(0) if rank else None; import coordd; coordd.init()"
        with two(source, COORDD_START_SECONDS="1000") as job:
            assert job.wait() == 1
            told = "coordd: rank 1 exited with code 0 without calling init(), in which other ranks waited for it"
            assert job.last == told
            assert wait_until(lambda: not job.left)

    def test_end_with_an_error_if_the_one_that_waits_in_init_ends_well_when_it_is_asked_to(self):
        source = """
if rank: sys.exit(0)
import signal, coordd
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
coordd.init()"""
        with two(source, COORDD_START_SECONDS="1000") as job:
            assert job.wait() == 1
            assert job.last.startswith("coordd: rank 1 exited with code 0 without calling init()")

    @pytest.mark.parametrize("victim", ["command", "rank"])
    def test_end_when_one_is_killed(self, victim):
        pid = "os.getpid()" if victim == "command" else "os.getppid()"
        source = f"{STUBBORN}print('ready', {pid}, flush=True); signal.pause()"
        with two(source) as job:
            job.wait_for_ranks(2)
            killed = next(line for line in job.out.splitlines() if line.startswith("[1]"))
            os.kill(int(killed.split()[-1]), signal.SIGKILL)
            assert job.wait() == 137
            assert job.last.startswith("coordd: rank 1 ended by SIGKILL")
            assert wait_until(lambda: not job.left)

    def test_may_end_by_mpi_abort(self):
        source = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier(); MPI.COMM_WORLD.Abort(5) if rank else signal.pause()"
        with two(source) as job:
            assert job.wait() == 5
            assert job.last.startswith("coordd: rank 1 exited with code 5")
            assert wait_until(lambda: not job.left)

    def test_clean_up_after_ctrl_c(self):
        source = f"\ntry: {READY}{FOR_EVER}\nfinally: print('clean', flush=True)"
        with two(source) as job:
            job.wait_for_ranks(2).send(signal.SIGINT)
            assert job.wait() == 130
            assert job.out.count("clean") == 2
            assert job.last == "coordd: interrupted"
            assert wait_until(lambda: not job.left)

    def test_are_killed_at_once_by_the_second_ctrl_c(self):
        source = f"signal.signal(2, lambda *_: print('asked', flush=True)); {READY}{FOR_EVER}"
        with two(source, "--grace-seconds", "600") as job:
            job.wait_for_ranks(2).send(signal.SIGINT)
            job.wait_for(lambda job: job.out.count("asked") == 2).send(signal.SIGINT)
            assert job.wait() == 130
            assert wait_until(lambda: not job.left)

    def test_are_killed_when_grace_is_over(self):
        with two(f"{STUBBORN}{READY}signal.pause()", "--grace-seconds", "0.1") as job:
            job.wait_for_ranks(2).send(signal.SIGTERM)
            assert job.wait() == 143
            assert job.last == "coordd: ended by SIGTERM"
            assert wait_until(lambda: not job.left)

    def test_do_not_survive_the_launcher(self):
        with two(f"{STUBBORN}{READY}signal.pause()") as job:
            job.wait_for_ranks(2).send(signal.SIGKILL)
            assert job.wait() == 137
            assert wait_until(lambda: not job.left)

    def test_that_never_start_are_explained(self):
        with two("pass", "--mpi-args", "--no-such-flag") as job:
            assert job.wait() not in {0, 2}
            assert "no-such-flag" in job.err
            assert job.last.startswith("coordd: Open MPI")
            assert job.last.endswith("before any rank had started; what it said is above")
