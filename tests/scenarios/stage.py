"""Plays a scenario: commands in, lines out.

A scenario is a file of blocks; a block is some commands, a line ``----``, and what they show. The commands are the
methods of `Stage`; ranks are written as ``0``, ``0,2`` or ``all``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordd.errors import PeerError
from coordd.negotiation.channel import LOST
from coordd.ops.handles import Handle
from coordd.ops.messages import (
    Abort,
    Account,
    Blocked,
    Failure,
    Kind,
    Message,
    Overdue,
    ReduceOp,
    Refused,
    Report,
    Request,
)
from tests.scenarios.words import bucket_words, locked_words, message_words, report_words
from tests.star import Star, outcome

__all__ = ["play"]

_RULE = "----"


def play(path: Path) -> str:
    """Returns the file as it should be: its own commands with what they show."""
    stage, blocks = Stage(), []
    for block in path.read_text("utf-8").strip().split("\n\n"):
        commands = block.split(f"\n{_RULE}")[0]
        shown = [line for command in commands.splitlines() for line in stage.do(command)]
        told = "\n".join([commands, _RULE, *shown]) if stage.spoke(commands) else commands
        blocks.append(told)
    return "\n\n".join(blocks) + "\n"


class Stage:
    """The ranks of a scenario."""

    def __init__(self) -> None:
        self._star = Star(1)
        self._open: list[tuple[int, Handle[Any]]] = []

    @staticmethod
    def spoke(commands: str) -> bool:
        """Says whether a block is more than comments."""
        return any(line and not line.startswith("#") for line in commands.splitlines())

    def do(self, command: str) -> Iterator[str]:
        """Carries out one line."""
        word, *arguments = command.split()
        if word.startswith("#"):
            return
        plain = [argument for argument in arguments if "=" not in argument]
        named = dict(argument.split("=") for argument in arguments if "=" in argument)
        yield from getattr(self, word)(*plain, **named)
        yield from self._news()
        yield from self._ended()

    def world(self, size: str, **details: str) -> Iterator[str]:
        """``world 2 cache=1 fusion=16 abort_seconds=10``: starts over."""
        self._star = Star(int(size), **{name: int(value) for name, value in details.items()})
        yield from ()

    def submit(self, ranks: str, name: str, *flags: str, line: str = "1", **details: str) -> Iterator[str]:
        """``submit 0,1 w shape=2x3 kind=broadcast root=0 members=0,1 line=31 filler once``."""
        request = _request(name, transient="once" in flags, **details)
        for rank in self._ranks(ranks):
            handle = self._star.submit(rank, request, line=int(line), filler="filler" in flags)
            self._open.append((rank, handle))
        yield from ()

    def report(self, ranks: str) -> Iterator[str]:
        """Has ranks say what is new; it stays on its way until it is heard."""
        for rank in self._ranks(ranks):
            report = self._star.report(rank)
            if report is None:
                yield f"{rank} says, {report_words(None)}"
            yield from self._news()

    def hear(self, ranks: str) -> Iterator[str]:
        """Lets what ranks have said arrive."""
        for rank in self._ranks(ranks):
            self._star.hear(rank)
        yield from ()

    def turn(self) -> Iterator[str]:
        """Has the coordinator speak."""
        said: dict[Message, list[int]] = {}
        before = [len(queue) for queue in self._star.down]
        self._star.turn()
        for rank, queue in enumerate(self._star.down):
            for message in list(queue)[before[rank] :]:
                said.setdefault(message, []).append(rank)
        for message, ranks in said.items():
            first, *rest = message_words(message)
            yield ("" if len(ranks) == len(self._star.ranks) else f"to {','.join(map(str, ranks))}: ") + first
            yield from rest

    def follow(self, ranks: str) -> Iterator[str]:
        """Lets what the coordinator has said arrive at ranks."""
        for rank in self._ranks(ranks):
            failure = next((message.failure for message in self._star.down[rank] if isinstance(message, Abort)), None)
            for bucket in self._star.follow(rank):
                yield f"{rank} starts {bucket_words(bucket)}"
            if failure is not None:
                for entry in self._star.members[rank].table.clear():
                    entry.handle.fail(PeerError(failure.rank, failure.reason))

    def land(self, ranks: str) -> Iterator[str]:
        """Lets the data of what ranks have started arrive."""
        for rank in self._ranks(ranks):
            self._star.land(rank)
        yield from ()

    def hurry(self, ranks: str) -> Iterator[str]:
        """Has somebody wait on ranks."""
        for rank in self._ranks(ranks):
            self._star.wait(rank)
        yield from ()

    def unlock(self, ranks: str) -> Iterator[str]:
        """Has ranks break the lock, as after a stall."""
        for rank in self._ranks(ranks):
            self._star.unlock(rank)
        yield from ()

    def meet(self, ranks: str) -> Iterator[str]:
        """Tells ranks what has become of their words on which all have given theirs."""
        for rank in self._ranks(ranks):
            for locked in self._star.meet(rank):
                said = self._star.words[locked.lock, locked.index, locked.occurrence]
                how = "lands" if all(word.bucket for word in said.values()) else "is refused"
                yield f"{rank}: {locked_words(locked)} {how}"
            yield from self._news()

    def settle(self) -> Iterator[str]:
        """All ranks report, are heard, follow and land."""
        yield from self.report("all")
        yield from self.hear("all")
        yield from self.turn()
        yield from self.follow("all")
        yield from self.land("all")

    def leave(self, ranks: str) -> Iterator[str]:
        """Has ranks say goodbye."""
        for rank in self._ranks(ranks):
            self._star.leave(rank)
        yield from ()

    def lose(self, rank: str) -> Iterator[str]:
        """Closes a rank's connection."""
        self._star.coordinator.hear(int(rank), LOST, now=self._star.now)
        yield from ()

    def fail(self, rank: str, *reason: str) -> Iterator[str]:
        """``fail 1 raised ValueError``."""
        self._star.coordinator.hear(int(rank), Abort(Failure(int(rank), " ".join(reason))), now=self._star.now)
        yield from ()

    def complain(self, rank: str, *names: str, seconds: str = "5") -> Iterator[str]:
        """Has a rank ask why these tensors of its own take so long."""
        self._star.coordinator.hear(int(rank), Overdue(float(seconds), names), now=self._star.now)
        yield from ()

    def refuse(self, rank: str, call: str, *reason: str, members: str = "") -> Iterator[str]:
        """``refuse 1 7 refused Thing: ValueError: bad members=0,1``: has a rank leave a collective call by an error."""
        ranks = tuple(int(each) for each in members.split(",")) if members else ()
        self._star.coordinator.hear(int(rank), Refused(int(rank), call, " ".join(reason), ranks), now=self._star.now)
        yield from ()

    def block(self, ranks: str, name: str = "", seen: str = "99") -> Iterator[str]:
        """Has the scripts of ranks wait for an operation; without a name, go on."""
        for rank in self._ranks(ranks):
            self._star.coordinator.hear(rank, Blocked(name, int(seen)), now=self._star.now)
        yield from ()

    def answer(self, rank: str, *doing: str) -> Iterator[str]:
        """Has a rank say what it is doing."""
        account = Account(int(rank), " ".join(doing), "nothing yet")
        self._star.coordinator.hear(int(rank), account, now=self._star.now)
        yield from ()

    def wait(self, seconds: str) -> Iterator[str]:
        """Lets time pass."""
        self._star.now += float(seconds)
        yield from ()

    def _ranks(self, text: str) -> list[int]:
        return [*self._star.ranks] if text == "all" else [int(rank) for rank in text.split(",")]

    def _news(self) -> Iterator[str]:
        """What ranks have said and given their word on by the last command."""
        news, self._star.news = self._star.news, []
        for rank, told in news:
            if isinstance(told, Report):
                yield f"{rank} says, {report_words(told)}"
            else:
                word = " ".join(entry.request.name for entry in told.bucket.entries) if told.bucket else "invalid"
                yield f"{rank} gives its word on {locked_words(told)}: {word}"

    def _ended(self) -> Iterator[str]:
        """What has ended by the last command, alike outcomes in one line."""
        ended: dict[tuple[str, str], list[int]] = {}
        for rank, handle in self._open:
            if handle.poll():
                ended.setdefault((handle.name, outcome(handle)), []).append(rank)
        self._open = [(rank, handle) for rank, handle in self._open if not handle.poll()]
        for (name, how), ranks in ended.items():
            yield f"{','.join(map(str, sorted(ranks)))}: {name} {how.replace('train.py:', '')}"


def _request(name: str, *, transient: bool, **details: str) -> Request:
    shape = details.get("shape", "2")
    return Request(
        Kind[details.get("kind", "allreduce").upper()],
        name,
        details.get("dtype", "float32"),
        tuple(int(length) for length in shape.split("x")) if shape != "scalar" else (),
        ReduceOp[details.get("op", "sum").upper()],
        int(details.get("root", "-1")),
        float(details.get("prescale", "1")),
        members=tuple(int(rank) for rank in details["members"].split(",")) if "members" in details else (),
        transient=transient,
        call=details.get("call", ""),
    )
