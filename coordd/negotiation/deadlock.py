"""Deadlock detection: ranks that wait for each other, so that none will submit an operation that others need. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from coordd.errors import MismatchError, ranks_text
from coordd.negotiation.group_names import covers
from coordd.negotiation.wire import bits, mask
from coordd.ops.messages import Blocked, Plan, Request, Response, Unmatched, Waiting

__all__ = [
    "BlockedRanks",
    "BlockedSums",
    "Heard",
    "HeardDeadlocks",
    "Wait",
    "deadlock_text",
    "deadlocked",
    "members_of",
]

RECEIVE, SEND = "recv", "send"
_MATCHED = {RECEIVE: "sent", SEND: "received"}
"""What the other rank of such an operation has not done."""
_SHOWN = 6
"""Most waits that an error lists."""


class Wait(NamedTuple):
    """Ranks that wait for one operation, and the ranks that have not submitted it; both are bit masks.

    A send has its ``number`` among the sends to the same rank.
    """

    ranks: int
    missing: int
    waiting: Waiting
    number: int = 0


class BlockedRanks:
    """The ranks whose scripts are blocked, as bit masks, by the operation that they wait for.

    A deadlock can only arise when a rank blocks, when an announcement of a blocked rank is counted, or when a join
    fails. So detection runs only after these events.
    """

    def __init__(self) -> None:
        self._ranks: dict[Blocked, int] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._unclaimed: set[tuple[int, int, int]] = set()
        self._all = 0
        self._changed = False
        self._since = 0

    def enter(self, ranks: int, blocked: Blocked) -> None:
        """Records the operation that the scripts of ``ranks``, a mask, wait for; without a name they no longer wait."""
        if self._all & ranks:
            left = {other: there & ~ranks for other, there in self._ranks.items()}
            self._ranks = {other: there for other, there in left.items() if there}
            self._all &= ~ranks
        if blocked.name and blocked.seen >= self._since:
            self._ranks[blocked.wait] = self._ranks.get(blocked.wait, 0) | ranks
            self._sent |= {(rank, receiver): count for rank, receiver, count in blocked.sent}
            self._unclaimed = {each for each in self._unclaimed if not ranks >> each[0] & 1} | {*blocked.unclaimed}
            self._all |= ranks
            self._changed = True

    def stir(self, ranks: int = -1) -> None:
        """Notes that ranks have announced something, or that other ranks may have to wait for them again."""
        if self._all & ranks:
            self._changed = True

    def forget(self, sequence: int) -> None:
        """Notes that this plan withdraws announcements: ranks have to report again that they are blocked."""
        self._ranks.clear()
        self._all = 0
        self._since = sequence

    def take(self) -> dict[Blocked, int]:
        """Returns the blocked ranks if detection must run; empty if nothing has changed since the last call."""
        changed, self._changed = self._changed, False
        several = self._all & (self._all - 1) or any(blocked.peer >= 0 for blocked in self._ranks)
        return dict(self._ranks) if changed and several else {}

    def messages(self, blocked: Mapping[Blocked, int]) -> Iterator[Wait]:
        """Yields the sends and receives among the blocked operations that will wait as long as their peers do.

        A receiver has received as many messages as the sender had sent when the sender began to wait: so none is in
        flight. The sender has sent none since: otherwise it would no longer wait for the reported operation, and the
        ranks that it waits for would have had to continue first. A sent message has arrived at a rank that has no
        receive for it, and will have none before it continues.
        """
        for each, ranks in blocked.items():
            for rank in bits(ranks) if each.peer >= 0 and self._all >> each.peer & 1 else ():
                if each.number:
                    waits = (each.peer, rank, each.number) in self._unclaimed
                else:
                    waits = self._sent.get((each.peer, rank), 0) == each.heard
                if waits:
                    word = SEND if each.number else RECEIVE
                    yield Wait(1 << rank, 1 << each.peer, Waiting(each.name, word, (each.peer,)), each.number)


class BlockedSums:
    """Sums of the blocked reports of the ranks below an aggregator of the tree, by operation."""

    def __init__(self) -> None:
        self._ranks: dict[Blocked, int] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._unclaimed: set[tuple[int, int, int]] = set()
        self._freed = 0
        self._since = 0

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def hear(self, ranks: int, blocked: Blocked) -> None:
        """Adds a report that holds for some ranks; reports from before a lock no longer count."""
        left = {name: there & ~ranks for name, there in self._ranks.items()}
        self._ranks = {name: there for name, there in left.items() if there}
        if not blocked.name:
            self._freed |= ranks
        elif blocked.seen >= self._since:
            self._ranks[blocked.wait] = self._ranks.get(blocked.wait, 0) | ranks
            self._sent |= {(rank, receiver): count for rank, receiver, count in blocked.sent}
            self._unclaimed = {each for each in self._unclaimed if not ranks >> each[0] & 1} | {*blocked.unclaimed}

    def follow(self, plan: Plan) -> None:
        """Clears the sums at a plan that locks: the ranks will report again that they are blocked."""
        if plan.lock:
            self._since = plan.sequence
            self._ranks.clear()

    def freed(self) -> list[Blocked]:
        """Returns a report of the ranks that are no longer blocked, once."""
        freed, self._freed = self._freed, 0
        return [Blocked(ranks=mask(freed))] if freed else []

    def told(self) -> list[Blocked]:
        """Returns reports of the blocked ranks, once."""
        told = []
        for wait, there in self._ranks.items():
            sent = tuple((*pair, count) for pair, count in self._sent.items() if there >> pair[0] & 1)
            unclaimed = tuple(sorted(each for each in self._unclaimed if there >> each[0] & 1))
            about = {"seen": self._since, "ranks": mask(there), "sent": sent, "unclaimed": unclaimed}
            told.append(msgspec.structs.replace(wait, **about))
        self._ranks, self._sent, self._unclaimed = {}, {}, set()
        return told


class Heard(NamedTuple):
    """Notification of the script about the deadlock that a plan has ended."""

    plan: int


class HeardDeadlocks:
    """The deadlocks that this rank's script was notified of: by process set, the last plan that ended one.

    Until the script is notified, by the error of an operation of its own, its submissions belong to the failed
    operations.

    Attributes:
        missed: by plan, and by name and process set, the failed operations that this rank had not submitted, until the
            script is notified of that deadlock.
        later: takes a notification, and calls `settle` after everything that was submitted before.
        unsettled: the plans that ended a deadlock with an error for this rank, of which the script was not notified;
            for the thread of the daemon only.
    """

    def __init__(self) -> None:
        self._unheard: dict[int, dict[tuple[int, ...], int]] = {}  # by plan, the entries that `_heard` will get
        self._heard: dict[tuple[int, ...], int] = {}
        self.missed: dict[int, dict[tuple[str, tuple[int, ...]], Response]] = {}
        self.later: Callable[[Heard], None] = self.settle
        self.unsettled: set[int] = set()

    def note(self, rank: int, plan: Plan) -> None:
        """Records the operations and process sets that deadlocks failed, if this rank had submitted any of them."""
        concerned = {response.deadlock for response in plan.responses if rank in response.recipients}
        concerned |= {plan.sequence for each in plan.unmatched if each.rank == rank}
        self.unsettled |= concerned & {plan.sequence}
        for number in concerned - {-1}:
            failed = [response for response in plan.responses if response.deadlock == number]
            sets = {response.request.members: number for response in failed}
            self._unheard.setdefault(number, {}).update(sets)
            missed = self.missed.setdefault(number, {})
            for response in failed:
                request = response.request
                if rank in response.recipients:
                    missed.pop((request.name, request.members), None)
                elif number == plan.sequence and (not request.members or rank in request.members):
                    missed[request.name, request.members] = response
            if not missed:
                del self.missed[number]

    def claim(self, request: Request) -> Response | None:
        """Removes and returns the failure that an operation submitted here belongs to; None if there is none."""
        key = (request.name, request.members)
        return next((missed for missed in self.missed.values() if key in missed), {}).pop(key, None)

    def claim_refused(self, said: str, members: tuple[int, ...]) -> bool:
        """Removes the failures that an operation or group rejected here belongs to; returns whether there were any.

        Args:
            said: name of the operation or group in the rejection.
            members: of its process set.
        """
        keys = {key for missed in self.missed.values() for key in missed if key[1] == members and covers(said, key[0])}
        for missed in self.missed.values():
            for key in keys & missed.keys():
                del missed[key]
        return bool(keys)

    def error(self, unmatched: Unmatched, plan: int) -> MismatchError:
        """Returns the error of a send or receive that a plan fails."""
        error = MismatchError.told(unmatched.name, "order", unmatched.error)
        error.when_heard = functools.partial(self.hear, plan)
        return error

    def hear(self, plan: int) -> None:
        """Notes that the script was notified of the deadlock that a plan ended, or of a later one; on any thread.

        With that, it has also given up what failed in earlier deadlocks, whether it asked for their errors or not.
        """
        for number in [number for number in list(self._unheard) if number <= plan]:
            for members in list(self._unheard.pop(number, {})):
                self._heard[members] = max(number, self.last(members))
        self.later(Heard(plan))

    def settle(self, heard: Heard) -> None:
        """Notes that everything submitted from now on was submitted after the notification."""
        self.missed = {plan: failed for plan, failed in self.missed.items() if plan > heard.plan}
        self.unsettled = {plan for plan in self.unsettled if plan > heard.plan}

    def forget(self, joined: tuple[int, ...]) -> None:
        """Drops the deadlocks of process sets whose members have all joined: ranks that joined early know of none."""
        for known in (self._heard, *list(self._unheard.values())):
            for members in list(known):  # the script may be notified of another one meanwhile
                if _within(members, joined):
                    known.pop(members, None)
        if not joined:
            self.unsettled.clear()
        self.missed = {
            number: {key: response for key, response in missed.items() if not _within(key[1], joined)}
            for number, missed in self.missed.items()
        }

    def last(self, members: tuple[int, ...]) -> int:
        """Returns the last plan that ended a deadlock that the script was notified of; -1 if there was none."""
        return self._heard.get(members, -1)


def _within(members: tuple[int, ...], joined: tuple[int, ...]) -> bool:
    """Returns whether a process set is part of another one; () is the world."""
    return not joined or (bool(members) and {*members} <= {*joined})


def deadlocked(waits: Iterable[Wait]) -> list[Wait]:
    """Returns the waits that never end: waits for each other, or for ranks that wait so.

    Repeatedly removes the waits for ranks that no longer wait themselves.
    """
    left = list(waits)
    while True:
        ranks = members_of(left)
        rest = [wait for wait in left if wait.missing & ranks]
        if len(rest) == len(left):
            return sorted(rest, key=lambda wait: (wait.ranks & -wait.ranks, wait.waiting.name))
        left = rest


def members_of(waits: Iterable[Wait]) -> int:
    """Returns all waiting ranks, as a bit mask."""
    found = 0
    for wait in waits:
        found |= wait.ranks
    return found


def deadlock_text(waits: Sequence[Wait]) -> str:
    """Describes which ranks wait for which, and what to do."""
    told = [
        f"{ranks_text(tuple(bits(ranks)))} for {waiting.name!r} ({waiting.operation}), "
        f"not {_MATCHED.get(waiting.operation, 'submitted')} by {ranks_text(waiting.missing)}"
        for ranks, _, waiting, _ in waits
    ]
    rest = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return (
        f"ranks wait for each other: {'; '.join(told[:_SHOWN])}{rest}; "
        f"let all ranks submit the same operations, among the same ranks{_advice(waits)}"
    )


def _advice(waits: Sequence[Wait]) -> str:
    """Returns further advice, depending on the awaited operations."""
    calls = {waiting.name.partition(" #")[0]: None for _, _, waiting, _ in waits if " #" in waiting.name}
    advice = "".join(f"; all ranks call {call}() together, after equally many steps" for call in calls)
    if any(waiting.operation in _MATCHED for _, _, waiting, _ in waits):
        advice += (
            "; a send() and its recv() have one name, and two ranks that send to each other do so by send_async(), or "
            "one of them receives first"
        )
    return advice
