"""How one rank's command ended."""

from __future__ import annotations

import signal
from typing import NamedTuple

__all__ = ["Outcome", "signal_name"]


class Outcome(NamedTuple):
    """The end of one rank's command.

    Attributes:
        code: exit code; 0 if a signal ended the command.
        signal: number of the signal that ended the command, or 0.
        told: the rank had been asked to stop before, so its end is not evidence of the cause.
        consequence: the command failed because another rank had failed.
        exception: the line that names the exception that ended the command, or "".
        last: the last line on standard error, or "".
        left: the command exited with code 0 between `init` and `shutdown`, as `os._exit(0)` does, so that ranks that
            still need it fail.
        absent: the command exited with code 0 and had not called `init`.
        entering: the command ended inside `init`.
    """

    code: int = 0
    signal: int = 0
    told: bool = False
    consequence: bool = False
    exception: str = ""
    last: str = ""
    left: bool = False
    absent: bool = False
    entering: bool = False

    @property
    def failed(self) -> bool:
        """Whether the command did not exit with code 0."""
        return bool(self.code or self.signal)

    @property
    def status(self) -> int:
        """The exit code as a shell gives it: 128 + signal for signals."""
        return 128 + self.signal if self.signal else self.code

    @property
    def text(self) -> str:
        """The outcome as the end of a sentence that begins with the rank."""
        if self.exception:
            return f"{self.how}: {self.exception}"
        return f"{self.how}; it said last: {self.last}" if self.last and not self.signal else self.how

    @property
    def how(self) -> str:
        """The exit code or signal, in words."""
        return f"ended by {signal_name(self.signal)}" if self.signal else f"exited with code {self.code}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as ``SIGKILL``; a real-time signal has none and is named by its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
