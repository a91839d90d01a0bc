"""Trains the GPT in stages: several engines in alternating blocks, or one engine whose memory is sampled."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.optim import SGD

from coordd.pipeline.schedules.registry import SCHEDULES
from coordd_tools.bench.blocks import Block
from coordd_tools.bench.jobs import PipelineJob
from coordd_tools.bench.order import turns
from coordd_tools.bench.pipeline import FLOOR, IDEAL, ideal
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.worker import meter
from coordd_tools.bench.worker.engines import started
from coordd_tools.bench.worker.rank import Rank
from coordd_tools.bench.worker.staged import PIPELINES, Staged, batch
from coordd_tools.bench.worker.watch import Watch, allocated_bytes, proportional_bytes

__all__ = ["measure"]

_WARM_UP = 2
_WATCHED_BLOCKS = 2
_OFTEN_SECONDS = 1e-3
_TOLERANCE = 1e-5


def measure(job: PipelineJob, directory: Path) -> None:
    """Measures all engines on this rank.

    Raises:
        RuntimeError: an engine finds other losses than the first one, so it did not do the work that was timed.
    """
    torch.set_num_threads(1)
    rank = Rank.join(directory)
    SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer imports a large part of PyTorch, with any engine
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
            engine.step(x, y)  # untimed: brings this copy back into the caches
            rank.barrier()
            calls = 0 if engine.name == FLOOR and rank.number else job.steps
            yield meter.read(partial(engine.step, x, y), calls, subject="gpt", engine=engine.name)
        yield from _ideals(job, engines, rank)


def _ideals(job: PipelineJob, engines: Sequence[Staged], rank: Rank) -> Iterator[Block]:
    """Yields the time of each engine's schedule in the simulator, given the last step of the whole model on rank 0."""
    found = rank.comm.bcast(next((engine.seconds for engine in engines if engine.seconds), None))
    if found is None:
        return
    cores = os.cpu_count() or 1
    for engine in engines:
        if (schedule := engine.name.removeprefix("torch-")) in SCHEDULES:
            seconds = ideal(schedule, rank.size, job.microbatches, whole=found, cores=cores)
            yield Block(IDEAL, engine.name, (seconds,))


def _watched(job: PipelineJob, engine: Staged, rank: Rank, before: int) -> Iterator[Block]:
    """Yields one block: the growth of the process since before the engine started, and the steps' allocations."""
    x, y = batch(job.seed)
    engine.prepare(rank, seed=job.seed, microbatches=job.microbatches)
    ready = allocated_bytes()
    for _ in range(_WARM_UP):
        engine.step(x, y)
    rank.barrier()
    watches = Watch(proportional_bytes), Watch(allocated_bytes, every=_OFTEN_SECONDS)
    for watch in watches:
        watch.start()
    for _ in range(_WATCHED_BLOCKS * job.steps):
        engine.step(x, y)
    peak, allocated = (watch.stop() for watch in watches)
    yield Block("gpt", engine.name, (), peak_bytes=peak - before, allocated_bytes=allocated - ready)


def _known(loss: float | None, rank: Rank) -> float:
    """Returns the loss, from the ranks that know it."""
    losses: list[float | None] = rank.comm.allgather(loss)
    return next(found for found in losses if found is not None)


def _compare(losses: Mapping[str, Sequence[float]]) -> None:
    first, wanted = next(iter(losses.items()))
    for name, found in losses.items():
        if not all(map(partial(math.isclose, rel_tol=_TOLERANCE), found, wanted)):
            raise RuntimeError(f"{name} finds the losses {found}, where {first} finds {wanted}")
