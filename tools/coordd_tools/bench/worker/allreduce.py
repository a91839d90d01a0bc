"""Sums a tensor of each size with each engine, in alternating blocks; each engine has its own memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from coordd_tools.bench.blocks import Block
from coordd_tools.bench.jobs import AllreduceJob
from coordd_tools.bench.order import turns
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.worker import meter
from coordd_tools.bench.worker.engines import REDUCERS, Reducer, started
from coordd_tools.bench.worker.rank import Rank

__all__ = ["measure"]

_BLOCK_BYTES = 16 << 20
_FEWEST, _MOST = 10, 50


def measure(job: AllreduceJob, directory: Path) -> None:
    """Measures all sizes on this rank.

    Raises:
        RuntimeError: an engine's sum is wrong.
    """
    torch.set_num_threads(1)
    rank = Rank.join(directory)
    blocks: list[Block] = []
    total = len(job.sizes) * job.rounds * len(job.engines)
    with started([REDUCERS[name]() for name in job.engines], rank) as engines:
        for size in job.sizes:
            for block in _size(job, size, engines, rank):
                blocks.append(block)
                rank.tell(Progress(len(blocks), total, f"{size:,} B · {block.engine}"))
    rank.save(blocks)


def _size(job: AllreduceJob, size: int, engines: Sequence[Reducer], rank: Rank) -> Iterator[Block]:
    """Yields the blocks of one size for all rounds."""
    tensors = {engine.name: engine.tensor(size // torch.float32.itemsize) for engine in engines}
    calls = job.calls or max(_FEWEST, min(_MOST, _BLOCK_BYTES // size))
    for number in range(job.rounds):
        for engine in turns(engines, number):
            tensor = tensors[engine.name]
            reduce = engine.reducing(tensor, label=f"bench.{size}")
            tensor.fill_(1)
            reduce()  # untimed: warms the caches, and gives a result to check
            if engine.exchanges and not bool(torch.all(tensor == rank.size)):
                raise RuntimeError(
                    f"{engine.name} summed ones over {rank.size} ranks to {tensor.min():g}..{tensor.max():g}"
                )
            tensor.zero_()  # so that repeated sums do not overflow
            rank.barrier()
            yield meter.read(reduce, calls, subject=str(size), engine=engine.name).divided(tensor.nbytes / size)
