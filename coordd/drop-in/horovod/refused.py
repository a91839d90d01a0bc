"""Names of Horovod's that coordd refuses: they can be imported, and say what to do instead as soon as they are used."""

from __future__ import annotations

from typing import Any, Never

__all__ = ["SAME_RANKS", "Refused", "refusal"]

SAME_RANKS = (
    "the ranks of a job stay the same here; save a checkpoint every epoch, and start the job anew when it has failed "
    "(docs/migrating-from-horovod.md shows how)"
)
"""Why elastic jobs are refused."""


class Refused:
    """Stands where Horovod has a function, a decorator or a class to derive from."""

    def __init__(self, name: str, why: str) -> None:
        self.__name__ = name
        self.why = why

    def __call__(self, *_: Any, **__: Any) -> Never:
        """Raises the sentence.

        Raises:
            NotImplementedError: always.
        """
        text = f"{self.__name__} is refused: {self.why}"
        raise NotImplementedError(text)

    __mro_entries__ = __call__


def refusal(package: str, why: str) -> ImportError:
    """Composes the error of a package that is not there at all."""
    return ImportError(f"{package} is refused: {why}", name=package)
