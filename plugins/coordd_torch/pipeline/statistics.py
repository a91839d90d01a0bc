"""Batch and instance normalisation with microbatches: one update of the running statistics per step.

Each microbatch is normalised by its own mean and variance, as in every pipeline. But updating the running statistics
per microbatch would age them by that number of steps, and would ignore how far the microbatches' means lie apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coordd.errors import ArgumentError

__all__ = ["DeferredStatistics", "Norm"]

_Batch = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - the base class
Norm = nn.modules.batchnorm._NormBase  # noqa: SLF001 - also of instance normalisation
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class DeferredStatistics:
    """The statistics of a step's microbatches, for each layer with running statistics.

    A layer that is called several times per microbatch is updated as often per step as by a whole batch. Statistics are
    merged in fp64 and pairwise, as in Chan, Golub and LeVeque (1979); the running variance is the unbiased one.
    """

    def __init__(self, module: nn.Module) -> None:
        """Finds the normalisation layers of a module.

        Raises:
            ArgumentError: a layer needs the batches of several ranks at the same time, which a pipeline cannot provide.
        """
        self._rows: dict[str, Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._norms: dict[str, Any] = {
            name: norm for name, norm in module.named_modules() if isinstance(norm, Norm) and norm.track_running_stats
        }
        for name, norm in self._norms.items():
            if type(norm).__name__ == "SyncBatchNorm":
                text = f"{name!r} is a SyncBatchNorm, and the ranks of a pipeline have their microbatches at "
                text += "different times: use a BatchNorm, or larger microbatches"
                raise ArgumentError(text)

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Collects statistics while one microbatch runs through the module; outside of it the layers are unchanged."""
        self._calls.clear()
        with ExitStack() as stack:
            for name, norm in self._norms.items():
                own: dict[str, Any] = {}
                stack.enter_context(norm.register_forward_pre_hook(partial(self._before, own)))
                stack.enter_context(
                    norm.register_forward_hook(partial(self._after, own, name), always_call=True),
                )
            yield

    def take(self) -> dict[str, Tensor]:
        """Returns the statistics collected since the last call: per layer and call a row of count, means and distances.

        Distances are sums of squared distances from the mean, or, for instance normalisation, of rows' own variances.
        The replicas of a stage exchange these rows.
        """
        rows, self._rows = self._rows, {}
        return rows

    @torch.no_grad()
    def update(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Updates the running statistics once for all calls.

        Args:
            parts: the results of `take` of all replicas, in the same order on all of them.
        """
        total: dict[str, Tensor] = {}
        for part in parts:
            for name, row in part.items():
                self._add(total, name, row)
        for name, row in sorted(total.items(), key=lambda item: int(item[0].rpartition("#")[2])):
            _track(self._norms[name.rpartition("#")[0]], row)

    def _before(self, own: dict[str, Any], norm: Any, _args: Any) -> None:
        if norm.training:
            # With a momentum of one, the layer itself stores the microbatch's statistics in its temporary buffers.
            own |= {name: getattr(norm, name) for name in (*_BUFFERS, "momentum")}
            norm.running_mean = torch.zeros_like(norm.running_mean)
            norm.running_var = torch.zeros_like(norm.running_var)
            norm.num_batches_tracked, norm.momentum = None, 1.0

    def _after(self, own: dict[str, Any], name: str, norm: Any, _args: Any, result: Tensor | None) -> None:
        if not own:
            return
        mean, variance = norm.running_mean.double(), norm.running_var.double()
        for attribute, value in own.items():
            setattr(norm, attribute, value)
        own.clear()
        if result is None:  # the layer has failed
            return
        count = result.numel() // result.shape[1] if _pools(norm) else len(result)
        row = torch.cat([mean.new_tensor([count]), mean, variance * (count - int(_pools(norm)))])
        self._add(self._rows, f"{name}#{self._calls[name]}", row)
        self._calls[name] += 1

    def _add(self, rows: dict[str, Tensor], key: str, row: Tensor) -> None:
        pools = _pools(self._norms[key.rpartition("#")[0]])
        rows[key] = _merged(rows[key], row, pools=pools) if key in rows else row


def _pools(norm: Any) -> bool:
    """Returns whether the variance is over all rows together; instance normalisation averages each row's own."""
    return isinstance(norm, _Batch)


def _merged(mine: Tensor, theirs: Tensor, *, pools: bool) -> Tensor:
    """Merges two rows."""
    count, other = mine[:1], theirs[:1]
    mean, distances = mine[1:].chunk(2)
    other_mean, other_distances = theirs[1:].chunk(2)
    total = count + other
    delta = other_mean - mean
    part = other / total
    distances = distances + other_distances
    if pools:
        distances = distances + delta.square() * count * part
    return torch.cat([total, mean + delta * part, distances])


def _track(norm: Any, row: Tensor) -> None:
    mean, distances = row[1:].chunk(2)
    variance = distances / (row[:1] - int(_pools(norm)))
    weight = norm.momentum
    if _pools(norm):
        norm.num_batches_tracked.add_(1)
        weight = 1.0 / float(norm.num_batches_tracked) if weight is None else weight
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), weight or 0.0)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), weight or 0.0)
