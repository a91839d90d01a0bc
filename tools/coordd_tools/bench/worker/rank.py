"""A rank's own view of the group: who it is, how it waits for the others, and where it leaves what it found."""

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
    """One process of the group; ``comm`` is its own duplicate, so no engine's messages meet the benchmark's."""

    number: int
    size: int
    comm: MPI.Intracomm
    directory: Path

    @classmethod
    def join(cls, directory: Path) -> Rank:
        """Takes rank and size from MPI, which importing it has started with ``MPI_THREAD_MULTIPLE``."""
        comm = MPI.COMM_WORLD.Dup()
        return cls(comm.Get_rank(), comm.Get_size(), comm, directory)

    def barrier(self) -> None:
        """Waits for all ranks: asleep, for a spinning early rank would take the core of one that still measures.

        Naps end at different times, so once all are here they leave together through a spinning barrier.
        """
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(_NAP_SECONDS)
        self.comm.Barrier()

    def agree(self, value: Hashable, *, on: str) -> None:
        """Checks that all ranks have the same value.

        Raises:
            RuntimeError: they do not; it says ``on`` what.
        """
        values = self.comm.allgather(value)
        if len(set(values)) > 1:
            raise RuntimeError(f"ranks disagree on {on}: " + ", ".join(f"rank {r}: {v}" for r, v in enumerate(values)))

    def tell(self, message: Progress) -> None:
        """Lets rank 0 report progress to the parent."""
        if self.number == 0:
            print(message.line(), flush=True)

    def save(self, blocks: Sequence[Block]) -> None:
        """Leaves this rank's blocks for the parent."""
        path = self.directory / f"blocks.{self.number}.json"
        path.write_text(json.dumps([dataclasses.asdict(block) for block in blocks]))
