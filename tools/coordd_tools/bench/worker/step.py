"""Trains each model with each engine, in alternating blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn import functional

from coordd_tools.bench.blocks import Block
from coordd_tools.bench.jobs import StepJob
from coordd_tools.bench.order import turns
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.worker import meter
from coordd_tools.bench.worker.engines import TRAINERS, Trainer, started
from coordd_tools.bench.worker.models import MODELS
from coordd_tools.bench.worker.rank import Rank

__all__ = ["Training", "measure"]

_WARM_UP = 5
"""Steps before the first block: DDP rebuilds its buckets after one, coordd knows all tensors after one."""


class Training:
    """One engine's own copy of a model, with this rank's batch."""

    def __init__(self, name: str, engine: Trainer, rank: Rank, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.engine = engine
        self.model, self._optimizer = engine.prepare(MODELS[name].build(), label=name)
        self._inputs, self._labels = MODELS[name].batch(torch.Generator().manual_seed(seed + 1 + rank.number))

    def step(self) -> None:
        """Trains on the same batch once more."""
        self._optimizer.zero_grad()
        logits = self.model(self._inputs)
        loss = functional.cross_entropy(logits.flatten(0, -2), self._labels.flatten())
        loss.backward()
        self._optimizer.step()

    def digest(self) -> str:
        """Returns a fingerprint of the parameters."""
        fingerprint = hashlib.blake2b(digest_size=8)
        for parameter in self.model.parameters():
            fingerprint.update(parameter.detach().numpy().tobytes())
        return fingerprint.hexdigest()


def measure(job: StepJob, directory: Path) -> None:
    """Measures all models on this rank.

    Raises:
        RuntimeError: an engine left the ranks with different parameters, so it did not do the work that was timed.
    """
    torch.set_num_threads(1)
    rank = Rank.join(directory)
    blocks: list[Block] = []
    total = len(job.models) * job.rounds * len(job.engines)
    with started([TRAINERS[name]() for name in job.engines], rank) as engines:
        for name in job.models:
            for block in _model(job, name, engines, rank):
                blocks.append(block)
                rank.tell(Progress(len(blocks), total, f"{name} · {block.engine}"))
    rank.save(blocks)


def _model(job: StepJob, name: str, engines: Sequence[Trainer], rank: Rank) -> Iterator[Block]:
    """Yields the blocks of one model, all rounds."""
    trainings = [Training(name, engine, rank, seed=job.seed) for engine in engines]
    for training in trainings:
        for _ in range(_WARM_UP):
            training.step()
    for number in range(job.rounds):
        for training in turns(trainings, number):
            training.step()  # untimed: brings this copy back into the caches
            rank.barrier()
            yield meter.read(training.step, job.steps or MODELS[name].steps, subject=name, engine=training.engine.name)
    for training in trainings:
        if training.engine.exchanges:
            rank.agree(training.digest(), on=f"the parameters of '{name}' after training with {training.engine.name}")
