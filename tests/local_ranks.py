"""Ranks as threads of this process: real daemons, without a launcher, in common memory and over the local transport.

Its one rule: a hang is a failure. Every wait has a limit, and what does not end is told with the stacks of all threads.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from coordd import api
from coordd.config import Config
from coordd.daemon.daemon import Daemon
from coordd.daemon.rendezvous import Link, Rendezvous, local_world
from coordd.daemon.wakeup import Bell
from coordd.errors import MismatchError, PeerError
from coordd.monitoring.stacks import frames_of_other_threads
from coordd.transport.shared_memory.host_memory import join
from coordd.transport.shared_memory.notes import join as join_notes
from tests.scaled_timeout import ScaledTimeout

__all__ = ["LocalRanks", "each_rank", "local_ranks", "stacks"]

SECONDS = 20.0

Function = Callable[[int], Any]


class LocalRanks:
    """The daemons of one world, to run functions on."""

    def __init__(self, daemons: list[Daemon]) -> None:
        self.daemons = daemons

    def __len__(self) -> int:
        return len(self.daemons)

    def each(self, function: Function, *, seconds: float = 0.0) -> list[Any]:
        """Calls ``function(rank)`` on every rank, where `coordd.torch` works, and returns the results by rank.

        The first error that a rank raises ends the job, as it would in a process of its own, and is raised here. They
        have the usual time, unless more ``seconds`` are given.
        """
        results: list[Any] = [None] * len(self)
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                with api.using(self.daemons[rank]):
                    results[rank] = function(rank)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
                if not isinstance(error, PeerError):
                    self.daemons[rank].fail(f"failed: {error!r}", "".join(traceback.format_exception(error)))

        self._in_threads(body, max(seconds, SECONDS))
        try:
            if errors:
                raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
        finally:
            errors.clear()  # this frame, and so what the errors' frames hold, would live as long as they
        return results

    def errors(self, function: Function, kind: type[BaseException]) -> list[Any]:
        """Calls ``function(rank)`` on every rank, and returns the errors, which all must be of this kind."""

        def body(rank: int) -> BaseException:
            with pytest.raises(kind) as caught:
                function(rank)
            return caught.value

        return self.each(body)

    def start(self) -> None:
        """Starts all daemons; they wait for each other."""
        self._in_threads(lambda rank: self.daemons[rank].start())

    def stop(self) -> None:
        """Stops all daemons: in step, or after a failure each by itself."""
        self._in_threads(lambda rank: self.daemons[rank].stop() or self.daemons[rank].end(SECONDS))

    def _in_threads(self, body: Callable[[int], None], seconds: float = SECONDS) -> None:
        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(len(self))
        ]
        for thread in threads:
            thread.start()
        limit = ScaledTimeout(seconds)
        for thread in threads:
            while thread.is_alive() and (wait := limit.next_wait()):
                thread.join(wait)
        if hanging := [thread.name for thread in threads if thread.is_alive()]:
            story = stacks()
            for daemon in self.daemons:
                daemon.end(1.0)
            pytest.fail(f"{', '.join(hanging)} did not end within {seconds} s\n{story}", pytrace=False)


def stacks() -> str:
    """Tells what every thread is doing."""
    with frames_of_other_threads() as frames:
        return "\n".join(
            f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
            for thread in threading.enumerate()
            if thread.ident in frames
        )


@contextmanager
def local_ranks(count: int, **settings: Any) -> Iterator[LocalRanks]:
    """Starts a world of ``count`` ranks with these settings, and stops it."""
    config = Config(**settings)
    parts, host = config.simulate_hosts, os.uname().nodename
    hosts = [f"{host}#{rank * parts // count}" if parts > 1 else host for rank in range(count)]
    ways = local_world(count, hosts, fan_in=config.fan_in)
    ranks = LocalRanks([Daemon(config, _settled(way, config)) for way in ways])
    ranks.start()
    try:
        yield ranks
    finally:
        ranks.stop()


def each_rank(count: int, function: Function, **settings: Any) -> list[Any]:
    """Calls ``function(rank)`` on every rank of a new world."""
    with local_ranks(count, **settings) as ranks:
        return ranks.each(function)


def come_together() -> bool:
    """Tries to bring all ranks to one point, as after an error that all have caught; says whether they are there."""
    try:
        api.barrier()
    except MismatchError:
        return False
    return True


def _settled(way: Rendezvous, config: Config) -> Rendezvous:
    """Lets the ranks of one host share memory, if the settings say so."""

    def meet(bell: Bell) -> Link:
        link = way(bell)
        rank, size = link.transport.rank, link.transport.size
        shared = config.shared_memory and size > 1
        gather = link.transport.gather
        commons = join(gather, link.hosts, rank, bell.descriptor) if shared else None
        notes = None if commons is None else join_notes(rank, gather, commons)
        return dataclasses.replace(link, commons=commons, notes=notes)

    return meet
