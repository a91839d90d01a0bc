"""How ranks of this host, and through them those of other hosts, are asked; and what is made of silence."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from contextlib import contextmanager

import msgspec
import pytest

from coordd.monitoring.status import client
from coordd.monitoring.status.address import identity
from coordd.monitoring.status.client import survey
from coordd.monitoring.status.probe_result import Life
from coordd.monitoring.status.report import Question
from tests.monitoring.status.made import standing

HERE = os.uname().nodename
_turns = itertools.count(5000)


@contextmanager
def rank(number, size, answer, **fields):
    """A socket of this process that answers questions by a function, until it is left."""
    address = identity({}, turn=next(_turns))._replace(**{"rank": number, "size": size, "met": 1, **fields})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.name)
        listener.listen()
        thread = threading.Thread(target=_serve, args=(listener, answer), daemon=True)
        thread.start()
        yield address
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def _serve(listener, answer):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            question = connection.makefile("rb").readline()
            if question and (told := answer(msgspec.json.decode(question, type=Question))) is not None:
                connection.sendall(told)


def tells(number, **fields):
    fields = {"host": HERE, "pid": os.getpid(), **fields}
    found = msgspec.structs.replace(standing(number, size=fields.pop("size", 2)), **fields)
    return lambda question: msgspec.json.encode([found])


@pytest.fixture(autouse=True)
def _briefly(monkeypatch):
    monkeypatch.setattr(client, "_SECONDS", 0.3)
    monkeypatch.setattr("coordd.monitoring.status.process.stacks", lambda pid: ())


def test_all_ranks_of_this_host_are_asked():
    with rank(0, 2, tells(0)) as first, rank(1, 2, tells(1)) as second:
        found = survey([first, second])
    assert [(seen.rank, seen.host, seen.standing.rank) for seen in found.sightings] == [(0, HERE, 0), (1, HERE, 1)]
    assert (found.job, found.size, found.unasked) == (first.job, 2, 0)
    assert all(word in found.command for word in sys.orig_argv[1:])


def test_ranks_of_other_hosts_are_asked_through_one_of_these():
    world = {"hosts": (HERE, "far", "far"), "pids": (os.getpid(), 7, 8), "size": 3}
    asked = []

    def answer(question):
        if not question.ranks:
            return tells(0, **world)(question)
        asked.append(question.ranks)
        return tells(1, host="far", pid=7, size=3)(question)

    with rank(0, 3, answer) as address:
        found = survey([address])
    assert asked == [(1, 2)]
    here, heard, silent = found.sightings
    assert here.standing.rank == 0
    assert (heard.host, heard.pid, heard.standing.rank) == ("far", 7, 1)
    assert (silent.host, silent.pid, silent.standing, silent.reason) == ("far", 8, None, "does not answer")


def test_a_rank_of_this_host_whose_process_is_gone_is_dead():
    world = {"hosts": (HERE, HERE), "pids": (os.getpid(), 1 << 30)}
    with rank(0, 2, tells(0, **world)) as address:
        dead = survey([address]).sightings[1]
    assert (dead.rank, dead.life, dead.pid) == (1, Life.DEAD, 1 << 30)


def test_a_rank_of_which_nothing_is_known_is_listed():
    with rank(0, 2, tells(0)) as address:
        unseen = survey([address]).sightings[1]
    assert (unseen.rank, unseen.pid, unseen.life) == (1, 0, Life.UNKNOWN)


def test_so_many_ranks_of_other_hosts_are_asked_and_no_more(monkeypatch):
    monkeypatch.setattr(client, "_MOST_FAR", 3)
    size = 9
    world = {"hosts": (HERE, *["far"] * (size - 1)), "pids": tuple(range(1, size + 1)), "size": size}
    with rank(0, size, tells(0, **{**world, "pids": (os.getpid(), *world["pids"][1:])})) as address:
        found = survey([address])
    assert [seen.rank for seen in found.sightings] == [0, 1, 2, 3]
    assert found.unasked == 5


def test_silence_is_measured():
    release = threading.Event()
    with rank(0, 1, lambda _: release.wait(10) and None) as address:
        (seen,) = survey([address]).sightings
        release.set()
    assert (seen.standing, seen.reason) == (None, "does not answer")
    assert seen.cores >= 0


def test_a_silent_rank_that_has_not_met_the_others_waits_for_them():
    with rank(0, 2, lambda _: None, met=0) as address:
        seen = survey([address]).sightings[0]
    assert seen.reason == "starting: waits for the ranks that have not come"


def test_another_versions_words_are_told_apart_from_silence():
    with rank(0, 1, lambda _: b'{"new": "form"}') as address:
        (seen,) = survey([address]).sightings
    assert seen.reason == "answers what this version of coordd does not understand"


def test_a_process_that_is_gone_is_not_asked():
    address = identity({}, turn=next(_turns))._replace(pid=1 << 30, met=1)
    (seen,) = survey([address]).sightings
    assert (seen.life, seen.standing, seen.reason) == (Life.DEAD, None, "")


def test_another_users_socket_is_not_believed(monkeypatch):
    monkeypatch.setattr(client, "peer", lambda connection: (1, os.geteuid() + 1))
    with rank(0, 1, tells(0)) as address:
        (seen,) = survey([address]).sightings
    assert seen.reason == "is another user's"
