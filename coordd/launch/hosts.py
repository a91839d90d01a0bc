"""The hosts of a job, and how many ranks each takes.

One rule: a host name reaches the command line of an MPI launcher, and through it that of ssh, so it must look like a
host name; one that begins with ``-`` would be read as an option.
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
    """A host and the number of ranks that it takes."""

    name: str
    slots: int = 1

    @classmethod
    def parse(cls, text: str, *, source: str, legal: str = _LEGAL) -> Self:
        """Reads ``name`` or ``name:slots``.

        Raises:
            ConfigError: naming ``source`` and what is legal.
        """
        name, colon, slots = text.strip().partition(":")
        slots = slots if colon else "1"
        if not (_NAME.fullmatch(name) and _SLOTS.fullmatch(slots) and int(slots)):
            raise ConfigError.illegal(source, text, legal)
        return cls(name, int(slots))

    @property
    def is_here(self) -> bool:
        """Whether it is this host, by one of the names that it has for sure."""
        own = os.uname().nodename
        return self.name in {"localhost", "127.0.0.1", own, own.partition(".")[0]}

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def read_hosts(text: str, *, source: str = "--hosts") -> tuple[Host, ...]:
    """Reads ``a:4,b:4``; a host named twice takes the sum.

    Raises:
        ConfigError: no host, or one that is not written so.
    """
    return _merged(Host.parse(word, source=source) for word in text.split(","))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Reads a file of hosts, in Open MPI's form (``a slots=4``) or the one of MPICH (``a:4``); ``#`` begins a comment.

    Raises:
        ConfigError: the file cannot be read, holds no host, or holds a line that is written otherwise.
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
    """Fills the hosts in order, as MPI launchers do; the slots of the result are the ranks that each really gets.

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
    """Brings the two forms together; what is neither stays as it is, to be refused."""
    if len(words) == 2 and words[1].startswith("slots="):
        return f"{words[0]}:{words[1].removeprefix('slots=')}"
    return " ".join(words)


def _listed(hosts: Iterable[Host]) -> str:
    return ",".join(map(str, hosts))
