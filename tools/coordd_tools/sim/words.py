"""Collects the votes on locked buckets and decides their outcome: the data plane of a locked plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from coordd.negotiation.worker import Locked
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.exchange import Cargo, Exchange, submissions
from coordd_tools.sim.ledger import Ledger, demand

__all__ = ["Words"]

_MEAN, _SLOW_MEAN = 2e-4, 8e-2
_SLOW = 0.3

Key = tuple[int, int, int]
Told = Callable[[Locked, bool], None]


@dataclass
class _Meeting:
    """One iteration of a locked bucket.

    Attributes:
        given: by rank, its vote and the callback for the outcome.
        heard: by rank, the ranks whose vote it has received.
        ended: by rank that knows the outcome, whether the data moves.
        landed: the ranks that have the result.
        cargoes: the contents of the buckets of valid votes.
    """

    given: dict[int, tuple[Locked, Told]] = field(default_factory=dict)
    heard: dict[int, set[int]] = field(default_factory=dict)
    ended: dict[int, bool] = field(default_factory=dict)
    landed: set[int] = field(default_factory=set)
    cargoes: list[Cargo] = field(default_factory=list)


class Words:
    """Carries votes from every rank to every other, late and in any order; data moves when all ranks have all votes."""

    def __init__(  # noqa: PLR0913 - the parts of the job that it needs
        self, agenda: Agenda, rng: Random, ledger: Ledger, exchange: Exchange, *, size: int, slow: Random | None = None
    ) -> None:
        """Starts without votes.

        Args:
            agenda: the clock.
            rng: the random generator.
            ledger: checks what is given and received.
            exchange: moves the data.
            size: number of ranks.
            slow: draws which buckets take long, as large tensors do; None for none.
        """
        self.locked = 0
        self.refused = 0
        self._agenda = agenda
        self._rng = rng
        self._slow = slow
        self._ledger = ledger
        self._exchange = exchange
        self._ranks = range(size)
        self._hasty = rng.randrange(2)
        self._meetings: dict[Key, _Meeting] = {}
        self._last: dict[tuple[int, int, int], Locked | None] = {}
        self._dead: set[int] = set()

    def give(self, rank: int, word: Locked, told: Told) -> None:
        """Casts a rank's vote; if it is valid, ``told`` is called with the outcome, after the data has moved."""
        key = (word.lock, word.index, word.occurrence)
        self._inspect(rank, word)
        meeting = self._meetings.setdefault(key, _Meeting())
        if word.bucket is not None:
            meeting.cargoes.append(self._exchange.inspect(f"locked bucket {key}", rank, word.bucket, meeting.cargoes))
        meeting.given[rank] = (word, told)
        meeting.heard.setdefault(rank, set())
        for peer in self._ranks:
            delay = self._rng.expovariate(1 / _MEAN) if peer != rank else 0.0
            self._agenda.after(delay, partial(self._arrive, meeting, rank, peer))

    def missing(self, word: Locked) -> tuple[int, ...]:
        """Returns the ranks that have not voted on this iteration."""
        given = self._meetings[word.lock, word.index, word.occurrence].given
        return tuple(rank for rank in self._ranks if rank not in given)

    def crash(self, rank: int) -> None:
        """Removes a rank: some of its votes do not arrive any more."""
        self._dead.add(rank)

    def close(self) -> None:
        """Checks, after a run without failure, that every rank has voted and every valid vote has an outcome."""
        for key, meeting in self._meetings.items():
            missing = [rank for rank in self._ranks if rank not in meeting.given]
            demand(not missing, f"on {key} ranks {missing} never gave their word")
            valid = {rank for rank, (word, _) in meeting.given.items() if word.bucket is not None}
            demand(valid == meeting.ended.keys(), f"on {key} ranks {valid} wanted to move, {meeting.ended} are told")

    def _inspect(self, rank: int, word: Locked) -> None:
        """Checks that a rank votes once, after the previous iteration completed there, never after an invalid vote."""
        line = (rank, word.lock, word.index)
        before = self._last.get(line)
        demand(before is None or before.bucket is not None, f"rank {rank} gives {word} after an invalid word")
        number = before.occurrence + 1 if before is not None else 1
        demand(word.occurrence == number, f"rank {rank} gives its word on {word.occurrence} in place of {number}")
        if before is not None:
            landed = rank in self._meetings[word.lock, word.index, before.occurrence].landed
            demand(landed, f"rank {rank} gives {word}, but the occurrence before has not landed there")
        self._last[line] = word

    def _arrive(self, meeting: _Meeting, sender: int, receiver: int) -> None:
        if sender in self._dead and self._rng.randrange(2):
            return
        meeting.heard.setdefault(receiver, set()).add(sender)
        self._conclude(meeting, receiver)

    def _conclude(self, meeting: _Meeting, rank: int) -> None:
        """Notifies a rank with a valid vote of the outcome, if it can be known."""
        if rank in meeting.ended or rank not in meeting.given or meeting.given[rank][0].bucket is None:
            return
        invalid = any(meeting.given[peer][0].bucket is None for peer in meeting.heard[rank])
        if len(meeting.heard[rank]) < len(self._ranks) and not (invalid and self._hasty):
            return
        meeting.ended[rank] = not invalid
        if invalid:
            word, told = meeting.given[rank]
            self.refused += 1
            told(word, False)
        elif len(meeting.ended) == len(self._ranks):
            self._move(meeting)

    def _move(self, meeting: _Meeting) -> None:
        demand(all(meeting.ended.values()), f"ranks disagree on what {meeting.given} comes to")
        self.locked += 1

        def land(rank: int) -> None:
            if self._dead.isdisjoint(self._ranks) or self._rng.randrange(2):
                meeting.landed.add(rank)
                word, told = meeting.given[rank]
                told(word, True)

        slow = self._slow if self._slow is not None and self._slow.random() < _SLOW else None
        for rank in self._ranks:
            bucket = meeting.given[rank][0].bucket
            made = submissions(bucket) if bucket is not None else []
            self._exchange.move(made)
            for one in made:
                demand(not one.turn.absent, f"{one!r} moves under a lock, without {set(one.turn.absent)}")
                self._ledger.agree(one.turn)
            late = 0.0 if slow is None else slow.expovariate(1 / _SLOW_MEAN)
            self._agenda.after(late + self._rng.expovariate(1 / _MEAN), partial(land, rank))
