"""The process of one rank, started as an MPI launcher starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from coordd.host.affinity import DAEMON_CORES, write_cpus
from coordd.host.cores import cores_here
from coordd.launch.frames import Ended, Output, Started, Waiting, decode
from coordd.launch.outcome import Outcome
from coordd.launch.rank import Order
from tests.launch.started import FOR_EVER, PATIENCE, ROOT, alive, wait_until

HEAVY = {"argparse", "asyncio", "dataclasses", "inspect", "json", "logging", "mpi4py", "numpy", "pathlib", "psutil"}
HEAVY |= {"rich", "socket", "subprocess", "threading", "torch", "zmq"}

READY = "print('ready', flush=True); "
SLEEP = READY + FOR_EVER
STUBBORN = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; " + SLEEP


class RankProcess:
    """A rank's process and what it tells."""

    def __init__(self, source, *, program=sys.executable, order=(), **variables):
        order = Order([program, "-c", source], *order)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coordd.launch.rank", *order.arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.frames = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stderr.close()

    def read_until(self, condition):
        """Reads frames until one fulfils the condition."""
        for line in self.process.stderr:
            self.frames.append(decode(line.rstrip(b"\n")) or line)
            if condition(self.frames[-1]):
                return self
        return self

    def ready(self):
        return self.read_until(lambda frame: isinstance(frame, Output) and b"ready" in frame.piece.text)

    def ended(self):
        """Reads to the end of the command; returns its outcome."""
        self.read_until(lambda frame: isinstance(frame, Ended))
        assert isinstance(self.frames[-1], Ended), self.frames
        return self.frames[-1].outcome

    def wait(self):
        return self.process.wait(PATIENCE)

    @property
    def text(self):
        return [frame.piece.text.decode() for frame in self.frames if isinstance(frame, Output)]

    @property
    def below(self):
        return psutil.Process(self.process.pid).children(recursive=True)


def test_it_starts_quickly_because_it_imports_little():
    source = f"import sys, coordd.launch.rank; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", source], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True
    )
    assert done.stdout == b"[]\n"


def test_an_order_survives_the_command_line():
    order = Order(["python", "--", "-x", ""], "hydra", 3, bind=False, as_horovod=True)
    assert Order.parse(order.arguments) == order


@pytest.mark.parametrize("as_horovod", [False, True])
def test_a_command_is_told_its_place_in_horovods_words_if_asked_for(as_horovod):
    source = "import os; print({name: value for name, value in os.environ.items() if name.startswith('HOROVOD_')})"
    with RankProcess(source, order=("alone", 0, True, as_horovod)) as rank:
        rank.ended()
    places = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
    crossing = {"HOROVOD_HOSTNAME": os.uname().nodename, "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}
    assert rank.text == [str(places | crossing if as_horovod else {})]


def test_a_command_that_ends_well():
    with RankProcess("import sys; print('one'); print('two', file=sys.stderr)") as rank:
        assert rank.ended() == Outcome(last="two", absent=True)
        assert rank.wait() == 0
    assert isinstance(rank.frames[0], Started)
    assert rank.frames[0].host == os.uname().nodename
    assert sorted(rank.text) == ["one", "two"]


def test_a_command_that_stays_in_init_is_reported_even_while_it_prints_and_that_it_leaves():
    source = """
import os, signal, time
from coordd.host import presence
place = os.environ[presence.VARIABLE]
signal.signal(signal.SIGUSR1, lambda *_: presence.tell(place, present=False))
presence.enter(place)
while True: print('step', flush=True); time.sleep(0.02)"""
    with RankProcess(source) as rank:
        rank.read_until(lambda frame: isinstance(frame, Waiting))
        assert rank.frames[-1] == Waiting(0)
        assert rank.text
        rank.process.send_signal(signal.SIGUSR1)
        rank.read_until(lambda frame: isinstance(frame, Waiting))
        assert rank.frames[-1] == Waiting(0, over=True)


def test_the_command_gets_its_place_its_threads_and_nothing_of_ours():
    source = """
import os, signal, sys
print(os.environ["OMP_NUM_THREADS"], os.environ["COORDD_LAUNCHED"], os.getsid(0) == os.getpid())
print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
"""
    hydra = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    with RankProcess(source, order=("hydra", 5), **hydra) as rank:
        rank.ended()
        assert rank.text == ["5 1 True", "True [0, 1, 2]"]
        assert rank.frames[0].rank == 2


@pytest.mark.skipif(len(cores_here().threads) < 2 or not cores_here().divisible, reason="there is no core to spare")
@pytest.mark.parametrize(("size", "variables", "told"), [(2, {}, None), (2, {DAEMON_CORES: "0"}, "0"), (1, {}, None)])
def test_the_daemon_gets_a_core_that_is_spare(size, variables, told):
    source = f"import os; print(sorted(os.sched_getaffinity(0)), os.environ.get({DAEMON_CORES!r}))"
    place = {"PMI_RANK": "0", "PMI_SIZE": str(size), "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    with RankProcess(source, order=("hydra", 1), **place, **variables) as rank:
        rank.ended()
    everything = sorted(os.sched_getaffinity(0))
    if told or size == 1:
        assert rank.text == [f"{everything} {told}"]
    else:
        cores = cores_here().threads
        assert rank.text == [f"{sorted(set(everything) - set(cores[-1]))} {write_cpus(cores[-1])}"]
        assert rank.frames[0].note.startswith("1 rank of 1 thread on ")
        assert rank.frames[0].note.endswith(f"daemons on {cores[-1][0]}")


def test_an_unfinished_line_is_shown_when_the_command_falls_quiet():
    with RankProcess("print('name? ready', end='', flush=True); import signal; signal.pause()") as rank:
        rank.ready()
        assert rank.text == ["name? ready"]


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("raise SystemExit(3)", Outcome(3)),
        ("raise ValueError('bad')", Outcome(1, exception="ValueError: bad", last="ValueError: bad")),
        ("import os; os.kill(os.getpid(), 9)", Outcome(signal=9)),
        ("import sys; sys.stderr.write('half'); sys.stderr.flush(); import os; os._exit(4)", Outcome(4)),
    ],
)
def test_a_failed_command_is_reported_and_its_rank_stays_until_it_is_dismissed(source, outcome):
    with RankProcess(source) as rank:
        assert rank.ended() == outcome
        assert rank.process.poll() is None
        rank.process.send_signal(signal.SIGTERM)
        rank.process.send_signal(signal.SIGINT)
        assert rank.wait() == outcome.status


@pytest.mark.parametrize(("words", "left"), [("True", True), ("True, False", False)])
def test_a_command_that_ends_well_between_init_and_shutdown_has_left_and_its_rank_stays(words, left):
    source = f"""
import os
from coordd.host import presence
for present in ({words},):
    presence.tell(os.environ[presence.VARIABLE], present=present)
os._exit(0)
"""
    with RankProcess(source) as rank:
        assert rank.ended() == Outcome(left=left, absent=False)
        if left:
            assert rank.process.poll() is None
            rank.process.send_signal(signal.SIGTERM)
            rank.process.send_signal(signal.SIGINT)
        assert rank.wait() == 0


def test_a_command_that_cannot_be_started_says_so():
    with RankProcess("", program="/no/such/program") as rank:
        outcome = Outcome(127, last="coordd: cannot start '/no/such/program': No such file or directory")
        assert rank.ended() == outcome


@pytest.mark.parametrize(
    ("sent", "received"),
    [("INT", "INT"), ("ALRM", "INT"), ("TERM", "TERM"), ("URG", "TERM"), ("USR1", "USR1"), ("USR2", "USR2")],
)
def test_a_signal_reaches_the_command_as_what_it_means(sent, received):
    source = f"""
import signal
def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    raise SystemExit
for name in ("INT", "TERM", "USR1", "USR2"):
    signal.signal(getattr(signal, "SIG" + name), heard)
{SLEEP}
"""
    with RankProcess(source) as rank:
        rank.ready().process.send_signal(getattr(signal, "SIG" + sent))
        outcome = rank.ended()
        assert rank.text[-1] == "SIG" + received
        assert outcome == Outcome(told="USR" not in sent, absent="USR" in sent)


@pytest.mark.parametrize("handles", [True, False])
def test_a_command_that_handles_sigterm_keeps_its_helpers(handles):
    """It may want to save, with its data loaders; a shell hands nothing on, so there the helpers hear of it, too."""
    handler = (
        "lambda *_: print(helper.poll(), flush=True) or helper.kill() or sys.exit()" if handles else "signal.SIG_DFL"
    )
    source = f"""
import signal, subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
helper.stdout.readline()
signal.signal(signal.SIGTERM, {handler})
{SLEEP if handles else "print('ready', flush=True); print(helper.wait(), flush=True)"}
"""
    with RankProcess(source) as rank:
        below = rank.ready().below
        rank.process.send_signal(signal.SIGTERM)
        outcome = rank.ended()
        assert wait_until(lambda: not any(map(alive, below)))
    if handles:
        assert rank.text[-1] == "None"
        assert outcome == Outcome(told=True)
    else:
        assert outcome.signal == signal.SIGTERM


def test_a_shell_with_a_trap_does_not_keep_sigterm_from_what_it_runs():
    """It runs its trap only when what it waits for has ended."""
    inner = "import signal, sys; signal.signal(15, lambda *_: print('saved', flush=True) or sys.exit()); "
    inner += SLEEP
    script = f"trap 'echo cleaned' TERM; {sys.executable} -c \"{inner}\"; echo ended"
    with RankProcess(script, program="bash") as rank:
        rank.ready().process.send_signal(signal.SIGTERM)
        rank.ended()
        assert [line.strip() for line in rank.text[-3:]] == ["saved", "cleaned", "ended"]


def test_the_second_request_kills_what_ignored_the_first():
    with RankProcess(STUBBORN) as rank:
        below = rank.ready().below
        rank.process.send_signal(signal.SIGINT)
        rank.process.send_signal(signal.SIGTERM)
        assert rank.ended() == Outcome(signal=signal.SIGKILL, told=True)
        assert rank.wait() == 137
        assert wait_until(lambda: not any(map(alive, below)))


def test_what_the_command_leaves_behind_is_ended_with_it():
    source = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid)
"""
    with RankProcess(source) as rank:
        assert rank.ended() == Outcome(absent=True)
        child = int(rank.text[0])
        assert rank.wait() == 0
        assert wait_until(lambda: not psutil.pid_exists(child) or not alive(psutil.Process(child)))


def test_nothing_survives_when_the_rank_itself_is_killed():
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).wait()"
    with RankProcess(child) as rank:
        below = rank.ready().below
        assert len(below) == 3  # the command, its child, and the guard
        rank.process.kill()
        assert rank.ended() == Outcome(signal=signal.SIGKILL)
        assert wait_until(lambda: not any(map(alive, below)))


def test_nothing_survives_when_the_launcher_has_gone():
    with RankProcess(STUBBORN) as rank:
        below = rank.ready().below
        rank.process.stderr.close()
        assert rank.wait() == 137
        assert wait_until(lambda: not any(map(alive, below)))
