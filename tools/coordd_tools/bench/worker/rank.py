"""One rank of the benchmark: its number, barriers, consistency checks, progress reports and results."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from coordd_tools.bench.blocks import Block
from coordd_tools.bench.progress import Progress

__all__ = ["Rank"]

_NAP_SECONDS = 100e-6


@dataclass(frozen=True)
class Rank:
    """One process of the benchmark; ``comm`` is a duplicate, so that messages of engines and benchmark do not mix."""

    number: int
    size: int
    comm: MPI.Intracomm
    directory: Path

    @classmethod
    def join(cls, directory: Path) -> Rank:
        """Reads rank and size from MPI; importing MPI has initialised it with ``MPI_THREAD_MULTIPLE``."""
        comm = MPI.COMM_WORLD.Dup()
        return cls(comm.Get_rank(), comm.Get_size(), comm, directory)

    def barrier(self) -> None:
        """Waits for all ranks, sleeping: an early rank that spins would take the core of a rank that still measures.

        Naps end at different times, so after the sleeping barrier all ranks leave together through a spinning one.
        """
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(_NAP_SECONDS)
        self.comm.Barrier()

    def agree(self, value: Hashable, *, on: str) -> None:
        """Checks that all ranks have the same value.

        Raises:
            RuntimeError: values differ; the message names the subject ``on`` and the value of each rank.
        """
        values = self.comm.allgather(value)
        if len(set(values)) > 1:
            raise RuntimeError(f"ranks disagree on {on}: " + ", ".join(f"rank {r}: {v}" for r, v in enumerate(values)))

    def tell(self, message: Progress) -> None:
        """Prints progress for the parent process; rank 0 only."""
        if self.number == 0:
            print(message.line(), flush=True)

    def save(self, blocks: Sequence[Block]) -> None:
        """Writes this rank's blocks to a file for the parent process."""
        path = self.directory / f"blocks.{self.number}.json"
        path.write_text(json.dumps([dataclasses.asdict(block) for block in blocks]))
