"""Addresses of ranks for status queries: each rank listens on a Unix socket whose name identifies rank and job.

The names are abstract: they exist in no file system. The kernel lists them and removes them with the process, so no
file is left behind however a rank ends, and even a rank that is stopped or not yet connected to others can be found.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from coordd.host.launcher_environment import launched_ranks

__all__ = ["FAR_SECONDS", "Address", "identity", "listed", "parent_of", "parse_listing", "peer"]

FAR_SECONDS = 2.0
"""Seconds that ranks of other hosts, which are queried through the coordinator, have for an answer."""

_LISTING = Path("/proc/net/unix")
_LONGEST_JOB = 56  # a name has room for 107 bytes
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_CREDENTIALS = struct.Struct("3i")
_FORM = r"@coordd/(\d+)/(\d+)/(\d+)/([01])/(\d+)/(\d+)/(\S+)"


class Address(NamedTuple):
    """The address of one rank of a user's job; of several addresses of one process, the highest ``turn`` is valid.

    ``met`` is 1 once the rank has connected to the others; before, it may be unable to answer, because MPI waits for
    the other ranks while it holds the GIL.
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
        """Name of the socket; the leading zero byte makes it abstract."""
        return "\0coordd/" + "/".join(map(str, self))


def identity(environment: Mapping[str, str], *, turn: int = 0) -> Address:
    """Returns the address of this process before it has connected to others, from its launcher's variables."""
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
    # Hydra does not name jobs, but the ranks of a host have a common ancestor: the parent or, under `coordd run`, which
    # starts one process in between, the grandparent.
    parent = os.getppid()
    return f"below-{parent_of(parent) if 'COORDD_LAUNCHED' in environment else parent}"


def parent_of(pid: int) -> int:
    """Returns the id of a process's parent on this host."""
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])


def listed() -> list[Address]:
    """Returns the addresses of this user's ranks on this host, sorted by job; addresses of other users are left out."""
    found = parse_listing(_LISTING.read_text("utf-8", errors="replace"))
    return sorted((address for address in found if address.uid == os.geteuid()), key=lambda found: (found.job, found))


def parse_listing(text: str) -> list[Address]:
    """Parses the kernel's list of sockets, in which every connection has its own line."""
    found = (re.fullmatch(_FORM, line.split()[-1]) for line in text.splitlines() if "@coordd/" in line)
    return list(dict.fromkeys(_address(*match.groups()) for match in found if match))


def _address(*words: str) -> Address:
    uid, pid, turn, met, rank, size = map(int, words[:-1])
    return Address(uid, pid, turn, met, rank, size, words[-1])


def peer(connection: socket.socket) -> tuple[int, int]:
    """Returns the ids of the process and the user at the other end of a connection, as the kernel reports them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
