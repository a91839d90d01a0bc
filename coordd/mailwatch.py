"""Ends sends and receives whose other end takes no part any more: it has left, or waits for this rank."""

from __future__ import annotations

import logging
from collections.abc import Callable

from coordd.blocked import Awaited, BlockWatch
from coordd.mailbox import Mailbox
from coordd.member import Member
from coordd.messages import Blocked, Expecting, Message, Plan
from coordd.table import Promise

__all__ = ["MailWatch", "fail"]

log = logging.getLogger("coordd")

_SECONDS = 1.0


class MailWatch:
    """Watches over the mailbox of a rank."""

    def __init__(self, mailbox: Mailbox, member: Member, tell: Callable[[Message], None]) -> None:
        """Starts with nothing asked.

        Args:
            mailbox: the sends and receives.
            member: this rank's side of the protocol.
            tell: sends to the coordinator.
        """
        self._mailbox = mailbox
        self._member = member
        self._tell = tell
        self._due = 0.0
        self._asked: set[int] = set()
        self._told = Blocked()

    def look(self, now: float) -> None:
        """Asks to hear of ranks that leave, once messages to or from them have been under way for a while."""
        if not self._mailbox or now < self._due:
            return
        self._due = now + _SECONDS
        old = {letter.peer for letter in self._mailbox.letters if letter.handle.submitted < now - _SECONDS}
        if unknown := old - self._asked:
            self._asked |= unknown
            self._tell(Expecting(tuple(sorted(unknown))))

    def remaining(self, now: float) -> float | None:
        """Seconds until `look` has something to do; None if that is not in sight."""
        unknown = any(letter.peer not in self._asked for letter in self._mailbox.letters)
        return self._due - now if unknown else None

    def tell_blocked(self, awaits: Awaited, *, again: bool) -> None:
        """Tells the coordinator for what the script waits, and which messages may be under way.

        Args:
            awaits: the operation; without a name it does not wait.
            again: it has been told that before, so only numbers may be new.
        """
        heard = self._mailbox.heard(awaits.sender) if awaits.sender >= 0 else 0
        sent = tuple((self._member.rank, *pair) for pair in self._mailbox.sent) if awaits.name else ()
        blocked = Blocked(awaits.name, self._member.seen, sender=awaits.sender, heard=heard, sent=sent)
        if not again or (blocked.wait, sent) != (self._told.wait, self._told.sent):
            self._told = blocked
            self._tell(blocked)

    def follow(self, plan: Plan, blocks: BlockWatch, now: float) -> None:
        """Fails what a plan says that will not be sent or received."""
        for left in plan.left:
            self._mailbox.note_left(left)
            blocks.note_mail(now)
        for unsent in plan.unsent:
            if unsent.rank == self._member.rank:
                blocks.note_news(now)
                for letter in self._mailbox.give_up(unsent.sender, unsent.name):
                    fail(letter.handle, self._member.deadlocks.error(unsent, plan.sequence))


def fail(handle: Promise, error: BaseException) -> None:
    """Fails an operation; what a plugin's handle raises then must not keep the next one from hearing of it."""
    try:
        handle.fail(error)
    except BaseException:
        log.exception("the handle of %r has failed", handle.name)
