"""Where ranks can be asked: each listens on a socket whose name says which rank of which job it is.

The names are abstract: no file holds them. The kernel lists them and forgets them with the process, so nothing is left
behind however a rank ends, and a rank can be named that is stopped, or has not met the others.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from coordd.launched import launched_ranks

__all__ = ["FAR_SECONDS", "Address", "identity", "listed", "parent_of", "parse_listing", "peer"]

FAR_SECONDS = 2.0
"""How long ranks that cannot be asked in person have for an answer."""

_LISTING = Path("/proc/net/unix")
_LONGEST_JOB = 56  # a name has room for 107 bytes
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_CREDENTIALS = struct.Struct("3i")
_FORM = r"@coordd/(\d+)/(\d+)/(\d+)/([01])/(\d+)/(\d+)/(\S+)"


class Address(NamedTuple):
    """One rank of a job of a user; of several of one process the highest ``turn`` counts.

    ``met`` is 1 once the rank has met the others; before, it may be unable to answer: MPI waits for them with Python's
    lock held.
    """

    uid: int
    pid: int
    turn: int
    met: int
    rank: int
    size: int
    job: str

    @property
    def name(self) -> str:
        """The socket's name; the zero byte makes it abstract."""
        return "\0coordd/" + "/".join(map(str, self))


def identity(environment: Mapping[str, str], *, turn: int = 0) -> Address:
    """Says who this process is, before it has met any other, by what its launcher has told it."""
    size = launched_ranks(environment)
    rank = next((int(environment[name]) for name in _RANKS if environment.get(name, "").isdigit()), 0)
    job = _job(environment) if size else f"alone-{os.getpid()}"
    clean = re.sub(r"[^\w.@:-]", "_", job, flags=re.ASCII)
    return Address(os.geteuid(), os.getpid(), turn, 0, rank if size else 0, size or 1, clean[-_LONGEST_JOB:])


def _job(environment: Mapping[str, str]) -> str:
    if namespace := environment.get("PMIX_NAMESPACE"):
        return namespace
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" in environment:
        return f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    # Hydra names no job, but the ranks of a host share what starts them; `coordd run` puts one process in between.
    parent = os.getppid()
    return f"below-{parent_of(parent) if 'COORDD_LAUNCHED' in environment else parent}"


def parent_of(pid: int) -> int:
    """Returns the process that has started another one of this host."""
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])


def listed() -> list[Address]:
    """Lists the ranks of this user on this host, by job and rank; what other users have named so is left out."""
    found = parse_listing(_LISTING.read_text("utf-8", errors="replace"))
    return sorted((address for address in found if address.uid == os.geteuid()), key=lambda found: (found.job, found))


def parse_listing(text: str) -> list[Address]:
    """Reads the kernel's list of sockets, of which each connection has a line of its own."""
    found = (re.fullmatch(_FORM, line.split()[-1]) for line in text.splitlines() if "@coordd/" in line)
    return list(dict.fromkeys(_address(*match.groups()) for match in found if match))


def _address(*words: str) -> Address:
    uid, pid, turn, met, rank, size = map(int, words[:-1])
    return Address(uid, pid, turn, met, rank, size, words[-1])


def peer(connection: socket.socket) -> tuple[int, int]:
    """Returns process and user at the other end of a connection, as the kernel knows them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
