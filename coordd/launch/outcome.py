"""How one rank's command ended."""

from __future__ import annotations

import signal
from typing import NamedTuple

__all__ = ["Outcome", "signal_name"]


class Outcome(NamedTuple):
    """The end of one rank's command.

    Attributes:
        code: exit code; 0 if it was ended by a signal.
        signal: number of the signal that ended it, or 0.
        told: it was asked to stop first, so that its end says nothing about the cause.
        consequence: it failed because another rank had failed.
        exception: the line that names the exception it ended with, or nothing.
        last: the last line it wrote to standard error, or nothing.
        left: it ended with exit code 0 between `init` and `shutdown`, as `os._exit(0)` does, so that ranks which still
            need it fail.
    """

    code: int = 0
    signal: int = 0
    told: bool = False
    consequence: bool = False
    exception: str = ""
    last: str = ""
    left: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended in any way but with exit code 0."""
        return bool(self.code or self.signal)

    @property
    def status(self) -> int:
        """The exit code as a shell gives it: 128 + signal for signals."""
        return 128 + self.signal if self.signal else self.code

    @property
    def text(self) -> str:
        """What happened, as the end of a sentence that begins with the rank."""
        if self.exception:
            return f"{self.how}: {self.exception}"
        return f"{self.how}; it said last: {self.last}" if self.last and not self.signal else self.how

    @property
    def how(self) -> str:
        """The exit code or signal, in words."""
        return f"ended by {signal_name(self.signal)}" if self.signal else f"exited with code {self.code}"


def signal_name(number: int) -> str:
    """Names a signal, such as ``SIGKILL``; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
