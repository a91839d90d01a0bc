"""Start-up in step: ranks exchange values, and the next exchange passes an error of one rank to all.

All ranks make the same exchanges in the same order. So a rank that cannot continue takes part in one more, with its
error instead of a value, and each rank knows at once that, and why, none of them will start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from coordd.errors import PeerError, brief

__all__ = ["Bootstrap"]

log = logging.getLogger("coordd")


class Bootstrap:
    """The exchanges of one rank.

    Attributes:
        in_step: whether all ranks have made the same exchanges, so that the next call may be collective.
    """

    def __init__(self, gather: Callable[[Any], list[Any]] = lambda value: [value]) -> None:
        """Takes a transport's ``gather``; by default this rank is alone."""
        self._gather = gather
        self._told = False
        self.in_step = True

    def gather(self, value: Any) -> list[Any]:
        """Exchanges one small picklable value with all ranks; blocks.

        Raises:
            PeerError: another rank cannot start; the text has its error.
        """
        found = self._exchange((value, ""))
        failed = [(rank, why) for rank, (_, why) in enumerate(found) if why]
        if failed:
            self._told = True
            rank, why = failed[0]
            raise PeerError(rank, f"could not start: {why}")
        return [value for value, _ in found]

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Sends an exception of this block to the other ranks, unless they know it already; then re-raises it."""
        try:
            yield
        except BaseException as error:
            if self.in_step and not self._told:
                self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """Sends to the other ranks, at their next exchange, the reason why none of them will start."""
        self._told = True
        try:
            self._exchange((None, brief(error)))
        except Exception:
            log.exception("the other ranks could not be told why this one cannot start")

    def _exchange(self, said: tuple[Any, str]) -> list[Any]:
        self.in_step = False  # until all have taken part
        found = self._gather(said)
        self.in_step = True
        return found
