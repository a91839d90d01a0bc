"""Ends sends and receives whose other rank takes no part any more: it has left, or waits for this rank."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from coordd.daemon.blocked_script import Awaited, BlockWatch, Mail
from coordd.daemon.peer_to_peer import Mailbox
from coordd.negotiation.tensor_table import Promise
from coordd.negotiation.worker import Member
from coordd.ops.messages import Blocked, Expecting, Message, Plan

__all__ = ["MailWatch", "describe", "fail", "same"]

log = logging.getLogger("coordd")

_SECONDS = 1.0
_FIRST_PAUSE, _PAUSE_WITH_MAIL = 0.005, 0.05


class MailWatch:
    """Watches over the mailbox of a rank.

    Attributes:
        leaving: whether the script has left.
    """

    def __init__(self, mailbox: Mailbox, member: Member, tell: Callable[[Message], None], *, far: bool) -> None:
        """Starts with nothing asked.

        Args:
            mailbox: the sends and receives.
            member: this rank's side of the protocol.
            tell: sends to the coordinator.
            far: whether there are ranks whose messages arrive only if this rank polls.
        """
        self.leaving = False
        self._far = far
        self._peek_due: float | None = None
        self._traffic = 0
        self._pause = _FIRST_PAUSE
        self._serve_due: float | None = None
        self._mailbox = mailbox
        self._member = member
        self._tell = tell
        self._due = 0.0
        self._asked: set[int] = set()
        self._told = Blocked()

    def look(self, blocks: BlockWatch, now: float) -> None:
        """Runs the checks that are due."""
        if now >= self._due and self._mailbox:
            self._ask(now)
        if self._far:
            self._peek(blocks, now)
        if self._traffic != self._mailbox.lane_messages or (self._serve_due is not None and now >= self._serve_due):
            self._serve(blocks, now)

    def _ask(self, now: float) -> None:
        """Asks to be notified of ranks that leave, once messages to or from them have been in flight for a while."""
        self._due = now + _SECONDS
        old = {letter.peer for letter in self._mailbox.letters if letter.handle.submitted < now - _SECONDS}
        if unknown := old - self._asked:
            self._asked |= unknown
            self._tell(Expecting(tuple(sorted(unknown))))

    def _peek(self, blocks: BlockWatch, now: float) -> None:
        """Takes in headers from other hosts now and then, while the script is blocked or has left and receives none."""
        if not (blocks.told or self.leaving):
            self._peek_due = None
        elif self._peek_due is None or now >= self._peek_due:
            self._peek_due = now + _SECONDS
            if self._mailbox.peek():
                blocks.note_mail(now)

    def _serve(self, blocks: BlockWatch, now: float) -> None:
        """Calls MPI after messages have moved: only within calls it frees what senders need, and takes in new messages.

        A sender may wait for that although its message has been received, or is not wanted yet.
        """
        if self._traffic != self._mailbox.lane_messages:
            self._traffic, self._pause = self._mailbox.lane_messages, _FIRST_PAUSE
        else:
            if self._mailbox.peek():
                blocks.note_mail(now)
            self._pause = min(2 * self._pause, _PAUSE_WITH_MAIL if self._mailbox.has_unclaimed else _SECONDS)
        self._serve_due = now + self._pause

    def remaining(self, now: float) -> float | None:
        """Seconds until `look` has something to do; None if nothing is scheduled."""
        unknown = any(letter.peer not in self._asked for letter in self._mailbox.letters)
        due = [each for each in (self._due if unknown else None, self._peek_due, self._serve_due) if each is not None]
        return min(due) - now if due else None

    def tell_blocked(self, awaits: Awaited, *, again: bool) -> None:
        """Reports to the coordinator for which operation the script waits, and which messages may be in flight.

        Args:
            awaits: the operation; without a name the script does not wait.
            again: it has been reported before, so only numbers may be new.
        """
        blocked = describe(awaits, self._member, self._mailbox)
        if not again or not same(blocked, self._told):
            self._told = blocked
            self._tell(blocked)

    def follow(self, plan: Plan, blocks: BlockWatch, now: float) -> None:
        """Fails the sends and receives that a plan ends, and drops their messages."""
        for left in plan.left:
            self._mailbox.note_left(left)
            blocks.note_mail(now)
        for each in plan.unmatched:
            error = self._member.deadlocks.error(each, plan.sequence)
            if each.rank == self._member.rank:
                blocks.note_news(now)
                if each.number:
                    self._mailbox.withdraw(each.peer, each.number, error)
                for letter in self._mailbox.give_up(each.peer, each.name) if not each.number else ():
                    fail(letter.handle, error)
            if each.peer == self._member.rank and each.number:
                self._mailbox.drop(each.rank, each.number)
        if plan.unmatched:
            self._mailbox.note_failed(plan.sequence)


def describe(awaits: Awaited, member: Member, mail: Mail) -> Blocked:
    """Builds the report of the operation that a script waits for, and of messages that may be in flight.

    Without a name the script does not wait.
    """
    name, peer, number, _ = awaits
    if not name:
        return Blocked(seen=member.seen)
    return Blocked(
        name,
        member.seen,
        peer=peer,
        number=number,
        heard=mail.heard(peer) if peer >= 0 and not number else 0,
        sent=tuple((member.rank, *pair) for pair in mail.sent),
        unclaimed=tuple((member.rank, *pair) for pair in mail.unclaimed),
    )


def same(one: Blocked, other: Blocked) -> bool:
    """Whether two such messages are equal, apart from the plan that was seen."""
    return msgspec.structs.replace(one, seen=other.seen) == other


def fail(handle: Promise, error: BaseException) -> None:
    """Fails an operation; an error that a plugin's handle raises must not keep the next one from being notified."""
    try:
        handle.fail(error)
    except BaseException:
        log.exception("the handle of %r has failed", handle.name)
