"""Where the words on locked buckets meet, and what comes of them: the data plane of a locked plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from coordd.member import Locked
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.exchange import Cargo, Exchange, submissions
from coordd_tools.sim.ledger import Ledger, demand

__all__ = ["Words"]

_MEAN = 2e-4

Key = tuple[int, int, int]
Told = Callable[[Locked, bool], None]


@dataclass
class _Meeting:
    """One occurrence: what each rank has said, what each has heard, who knows how it ends, and who has the result."""

    given: dict[int, tuple[Locked, Told]] = field(default_factory=dict)
    heard: dict[int, set[int]] = field(default_factory=dict)
    ended: dict[int, bool] = field(default_factory=dict)
    landed: set[int] = field(default_factory=set)
    cargoes: list[Cargo] = field(default_factory=list)


class Words:
    """Carries words from every rank to every other, late and in any order; data moves when all have heard all."""

    def __init__(self, agenda: Agenda, rng: Random, ledger: Ledger, exchange: Exchange, *, size: int) -> None:
        self.locked = 0
        self.refused = 0
        self._agenda = agenda
        self._rng = rng
        self._ledger = ledger
        self._exchange = exchange
        self._ranks = range(size)
        self._hasty = rng.randrange(2)
        self._meetings: dict[Key, _Meeting] = {}
        self._last: dict[tuple[int, int, int], Locked | None] = {}
        self._dead: set[int] = set()

    def give(self, rank: int, word: Locked, told: Told) -> None:
        """Gives a rank's word; if it is valid, ``told`` is called with the outcome, after the data has moved."""
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
        """The ranks that have given no word on this occurrence."""
        given = self._meetings[word.lock, word.index, word.occurrence].given
        return tuple(rank for rank in self._ranks if rank not in given)

    def crash(self, rank: int) -> None:
        """Loses a rank: some of what it has said does not arrive any more."""
        self._dead.add(rank)

    def close(self) -> None:
        """Looks back when all is over and nobody has failed: no word was waited for in vain."""
        for key, meeting in self._meetings.items():
            missing = [rank for rank in self._ranks if rank not in meeting.given]
            demand(not missing, f"on {key} ranks {missing} never gave their word")
            valid = {rank for rank, (word, _) in meeting.given.items() if word.bucket is not None}
            demand(valid == meeting.ended.keys(), f"on {key} ranks {valid} wanted to move, {meeting.ended} are told")

    def _inspect(self, rank: int, word: Locked) -> None:
        """A word is given once, after the occurrence before it has landed on this rank; an invalid one is the last."""
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
        """Lets a rank that wants to move know what it can know."""
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

        for rank in self._ranks:
            bucket = meeting.given[rank][0].bucket
            made = submissions(bucket) if bucket is not None else []
            self._exchange.move(made)
            for one in made:
                demand(not one.turn.absent, f"{one!r} moves under a lock, without {set(one.turn.absent)}")
                self._ledger.agree(one.turn)
            self._agenda.after(self._rng.expovariate(1 / _MEAN), partial(land, rank))
