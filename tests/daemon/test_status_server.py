"""A rank that is asked, in person and through the coordinator, while it runs, waits or has not yet begun."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from coordd import api
from coordd.daemon.status_server import Desk
from coordd.monitoring.status.address import Address, listed
from coordd.monitoring.status.report import Question, Standing
from tests.launch.started import wait_until
from tests.local_ranks import local_ranks

WAIT = 10.0
_turns = itertools.count(1000, 10)


def start(name, members=()):
    sets = {"process_set": api.ProcessSet(members)} if members else {}
    return api.operations().allreduce(np.ones(2), name=name, **sets)


@contextmanager
def desks(count, **settings):
    """Ranks as threads of this process, each with a desk."""
    with local_ranks(count, **settings) as ranks:
        turns = [next(_turns) for _ in ranks.daemons]
        job = f"desks-{os.getpid()}"
        found = [
            Desk(daemon, Address(os.geteuid(), os.getpid(), turn, 0, rank, count, job))
            for rank, (daemon, turn) in enumerate(zip(ranks.daemons, turns, strict=True))
        ]
        try:
            yield ranks, found
        finally:
            for desk in found:
                desk.close()


def ask(desk, *ranks, text=None):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT)
        connection.connect(desk._address.name)
        try:
            connection.sendall(msgspec.json.encode(Question(ranks)) + b"\n" if text is None else text)
            data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except (BrokenPipeError, ConnectionResetError):  # it may be refused before it is asked
            return None
    return msgspec.json.decode(data, type=list[Standing]) if data else None


def operation_of(desk, *stages):
    """Asks for the only operation, until the daemon has taken it up."""
    found = []

    def look():
        found[:] = ask(desk)[0].operations
        return found and found[0].stage in stages

    assert wait_until(look, WAIT), found
    return found[0]


def test_a_rank_tells_what_it_waits_for_and_who_the_others_are():
    with desks(2) as (ranks, (desk, other)):

        def body(rank):
            for _ in range(3):
                start("early").result(WAIT)
            if rank == 1:
                return
            handle = start("late")
            (told,) = ask(desk)
            assert (told.rank, told.size, told.phase, told.pid) == (0, 2, "running", os.getpid())
            assert told.pids == (os.getpid(),) * 2
            assert told.hosts == (os.uname().nodename,) * 2
            operation = operation_of(desk, "announced")
            assert (operation.name, operation.kind) == ("late", "allreduce")
            assert operation.bytes == 16
            assert operation.site.startswith(__file__)
            (told,) = ask(desk)
            assert told.last.name == "late"
            assert told.traffic.operations == {"allreduce": 3}
            assert told.traffic.bytes == {"allreduce": 48}
            (told,) = ask(other)
            assert (told.rank, told.operations) == (1, ())
            with api.using(ranks.daemons[1]):
                start("late")
            handle.result(WAIT)

        ranks.each(body)


def test_the_cache_and_the_lock_are_told():
    with desks(2, lock_steps=3) as (ranks, (desk, _)):

        def body(rank):
            for _ in range(20):
                for handle in [start("a"), start("b")]:
                    handle.result(WAIT)

        ranks.each(body)
        (told,) = ask(desk)
        assert told.plan.lock > 0
        assert (told.plan.buckets, told.plan.tensors) == (1, 2)
        assert told.traffic.operations == {"allreduce": 40}
        assert told.traffic.locked == 2 * told.plan.steps
        assert told.plan.misses == 2
        assert told.plan.hits > 0


def test_sends_and_receives_are_told_and_counted():
    with desks(2) as (ranks, (desk, other)):

        def body(rank):
            operations = api.operations()
            if rank == 1:
                handle = operations.recv(None, 0, name="x")
                operation = operation_of(other, "matched")
                assert (operation.kind, operation.missing) == ("recv", (0,))
                with api.using(ranks.daemons[0]):
                    api.operations().send(np.ones(3), 1, name="x").result(WAIT)
                handle.result(WAIT)

        ranks.each(body)
        assert ask(desk)[0].traffic.bytes == {"send": 24}
        assert ask(other)[0].traffic.bytes == {"recv": 24}


@pytest.mark.parametrize("settings", [{}, {"simulate_hosts": 4, "fan_in": 2}], ids=["star", "tree"])
@pytest.mark.parametrize("asker", [0, 3, 6])
def test_every_rank_reaches_all_others_through_the_coordinator(settings, asker):
    with desks(7, **settings) as (ranks, found):
        handles = [None] * 7

        def body(rank):
            if rank != 5:
                handles[rank] = start("w")

        ranks.each(body)
        told = ask(found[asker], *range(7))
        assert [standing.rank for standing in told] == list(range(7))
        assert [len(standing.operations) for standing in told] == [1, 1, 1, 1, 1, 0, 1]
        assert not any(standing.pids for standing in told)
        ranks.each(lambda rank: (handles[rank] or start("w")).result(WAIT))


def test_who_has_no_desk_does_not_answer_and_the_others_do():
    with desks(3) as (ranks, found):
        ranks.daemons[1].status.desk = lambda _: None
        assert [standing.rank for standing in ask(found[0], 1, 2)] == [2]


def test_a_job_that_has_failed_says_why():
    with desks(2) as (ranks, (_, other)):
        ranks.daemons[0].fail("ran out of milk")
        ranks.daemons[1].blame(WAIT)
        (told,) = ask(other)
        assert (told.phase, told.failure) == ("failed", "rank 0 ran out of milk")


def test_it_moves_when_the_ranks_have_met():
    with desks(2) as (_, (desk, _other)):
        before = desk._address
        desk.settle()
        after = desk._address
        assert (after.met, after.turn) == (1, before.turn + 1)
        assert {before, after} <= set(listed())
        assert ask(desk)[0].rank == 0
    assert not {before, after} & set(listed())


def test_a_daemon_whose_thread_is_stuck_is_seen_all_the_same():
    stuck, free = threading.Event(), threading.Event()
    with desks(1) as (ranks, (desk,)):
        ranks.daemons[0]._do(lambda: stuck.set() or free.wait(WAIT))
        assert stuck.wait(WAIT)
        try:
            with api.using(ranks.daemons[0]):
                handle = start("w")
            assert operation_of(desk, "queued").name == "w"
        finally:
            free.set()
        handle.result(WAIT)


@pytest.mark.parametrize("text", [b"", b"nonsense\n", b"[1]\n", b'{"ranks": "all"}\n'])
def test_nonsense_is_not_answered_and_does_no_harm(text, caplog):
    caplog.set_level(logging.CRITICAL, "coordd")
    with desks(1) as (_, (desk,)):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(desk._address.name)
            connection.sendall(text)
        if text:
            assert ask(desk, text=text) is None
        assert ask(desk)[0].rank == 0


def test_another_users_question_is_not_answered(monkeypatch):
    monkeypatch.setattr("coordd.daemon.status_server.peer", lambda connection: (1, os.geteuid() + 1))
    with desks(1) as (_, (desk,)):
        assert ask(desk) is None


def test_a_name_that_is_taken_is_told_and_training_goes_on(caplog):
    with desks(1) as (ranks, (desk,)):
        second = Desk(ranks.daemons[0], desk._address)
        second.close()
        assert "`coordd status` will not find this rank" in caplog.text
        assert ask(desk)[0].rank == 0
