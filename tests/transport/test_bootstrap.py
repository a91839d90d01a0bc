"""Start-up: whatever one rank fails with, at whatever step, all ranks hear at once, and the process can go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from coordd import api
from coordd.config import Config
from coordd.daemon.daemon import Daemon
from coordd.daemon.rendezvous import meet
from coordd.errors import PeerError, StartError
from coordd.transport import registry
from coordd.transport.bootstrap import Bootstrap
from coordd.transport.local import LocalTransport, LocalWorld
from tests.local_ranks import LocalRanks, stacks

SECONDS = 30.0  # less than `start_seconds`, after which ranks would give up by themselves

STEPS = {
    "coordd.daemon.event_loop": [
        *("keep_to", "nap_precisely", "World", "Member", "Plane", "Flights", "Mailbox", "Lookout", "Parts", "post"),
        *("hub", "Hello"),
    ],
    "coordd.daemon.rendezvous": ["_machine", "_namespace", "_split", "_apart", "share", "post", "more_ranks", "Link"],
    "coordd.transport.shared_memory.host_memory": ["_own_board", "_boards_of", "_hosts", "_close", "Commons"],
    "coordd.transport.shared_memory.board.Board": ["of"],
    "coordd.control.tree_node": ["interface_for", "ZmqControl", "join"],
    "coordd.control.zeromq.ZmqControl": ["listen", "connect"],
    "coordd.control.shared_memory": ["join", "Edge", "Nearby"],
    "coordd.transport.shared_memory.notes": ["join", "Notes"],
    "coordd.transport.shared_memory.ring_buffer": ["join", "RingReader", "RingWriter", "_outward"],
}
"""What start-up calls, by module or class; the first rank that calls it fails there."""


class InjectedError(Exception):
    """What one rank fails with."""


@contextmanager
def pigeons(monkeypatch: pytest.MonkeyPatch, size: int, **settings: Any) -> Iterator[LocalRanks]:
    """Ranks as threads that meet as ranks of MPI do, over a third party's data plane; not yet started."""
    world, numbers, lock = LocalWorld(size), iter(range(size)), threading.Lock()

    def make() -> LocalTransport:
        with lock:
            return LocalTransport(world, next(numbers), lambda: None)

    entry = EntryPoint("pigeons", f"{__name__}:pigeons", "coordd.transports")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    monkeypatch.setattr(EntryPoint, "load", lambda self: make)
    config = Config(transport="pigeons", **settings)
    yield LocalRanks([Daemon(config, meet(config)) for _ in range(size)])


def started(ranks: LocalRanks) -> list[BaseException | None]:
    """Starts all ranks; returns what each raises."""
    errors: list[BaseException | None] = [None] * len(ranks)

    def body(index: int) -> None:
        try:
            ranks.daemons[index].start()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            errors[index] = error

    threads = [threading.Thread(target=body, args=(index,), daemon=True) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        if thread.is_alive():
            pytest.fail(f"a rank waits for one that cannot start\n{stacks()}", pytrace=False)
    return errors


def failing_once(monkeypatch: pytest.MonkeyPatch, place: str, name: str) -> list[int]:
    """Has the first call fail; returns a list that then is not empty."""
    module, _, kind = place.rpartition(".")
    owner = import_module(place) if kind.islower() else getattr(import_module(module), kind)
    real = getattr(owner, name)
    called: list[int] = []
    lock = threading.Lock()

    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            called.append(1)
            first = len(called) == 1
        if first:
            raise InjectedError(f"in {name}")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, staticmethod(call) if isinstance(owner, type) and name == "of" else call)
    return called


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in STEPS.items() for name in names])
def test_an_error_in_any_step_of_one_rank_is_heard_by_all_and_the_process_goes_on(monkeypatch, place, name):
    with monkeypatch.context() as patch:
        called = failing_once(patch, place, name)
        with pigeons(monkeypatch, 3, interface="127.0.0.1") as ranks:
            errors = started(ranks)
            if not called:
                pytest.fail(f"start-up does not call {name} any more: take it out of the list")
            own = [error for error in errors if isinstance(error, InjectedError)]
            told = [error for error in errors if isinstance(error, PeerError)]
            assert (len(own), len(told)) == (1, 2), errors
            assert all(
                f"could not start: tests.transport.test_bootstrap.InjectedError: in {name}" in str(error)
                for error in told
            )
            assert all(daemon.end(SECONDS) for daemon in ranks.daemons)
    with pigeons(monkeypatch, 3, interface="127.0.0.1") as ranks:
        assert started(ranks) == [None] * 3
        assert ranks.each(lambda _: api.allreduce(np.ones(1)).item()) == [1.0] * 3
        ranks.stop()


def test_an_error_when_all_have_come_is_told_too(monkeypatch):
    """Some may have started by then; their next operation fails."""
    failing_once(monkeypatch, "coordd.daemon.event_loop", "oversubscribed")
    with pigeons(monkeypatch, 3) as ranks:
        errors = started(ranks)
        assert [type(error) for error in errors].count(InjectedError) == 1, errors
        for daemon, error in zip(ranks.daemons, errors, strict=True):
            if error is None:
                failure = daemon.blame(SECONDS)
                assert (
                    "could not start: tests.transport.test_bootstrap.InjectedError: in oversubscribed" in failure.reason
                )
            else:
                assert "in oversubscribed" in str(error)
        assert all(daemon.end(SECONDS) for daemon in ranks.daemons)


def test_two_ranks_that_fail_at_once_raise_what_each_fails_with():
    world = LocalWorld(3)
    found: dict[int, BaseException] = {}

    def fail(rank: int) -> None:
        if rank:
            raise InjectedError(rank)

    def body(rank: int) -> None:
        start = Bootstrap(world.join(rank).gather)
        try:
            assert start.gather(rank) == [0, 1, 2]
            with start.shared():
                fail(rank)
            start.gather(None)
        except BaseException as error:  # noqa: BLE001 - looked at below
            found[rank] = error
        assert start.in_step

    _in_threads(body, 3)
    assert [type(found[rank]) for rank in range(3)] == [PeerError, InjectedError, InjectedError]
    assert str(found[0]).startswith("rank 1 could not start: ")


def test_what_the_exchange_itself_fails_with_is_not_told_over_it():
    def broken(_: Any) -> list[Any]:
        raise OSError("no network")

    start = Bootstrap(broken)
    with pytest.raises(OSError, match="no network"), start.shared():
        start.gather(1)
    assert not start.in_step


def test_a_rank_that_has_given_up_says_so_to_those_who_come_later(monkeypatch):
    with pigeons(monkeypatch, 2, start_seconds=0.2) as ranks:
        late = ranks.daemons[1]
        with pytest.raises(StartError, match=r"did not find each other within 0.2 s \(start_seconds\)"):
            ranks.daemons[0].start()
        late.config = Config(transport="pigeons")  # it has time
        with pytest.raises(PeerError, match=r"could not start: .*given up waiting for the other ranks after 0.2 s"):
            late.start()
        assert all(daemon.end(SECONDS) for daemon in ranks.daemons)


def test_settings_that_change_what_is_exchanged_do_not_keep_ranks_from_telling_that_they_differ(monkeypatch):
    with pigeons(monkeypatch, 2) as ranks:
        ranks.daemons[1] = Daemon(config := Config(transport="pigeons", shared_memory=False), meet(config))
        errors = started(ranks)
        assert all("different settings" in str(error) for error in errors), errors


def _in_threads(body: Callable[[int], None], size: int) -> None:
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), stacks()
