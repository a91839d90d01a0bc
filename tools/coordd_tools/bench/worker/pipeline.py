"""Trains the GPT in stages with each engine in alternating blocks; or with one, and watches the process's memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from coordd.pipeline.catalogue import SCHEDULES
from coordd_tools.bench.blocks import Block
from coordd_tools.bench.jobs import PipelineJob
from coordd_tools.bench.order import turns
from coordd_tools.bench.pipeline import FLOOR, IDEAL, ideal
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.worker import meter
from coordd_tools.bench.worker.engines import started
from coordd_tools.bench.worker.rank import Rank
from coordd_tools.bench.worker.staged import PIPELINES, Staged, Whole, batch
from coordd_tools.bench.worker.watch import Watch, proportional_bytes

__all__ = ["measure"]

_WARM_UP = 3
_WATCHED_STEPS = 8
_TOLERANCE = 1e-5


def measure(job: PipelineJob, directory: Path) -> None:
    """Measures all engines on this rank.

    Raises:
        RuntimeError: an engine finds other losses than the others, so it did not do the work that was timed.
    """
    torch.set_num_threads(1)
    rank = Rank.join(directory)
    before = proportional_bytes()
    blocks: list[Block] = []
    with started([PIPELINES[name]() for name in job.engines], rank) as engines:
        found = _watched(job, engines[0], rank, before) if job.watched else _timed(job, engines, rank)
        for block in found:
            blocks.append(block)
            total = 1 if job.watched else job.rounds * len(engines)
            rank.tell(Progress(min(len(blocks), total), total, f"{block.engine}{' · memory' * job.watched}"))
        rank.barrier()
    rank.save(blocks)


def _timed(job: PipelineJob, engines: Sequence[Staged], rank: Rank) -> Iterator[Block]:
    """Yields the blocks of all rounds."""
    x, y = batch(job.seed)
    losses = {}
    for engine in engines:
        engine.prepare(rank, seed=job.seed, microbatches=job.microbatches)
        losses[engine.name] = [_known(engine.step(x, y), rank) for _ in range(_WARM_UP)]
    _compare(losses)
    for number in range(job.rounds):
        for engine in turns(engines, number):
            engine.step(x, y)  # untimed: it brings this copy back into the caches
            rank.barrier()
            calls = 0 if engine.name == FLOOR and rank.number else job.steps
            yield meter.read(lambda engine=engine: engine.step(x, y), calls, subject="gpt", engine=engine.name)
        yield from _ideals(job, engines, rank)


def _ideals(job: PipelineJob, engines: Sequence[Staged], rank: Rank) -> Iterator[Block]:
    """Yields what the engines' schedules would take, going by the last step in one piece."""
    for whole in [engine for engine in engines if isinstance(engine, Whole)]:
        forward, backward = rank.comm.bcast(whole.seconds)
        for engine in engines:
            if (schedule := engine.name.removeprefix("torch-")) in SCHEDULES:
                seconds = ideal(
                    schedule, rank.size, job.microbatches, forward=forward, backward=backward, cores=os.cpu_count() or 1
                )
                yield Block(IDEAL, engine.name, (seconds,))


def _watched(job: PipelineJob, engine: Staged, rank: Rank, before: int) -> Iterator[Block]:
    """Yields one block, whose memory is what the process has more than before the engine started."""
    x, y = batch(job.seed)
    engine.prepare(rank, seed=job.seed, microbatches=job.microbatches)
    rank.barrier()
    watch = Watch()
    watch.start()
    for _ in range(_WATCHED_STEPS):
        engine.step(x, y)
    peak = watch.stop()
    yield Block("gpt", engine.name, (), peak_bytes=peak - before)


def _known(loss: float | None, rank: Rank) -> float:
    """The loss, from the ranks that know it."""
    return next(found for found in rank.comm.allgather(loss) if found is not None)


def _compare(losses: dict[str, list[float]]) -> None:
    first, wanted = next(iter(losses.items()))
    for name, found in losses.items():
        if not all(map(lambda one, other: math.isclose(one, other, rel_tol=_TOLERANCE), found, wanted)):
            raise RuntimeError(f"{name} finds the losses {found}, where {first} finds {wanted}")
