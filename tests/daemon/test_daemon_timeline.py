"""Daemons that record a timeline: from the start or when told, by one rank for all."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coordd import api
from coordd.config import Config
from coordd.errors import ArgumentError, NotInitializedError
from coordd.monitoring.timeline.breakdown import Part, comings, ways
from coordd.monitoring.timeline.journal import Journal
from coordd.monitoring.timeline.trace import find
from tests.local_ranks import each_rank, local_ranks

PHASES = {"NEGOTIATE", "QUEUE", "FUSE", "ALLREDUCE", "UNFUSE"}


def reduce(*names):
    handles = [api.operations().allreduce(np.ones(3), name=name) for name in names]
    for handle in handles:
        handle.result(10.0)


def recorded(folder, rank):
    """The phases of each row in a rank's file."""
    events = json.loads((folder / f"rank.{rank}.json").read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = {name: [] for name in rows.values()}
    for event in events:
        if event["ph"] != "M":
            found[rows[event["tid"]]].append(event["name"])
    return found


@pytest.mark.parametrize("way", [{}, {"shared_memory": False}, {"simulate_hosts": 3}, {"lock_steps": 0}], ids=str)
def test_a_setting_records_all_ranks_from_the_start(tmp_path, way):
    def body(_):
        for _ in range(6):
            reduce("a", "b")

    each_rank(3, body, timeline=str(tmp_path), **way)
    for rank in range(3):
        rows = recorded(tmp_path, rank)
        for name in ("a", "b"):
            assert set(rows[name]) == PHASES
            assert len(rows[name]) == 6 * 5
        assert set(rows[f"waits of rank {rank}"]) == {"WAIT"}
        assert "daemon" not in rows


@pytest.mark.parametrize("way", [{}, {"shared_memory": False}], ids=str)
def test_every_operation_has_its_phases_on_every_rank_even_on_those_that_have_joined(tmp_path, way):
    def body(rank):
        operations, array = api.operations(), np.ones((4, 2))
        handles = {
            "allreduce": operations.allreduce(array.copy(), name="allreduce"),
            "broadcast": operations.broadcast(array.copy(), 1, name="broadcast"),
            "allgather": operations.allgather(array, name="allgather"),
            "alltoall": operations.alltoall(array, name="alltoall"),
            "reducescatter": operations.reducescatter(array, name="reducescatter"),
            "barrier": operations.barrier(),
        }
        for handle in handles.values():
            handle.result(10.0)
        if rank == 0:
            operations.allreduce(array, name="alone").result(10.0)
        operations.join().result(10.0)

    each_rank(2, body, timeline=str(tmp_path), **way)
    named = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter")
    kinds = {name: name.upper() for name in named} | {"alone": "ALLREDUCE"}
    kinds |= {f"{kind} without a name": kind.upper() for kind in ("barrier", "join")}
    for rank in range(2):
        rows = recorded(tmp_path, rank)
        for name, kind in kinds.items():
            assert rows[name] == ["NEGOTIATE", "QUEUE", "FUSE", kind, "UNFUSE"], (rank, name)


@pytest.mark.parametrize("callers", [{0}, {2}, {0, 1, 2}], ids=str)
def test_whoever_says_so_starts_and_stops_all(tmp_path, callers):
    def body(rank):
        reduce("before")
        if rank in callers:
            api.start_timeline(str(tmp_path / "trace.json"), mark_cycles=True)
        reduce("between")  # by its end all have heard
        for _ in range(3):
            reduce("during")
        reduce("last")
        if rank in callers:
            api.stop_timeline()
        for _ in range(3):
            reduce("after")

    each_rank(3, body)
    for rank in range(3):
        rows = recorded(tmp_path / "trace", rank)
        assert rows["during"] == ["NEGOTIATE", "QUEUE", "FUSE", "ALLREDUCE", "UNFUSE"] * 3
        assert "before" not in rows
        assert set(rows["daemon"]) == {"CYCLE"}


def test_a_second_recording_is_another(tmp_path):
    def body(rank):
        for name in ("x", "y"):
            api.start_timeline(str(tmp_path / name))
            reduce(name)
            reduce("fence")  # whoever stops first stops all
            api.stop_timeline()
            if rank == 0:
                reduce_again = recorded(tmp_path / name, 0)
                assert set(reduce_again[name]) == PHASES, "the file is complete when stop_timeline returns"
            reduce("between")

    each_rank(2, body)
    assert "x" not in recorded(tmp_path / "y", 0)


def test_sends_and_receives_are_recorded(tmp_path):
    def body(rank):
        array = np.ones(4)
        operations = api.operations()
        handle = operations.recv(array, 0, name="act") if rank else operations.send(array, 1, name="act")
        handle.result(10.0)

    each_rank(2, body, timeline=str(tmp_path))
    assert recorded(tmp_path, 0)["act"] == ["SEND"]
    assert recorded(tmp_path, 1)["act"] == ["RECV"]


def test_nobody_records_unasked():
    with local_ranks(2) as ranks:
        ranks.each(lambda _: reduce("a"))
        assert all(daemon._loop.recorder.deck.tape is None for daemon in ranks.daemons)


def test_stopping_what_was_not_started_does_nothing():
    each_rank(2, lambda _: api.stop_timeline())


def test_a_recording_needs_a_place():
    def body(_):
        with pytest.raises(ArgumentError, match="needs a folder"):
            api.start_timeline("DYNAMIC")

    each_rank(1, body)


def test_without_a_daemon_there_is_nothing_to_record():
    with pytest.raises(NotInitializedError):
        api.start_timeline("x")
    with pytest.raises(NotInitializedError):
        api.stop_timeline()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HOROVOD_TIMELINE": "/data/run.json"}, "/data/run"),
        ({"HOROVOD_TIMELINE": "/data/run"}, "/data/run"),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, ""),
        ({"COORDD_TIMELINE": "here", "HOROVOD_TIMELINE": "there"}, "here"),
        ({}, ""),
    ],
    ids=str,
)
def test_horovods_variable_names_a_file(variables, folder):
    assert Config.load(variables).timeline == folder


def test_recording_may_differ_between_ranks():
    assert Config(timeline="x", timeline_mark_cycles=True).digest == Config().digest


def test_a_receive_that_comes_early_waits_for_its_sender(tmp_path):
    def body(rank):
        operations = api.operations()
        if rank == 1:
            early = operations.recv(np.zeros(3), 0, name="act")
        operations.barrier().result(10.0)
        if rank == 0:
            operations.send(np.ones(3), 1, name="act").result(10.0)
        else:
            early.result(10.0)

    each_rank(2, body, timeline=str(tmp_path))
    journals = [Journal(trace.rank, trace.events()) for trace in find(tmp_path)]
    come = comings(journals)
    (sent,), (received,) = ([one for one in found.operations if one.names == ("act",)] for found in journals)
    assert sent.key == received.key
    coming = come[received.key]
    assert (coming.rank, coming.at) == (0, sent.come)
    assert ways(received, coming)[Part.LATE] == (received.come, sent.come)
