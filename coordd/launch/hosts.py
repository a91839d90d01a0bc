"""The hosts of a job, and the number of ranks on each.

One rule: a host name reaches the command lines of the MPI launcher and of ssh, so its syntax is checked; a name that
begins with ``-`` would be parsed as an option.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from coordd.errors import ConfigError

__all__ = ["Host", "place_ranks", "read_hostfile", "read_hosts"]

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_SLOTS = re.compile(r"[0-9]{1,6}")
_LEGAL = "host or host:slots, where slots is a whole number from 1"
_FILE_LEGAL = "one host a line, as 'name slots=4', 'name:4' or 'name'"


@dataclass(frozen=True)
class Host:
    """A host and its number of slots (ranks)."""

    name: str
    slots: int = 1

    @classmethod
    def parse(cls, text: str, *, source: str, legal: str = _LEGAL) -> Self:
        """Parses ``name`` or ``name:slots``.

        Raises:
            ConfigError: the text has another form; the message names ``source`` and ``legal``.
        """
        name, colon, slots = text.strip().partition(":")
        slots = slots if colon else "1"
        if not (_NAME.fullmatch(name) and _SLOTS.fullmatch(slots) and int(slots)):
            raise ConfigError.illegal(source, text, legal)
        return cls(name, int(slots))

    @property
    def is_here(self) -> bool:
        """Whether the name certainly means this host: ``localhost``, ``127.0.0.1``, or the full or short node name."""
        own = os.uname().nodename
        return self.name in {"localhost", "127.0.0.1", own, own.partition(".")[0]}

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def read_hosts(text: str, *, source: str = "--hosts") -> tuple[Host, ...]:
    """Parses ``a:4,b:4``; the slots of a host that is named twice are added.

    Raises:
        ConfigError: the text names no host, or a host has another form.
    """
    return _merged(Host.parse(word, source=source) for word in text.split(","))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Reads a hostfile in the format of Open MPI (``a slots=4``) or MPICH (``a:4``); ``#`` begins a comment.

    Raises:
        ConfigError: the file cannot be read, names no host, or has a line in another format.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.illegal("--hostfile", str(path), f"a readable text file ({error})") from error
    hosts = _merged(
        Host.parse(_colon(words), source=f"{path}:{number}", legal=_FILE_LEGAL)
        for number, line in enumerate(lines, 1)
        if (words := line.partition("#")[0].split())
    )
    if not hosts:
        raise ConfigError.illegal("--hostfile", str(path), f"a file that names at least one host: {_FILE_LEGAL}")
    return hosts


def place_ranks(size: int, hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Fills the hosts in order, as MPI launchers do; ``slots`` in the result is the number of ranks on the host.

    Raises:
        ConfigError: there are fewer slots than ranks.
    """
    taken = []
    left = size
    for host in hosts:
        if ranks := min(left, host.slots):
            taken.append(Host(host.name, ranks))
            left -= ranks
    if left:
        raise ConfigError.illegal("-n", size, f"at most {size - left}, or more slots than in {_listed(taken)}")
    return tuple(taken)


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def _colon(words: list[str]) -> str:
    """Converts ``a slots=4`` to ``a:4``; other text stays as it is, and `Host.parse` rejects it if it is invalid."""
    if len(words) == 2 and words[1].startswith("slots="):
        return f"{words[0]}:{words[1].removeprefix('slots=')}"
    return " ".join(words)


def _listed(hosts: Iterable[Host]) -> str:
    return ",".join(map(str, hosts))
