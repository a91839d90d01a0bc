"""Batch normalisation where a batch comes in pieces: one update of the running statistics a step, by the whole batch.

Each microbatch is normalised by its own mean and variance, as in every pipeline. But the running statistics would be
updated for each, which ages them as many steps, and would never see how far the microbatches' means lie apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coordd.errors import ArgumentError

__all__ = ["DeferredStatistics"]

_Norm = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - what all of them are
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class _Watched:
    """A layer, and what its running statistics were before it was called."""

    norm: Any
    calls: int = 0
    own: dict[str, Any] = field(default_factory=dict)


class DeferredStatistics:
    """Collects what the microbatches of a step have for statistics, of each layer that keeps them.

    A layer that is called several times in a microbatch is updated as often a step, as by a whole batch. Statistics
    are merged in fp64 and pairwise, as Chan, Golub and LeVeque (1979) do; the running variance is the unbiased one.
    """

    def __init__(self, module: nn.Module) -> None:
        """Watches the layers of a module from now on, while they train.

        Raises:
            ArgumentError: a layer wants the batches of several ranks at a time, which do not come at a time.
        """
        self._rows: dict[str, Tensor] = {}
        self._watched: dict[str, _Watched] = {}
        self._paused = False
        for name, norm in module.named_modules():
            if isinstance(norm, _Norm) and norm.track_running_stats:
                if type(norm).__name__ == "SyncBatchNorm":
                    text = f"{name!r} is a SyncBatchNorm, and the ranks of a pipeline have their microbatches at "
                    text += "different times: use a BatchNorm, or larger microbatches"
                    raise ArgumentError(text)
                self._watch(name, norm)

    def _watch(self, name: str, norm: nn.Module) -> None:
        watched = self._watched[name] = _Watched(norm)
        norm.register_forward_pre_hook(lambda _norm, _args: self._before(watched))
        norm.register_forward_hook(lambda _norm, _args, result: self._after(name, watched, result), always_call=True)

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Collects, while one microbatch goes through the module."""
        for watched in self._watched.values():
            watched.calls = 0
        yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collects nothing, while a microbatch goes through the module again."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def take(self) -> dict[str, Tensor]:
        """Returns what was collected since the last time: for each layer and call a row of count, means, distances.

        Distances are sums of squared distances from the mean. Replicas of a stage give each other theirs.
        """
        rows, self._rows = self._rows, {}
        return rows

    @torch.no_grad()
    def update(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Updates the running statistics once for all calls.

        Args:
            parts: what each replica's `take` has returned, in the same order on all of them.
        """
        total: dict[str, Tensor] = {}
        for part in parts:
            for name, row in part.items():
                total[name] = _merged(total[name], row) if name in total else row
        for name, row in sorted(total.items(), key=lambda item: int(item[0].rpartition("#")[2])):
            _track(self._watched[name.rpartition("#")[0]].norm, row)

    def _before(self, watched: _Watched) -> None:
        norm = watched.norm
        if norm.training:
            # With a momentum of one, the layer itself puts the microbatch's statistics into what it takes for its own.
            watched.own = {name: getattr(norm, name) for name in (*_BUFFERS, "momentum")}
            norm.running_mean = torch.zeros_like(norm.running_mean)
            norm.running_var = torch.zeros_like(norm.running_var)
            norm.num_batches_tracked, norm.momentum = None, 1.0

    def _after(self, name: str, watched: _Watched, result: Tensor | None) -> None:
        norm, own = watched.norm, watched.own
        if not own:
            return
        mean, variance = norm.running_mean, norm.running_var
        for attribute, value in own.items():
            setattr(norm, attribute, value)
        watched.own = {}
        if self._paused or result is None:  # None: the layer has failed
            return
        count = result.numel() // result.shape[1]
        means, distances = mean.double(), variance.double() * (count - 1)
        row = torch.cat([means.new_tensor([count]), means, distances])
        key = f"{name}#{watched.calls}"
        watched.calls += 1
        self._rows[key] = _merged(self._rows[key], row) if key in self._rows else row


def _merged(mine: Tensor, theirs: Tensor) -> Tensor:
    """Merges two rows."""
    count, other = mine[:1], theirs[:1]
    mean, distances = mine[1:].chunk(2)
    other_mean, other_distances = theirs[1:].chunk(2)
    total = count + other
    delta = other_mean - mean
    part = other / total
    return torch.cat([total, mean + delta * part, distances + other_distances + delta.square() * count * part])


def _track(norm: Any, row: Tensor) -> None:
    mean, distances = row[1:].chunk(2)
    variance = distances / (row[:1] - 1)
    norm.num_batches_tracked.add_(1)
    weight = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), weight)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), weight)
