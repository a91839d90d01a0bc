"""`horovod.run` and what else scripts take from `horovod.runner`."""

from __future__ import annotations

import pickle
import socket
from multiprocessing.connection import Client
from pathlib import Path

import horovod
import horovod.runner
import pytest
from horovod.runner import exchange
from horovod.runner.launch import check_build, run_commandline

from coordd.launch.drop_in import python_path
from tests.mpi.launch import environment, launch

_WORK = """
import os
import horovod.torch as hvd
import torch


def mean(number, *, add):
    hvd.init()
    average = hvd.allreduce(torch.tensor([number + add + hvd.rank()]), op=hvd.Average, name="mean")
    return hvd.rank(), average.tolist()


def place():
    return os.environ["HOROVOD_RANK"]


def fail_on_one():
    if os.environ["HOROVOD_RANK"] == "1":
        raise KeyError("not here")
    return 0
"""
_SCRIPT = """
import warnings
import horovod
import work

print("results", horovod.run(work.mean, args=(3,), kwargs={"add": 4}, num_proc=2, start_timeout=90))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print("places", horovod.run(work.place, np=3, use_mpi=True), [str(each.message) for each in caught])
try:
    horovod.run(work.fail_on_one, num_proc=2)
except RuntimeError as error:
    print("error", " ".join(str(error).split()))
"""


@pytest.mark.mpi
def test_a_function_runs_on_every_rank_and_its_results_come_back_in_their_order(tmp_path):
    """Integers are averaged as Horovod averages them; a function that fails ends the job with its traceback."""
    (tmp_path / "work.py").write_text(_WORK)
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    outcome = launch(1, script, launcher="python", timeout=150, variables={"PYTHONPATH": python_path(environment())})
    assert outcome.returncode == 0, str(outcome)
    assert "results [(0, [7]), (1, [7])]" in outcome.stdout
    assert "places ['0', '1', '2'] ['np is deprecated, use num_proc instead']" in outcome.stdout
    assert "error horovod.run: the function failed on rank 1 Traceback" in outcome.stdout
    assert "KeyError: 'not here'" in outcome.stdout


REFUSED = {
    "elastic": ({"min_np": 1, "num_proc": 2}, "the ranks of a job stay the same"),
    "discovery": ({"host_discovery_script": "x"}, "host_discovery_script"),
    "hosts": ({"hosts": "a:1", "hostfile": "b"}, "Argument hosts and hostfile only allow one provided"),
    "controllers": ({"use_gloo": True, "use_mpi": True}, "Argument use_gloo and use_mpi only allow one set True"),
}


@pytest.mark.parametrize(("arguments", "told"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:min_np is deprecated:DeprecationWarning")
def test_what_it_cannot_do_is_a_value_error(arguments, told):
    with pytest.raises(ValueError, match=told):
        horovod.run(print, **arguments)


def test_its_command_line_is_that_of_coordd_run(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "2", "--dry-run", "python", "train.py"])
    with pytest.raises(SystemExit) as ended:
        run_commandline()
    assert ended.value.code == 0
    assert "COORDD_AS_HOROVOD=1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        check_build()
    assert "[X] PyTorch" in capsys.readouterr().out
    assert horovod.run is horovod.runner.run


def descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def test_strangers_do_not_use_up_the_descriptors_of_the_caller(monkeypatch):
    """Any user can connect to the TCP port; connections that stay silent are limited in number and time."""
    monkeypatch.setattr(exchange, "_AUTHENTICATION_SECONDS", 1)
    before = descriptors()
    with exchange.Exchange(b"work", ["path"], remote=True) as served:
        where, key = served.variables.values()
        address = ("localhost", int(where.rpartition(":")[2]))
        strangers = [socket.create_connection(address) for _ in range(exchange.MAX_UNAUTHENTICATED + 40)]
        rank = Client(address, authkey=bytes.fromhex(key))
        assert rank.recv() == (b"work", ["path"])
        assert descriptors() < before + len(strangers) + exchange.MAX_UNAUTHENTICATED + 10
        rank.send((0, True, pickle.dumps("result")))
        assert rank.recv() is None
        rank.close()
        for each in strangers:
            each.close()
        assert served.results(1, 0) == ["result"]


def test_a_rank_that_works_for_long_is_no_stranger(monkeypatch):
    monkeypatch.setattr(exchange, "_AUTHENTICATION_SECONDS", 1)
    with exchange.Exchange(b"work", [], remote=True) as served:
        where, key = served.variables.values()
        rank = Client(("localhost", int(where.rpartition(":")[2])), authkey=bytes.fromhex(key))
        rank.recv()
        assert not rank.poll(1.5)
        rank.send((0, True, pickle.dumps(3)))
        assert rank.recv() is None
        rank.close()
        assert served.results(1, 0) == [3]
