"""Sums tensors in one process set while another set is idle or waits for one of its ranks, in alternating blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from coordd_tools.bench.blocks import Block
from coordd_tools.bench.jobs import SetsJob
from coordd_tools.bench.order import turns
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.worker import meter
from coordd_tools.bench.worker.engines import REDUCERS, started
from coordd_tools.bench.worker.rank import Rank

__all__ = ["measure"]

_BLOCK_BYTES = 64 << 20
_FEWEST, _MOST = 10, 500
_WARM = 10
"""Untimed calls, after which the response cache knows the tensors and the plan is locked where it can be."""


def measure(job: SetsJob, directory: Path) -> None:
    """Measures all sizes on this rank."""
    torch.set_num_threads(1)
    rank = Rank.join(directory)
    blocks: list[Block] = []
    total = len(job.sizes) * job.rounds * len(job.engines)
    with started([REDUCERS["coordd"]()], rank):
        sets = _Sets(rank)
        for size in job.sizes:
            calls = job.calls or max(_FEWEST, min(_MOST, _BLOCK_BYTES // size))
            for number in range(job.rounds):
                for engine in turns(job.engines, number):
                    blocks.append(sets.block(size, engine, calls))
                    rank.tell(Progress(len(blocks), total, f"{size:,} B · {engine}"))
        rank.barrier()
    rank.save(blocks)


class _Sets:
    """The two halves of the ranks; the last rank is the one that holds back its tensor."""

    def __init__(self, rank: Rank) -> None:
        import coordd.torch

        self._api: Any = coordd.torch
        self._rank = rank
        half = rank.size // 2
        self._busy = self._api.ProcessSet(range(half))
        self._other = self._api.ProcessSet(range(half, rank.size))
        if rank.number >= half:
            os.mkfifo(self._door(rank.number))

    def block(self, size: int, state: str, calls: int) -> Block:
        """Measures one block in a state of the other set; ranks of the other set return a block without calls."""
        stalled, rank = state == "stalled", self._rank
        if rank.number in self._busy.ranks:
            rank.barrier()
            found = self._measure(size, state, calls)
            if rank.number == 0:
                self._wake(range(rank.size - 1, rank.size) if stalled else self._other.ranks)
            return found
        waits = stalled and rank.number < rank.size - 1
        handle = self._submitted() if waits else None
        rank.barrier()
        if handle is None:
            self._door(rank.number).read_bytes()  # sleeps until a rank opens the other end
            handle = self._submitted() if stalled else None
        if handle is not None:
            handle.result()
        return Block(str(size), state, ())

    def _measure(self, size: int, state: str, calls: int) -> Block:
        """Times the calls.

        Raises:
            RuntimeError: a sum is wrong.
        """
        tensor = torch.ones(size // torch.float32.itemsize)

        def reduce() -> object:
            return self._api.allreduce_(tensor, op=self._api.Sum, name=f"bench.{size}", process_set=self._busy)

        reduce()
        if not bool(torch.all(tensor == len(self._busy.ranks))):
            raise RuntimeError(f"ones were summed over {len(self._busy.ranks)} ranks to {tensor.min():g}")
        tensor.zero_()  # so that no number of sums overflows
        for _ in range(_WARM):
            reduce()
        return meter.read(reduce, calls, subject=str(size), engine=state)

    def _submitted(self) -> Any:
        return self._api.allreduce_async(torch.ones(1), name="held back", process_set=self._other)

    def _wake(self, ranks: Sequence[int]) -> None:
        for number in ranks:
            self._door(number).write_bytes(b"")

    def _door(self, number: int) -> Path:
        return self._rank.directory / f"door.{number}"
