"""`coordd status` on real jobs of two ranks: one that runs, one that waits, and some that cannot answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from coordd.launch.cli import main
from coordd.monitoring.status.address import listed
from coordd.version import VERSION
from tests.launch.started import PATIENCE, ROOT, Started, wait_until
from tests.launch.test_run import mpi

pytestmark = mpi

BEGIN = """
import re, sys, threading
import numpy as np
from coordd import api

def allreduce(name):
    api.allreduce(np.ones(1000, np.float32), name=name)

api.init()
for _ in range(3):
    allreduce("first")
print("ready", flush=True)
"""
TRAIN = """
while True:
    allreduce("weight")
    threading.Event().wait(0.02)
"""
SLEEP_ON_1 = """
if api.rank() == 1:
    threading.Event().wait()
"""
LOCK_ON_1 = """
if api.rank() == 1:
    re.match(r"(a+)+$", "a" * 60 + "b")  # does not let go of Python's lock
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


class Job:
    """A job that runs, and questions to it."""

    def __init__(self, started):
        self._pid = started.process.pid

    def ask(self, *options, cwd=None):
        return subprocess.run(
            self._question(options),
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=PATIENCE,
            check=True,
            cwd=cwd,
        )

    def watch(self, *options):
        return subprocess.Popen(
            self._question(options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def _question(self, options):
        return [sys.executable, "-m", "coordd.launch.cli", "status", str(self._pid), *options]

    def told(self):
        return json.loads(self.ask("--json").stdout)

    def pid(self, rank):
        return self.told()["ranks"][rank]["pid"]

    def told_when(self, condition):
        """Asks until the answer is what it will be."""
        found = []

        def look():
            found.append(self.told())
            return condition(found[-1])

        assert wait_until(look), found[-1]
        return found[-1]


@contextmanager
def job(source):
    with Started("-n", "2", sys.executable, "-c", source) as started:
        yield Job(started.wait_for_ranks(2))


def long(told):
    """Somebody has waited for longer than a moment."""
    return any("has waited for" in sentence for sentence in told["verdict"])


def test_a_healthy_job_is_shown_with_its_plan_and_what_it_has_moved():
    with job(BEGIN + TRAIN) as running:
        told = running.told_when(lambda told: all(seen["standing"]["plan"]["lock"] for seen in told["ranks"]))
        assert told["verdict"] == []
        assert told["size"] == 2
        for rank, seen in enumerate(told["ranks"]):
            standing = seen["standing"]
            assert (seen["rank"], standing["rank"], standing["phase"], seen["trouble"]) == (
                rank,
                rank,
                "running",
                False,
            )
            assert standing["version"] == VERSION
            assert (standing["plan"]["buckets"], standing["plan"]["tensors"]) == (1, 1)
            count = standing["traffic"]["operations"]["allreduce"]
            assert standing["traffic"]["bytes"] == {"allreduce": 4000 * count}
            assert standing["last"]["site"] == "<string>:7"
        shown = running.ask().stdout
        assert "locked since plan" in shown
        assert f"coordd {VERSION}" in shown


def test_a_rank_that_sleeps_is_named_with_the_line_where_it_does():
    with job(BEGIN + SLEEP_ON_1 + TRAIN) as running:
        told = running.told_when(long)
        assert told["verdict"][0].startswith("Rank 0 has waited for rank 1 for ")
        assert told["verdict"][1].startswith("Rank 1: computing, at ")
        waiting, sleeping = told["ranks"]
        assert waiting["waits_for"] == [1]
        assert waiting["state"].startswith("waits for 'weight' (allreduce) for ")
        assert waiting["standing"]["stacks"][0]["inside"] == "coordd.api.allreduce"
        assert waiting["standing"]["stacks"][0]["lines"][-1].startswith("<string>:7 in allreduce:")
        assert sleeping["standing"]["stacks"][0]["lines"][-1].startswith("<string>:15 in <module>:")
        shown = running.ask().stdout
        assert "rank 0, main thread, in coordd.api.allreduce()" in shown
        assert "rank 1 has not submitted it" in shown


def test_a_rank_that_comes_late_in_every_step_is_told_with_how_much():
    late = """
while True:
    threading.Event().wait(0.06 if api.rank() == 1 else 0.01)
    allreduce("weight")
"""
    with job(BEGIN + late) as running:
        told = running.told_when(lambda told: told["ranks"][1]["behind"] > 0.03)
        assert told["ranks"][0]["behind"] == 0
        header, *shown = running.ask().stdout.partition("\nrank ")[2].splitlines()[:3]
        assert "behind" in header
        assert [" ms  'weight' at " in line for line in shown] == [False, True]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_whichever_it_is(stopped):
    with job(BEGIN + TRAIN) as running:
        pid = running.pid(stopped)
        os.kill(pid, signal.SIGSTOP)
        told = running.told_when(lambda told: long(told) and told["ranks"][1 - stopped]["waits_for"] == [stopped])
        assert told["verdict"][0].startswith(f"Rank {1 - stopped} has waited for rank {stopped} for ")
        assert f"Rank {stopped}: stopped; `kill -CONT {pid}` on " in told["verdict"][1]
        assert told["ranks"][stopped]["standing"] is None
        assert told["ranks"][stopped]["life"] == "stopped"
        assert "weight" in told["ranks"][1 - stopped]["state"]


def test_a_rank_that_keeps_pythons_lock_is_seen_from_outside():
    with job(BEGIN + LOCK_ON_1 + TRAIN) as running:
        told = running.told_when(long)
        silent = told["ranks"][1]
        assert silent["standing"] is None
        assert silent["state"].startswith("does not answer (running, ")
        assert silent["cores"] > 0.05
        assert "native code may hold Python's lock" in silent["state"]


def test_a_rank_that_has_not_come_is_missed():
    late = "import os, threading; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and threading.Event().wait();"
    announce = "\nprint('ready', flush=True)\n"
    with Started("-n", "2", sys.executable, "-c", announce + late + BEGIN) as started:
        started.wait_for_ranks(2)
        mine = {process.pid for process in psutil.Process(started.process.pid).children(recursive=True)}
        assert wait_until(lambda: any(address.pid in mine for address in listed()))
        told = Job(started).told_when(long)
        assert told["verdict"][0].startswith("Rank 0 has waited for rank 1 for ")
        assert told["ranks"][0]["state"].startswith("starting for ")
        assert told["ranks"][0]["state"].endswith(": rank 1 has not come")
        assert told["ranks"][0]["standing"]["stacks"][0]["inside"] == "coordd.api.init"
        assert told["ranks"][1]["state"].startswith("not seen: it has not called init()")


def test_watching_ends_with_the_job(tmp_path):
    end = tmp_path / "end"
    script = f"""
import os
while not api.allreduce(np.array([float(os.path.exists({str(end)!r}))])).any():
    allreduce("weight")
    threading.Event().wait(0.02)
"""
    with job(BEGIN + script) as running, running.watch("--watch", "0.2", "--json") as watching:
        lines = [watching.stdout.readline(), watching.stdout.readline()]
        end.touch()
        lines += watching.communicate(timeout=PATIENCE)[0].splitlines()
    first, *_, last = (json.loads(line)["ranks"][0]["standing"] for line in lines)
    assert last["traffic"]["bytes"]["allreduce"] > first["traffic"]["bytes"]["allreduce"]


@pytest.mark.parametrize("how", ["--json", "--threads"])
def test_watching_ends_with_ctrl_c(how):
    with job(BEGIN + TRAIN) as running, running.watch("--watch", "86400", how) as watching:
        assert watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=PATIENCE)
        assert (watching.returncode, err) == (0, "")


def test_files_below_the_working_directory_are_shown_by_their_way_from_there(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "train.py").write_text(BEGIN + SLEEP_ON_1 + TRAIN)
    with Started("-n", "2", sys.executable, tmp_path / "lib" / "train.py") as started:
        running = Job(started.wait_for_ranks(2))
        running.told_when(long)
        shown = running.ask(cwd=tmp_path).stdout
        assert ", at lib/train.py:15 in <module>: " in shown
        assert "\n  lib/train.py:15 in <module>: " in shown
        assert "'weight' at lib/train.py:7, " in shown
        assert str(tmp_path) not in shown.partition("\n")[2]
        assert f"{tmp_path}/lib/train.py:15" in running.ask("--json", cwd=tmp_path).stdout


def test_a_process_that_belongs_to_no_job_is_refused(capsys):
    assert main(["status", str(os.getpid())]) == 1
    assert capsys.readouterr().err.startswith("coordd: no job")


@pytest.mark.parametrize("interval", ["0", "soon", "nan"])
def test_an_interval_that_makes_no_sense_is_refused(capsys, interval):
    with pytest.raises(SystemExit) as stop:
        main(["status", "--watch", interval])
    assert stop.value.code == 2
    assert "is not a number of seconds from 0.1 to 86400" in capsys.readouterr().err
