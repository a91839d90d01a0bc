"""Batch normalization over the batches of all ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from coordd import api
from coordd.daemon.reject_on_all_ranks import telling
from coordd.errors import ArgumentError
from coordd.ops.messages import Kind
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd_torch.operations import Sum, Tensor, allgather_async, allreduce_async

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - as PyTorch's own
    """Batch normalization with the mean and variance over all ranks' batches, which may differ in size.

    The running variance is the unbiased variance over all batches. Means and variances are merged pairwise as in Chan,
    Golub and LeVeque (1979), which avoids cancellation.
    """

    def __init__(  # noqa: PLR0917 - Horovod's signature
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Creates a layer; arguments as in `torch.nn.BatchNorm1d`.

        Args:
            num_features: C of an input of shape (N, C, ...).
            eps: added to the variance.
            momentum: momentum of the running statistics; None for a cumulative average.
            affine: whether to learn a scale and a shift.
            track_running_stats: whether to keep statistics for evaluation.
            process_set: the ranks that take part.
        """
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.ndim < 2 or input.shape[1] != self.num_features:
            text = f"expected an input of shape (N, {self.num_features}, ...), not {tuple(input.shape)}"
            raise ArgumentError(text)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Returns the normalized input; in evaluation mode uses the running statistics, if there are any."""
        ranks = self.process_set.count(api.size())
        if ranks == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        found: tuple[Tensor, ...]
        with telling(api.operations(), Kind.ALLGATHER, [None], self.process_set):
            self._check_input_dim(input)
            found = _Normalise.apply(input, self.eps, self.process_set)  # type: ignore[no-untyped-call]
        normalised, mean, variance, count = found
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        if not self.affine:
            return normalised
        shape = (1, -1, *[1] * (input.ndim - 2))
        return (normalised * self.weight.view(shape) + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None  # noqa: S101 - for the type checker
        assert self.running_var is not None  # noqa: S101 - as above
        assert self.num_batches_tracked is not None  # noqa: S101 - as above
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


class _Normalise(torch.autograd.Function):
    """Autograd function that normalizes with the statistics of all ranks, in at least single precision."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, eps: float, process_set: ProcessSet) -> tuple[Tensor, ...]:
        dims = [dim for dim in range(values.ndim) if dim != 1]
        exact = values.to(torch.promote_types(values.dtype, torch.float32))
        mean, variance, count = _merged(_statistics(exact, dims), process_set)
        scale = torch.rsqrt(variance + eps)
        shape = [1, -1, *[1] * (values.ndim - 2)]
        normalised = (exact - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normalised, scale, count)
        ctx.dims, ctx.process_set = dims, process_set
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised.to(values.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        normalised, scale, count = ctx.saved_tensors
        with telling(api.operations(), Kind.ALLREDUCE, [None], ctx.process_set):
            exact = gradient.to(normalised.dtype)
            sums = torch.stack([exact.sum(ctx.dims), (exact * normalised).sum(ctx.dims)])
            handle = allreduce_async(sums, op=Sum, process_set=ctx.process_set)
        total = handle.result() / count
        shape = [1, -1, *[1] * (gradient.ndim - 2)]
        centred = exact - total[0].view(shape) - normalised * total[1].view(shape)
        return (centred * scale.view(shape)).to(gradient.dtype), None, None


def _statistics(values: Tensor, dims: list[int]) -> Tensor:
    """Returns rows with the mean, the sum of squared deviations and the count per channel; zeros for an empty batch."""
    count = values.numel() // values.shape[1]
    counts = values.new_full((values.shape[1],), count)
    if not count:
        return torch.stack([torch.zeros_like(counts), torch.zeros_like(counts), counts])
    mean = values.mean(dims)
    distances = (values - mean.view([1, -1, *[1] * (values.ndim - 2)])).square().sum(dims)
    return torch.stack([mean, distances, counts])


def _merged(mine: Tensor, process_set: ProcessSet) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean, biased variance and count per channel over all ranks."""
    parts = allgather_async(mine[None], process_set=process_set).result()
    mean, distances, count = parts[0]
    for other_mean, other_distances, other_count in parts[1:]:
        total = count + other_count
        part = other_count / total.clamp(min=1)
        delta = other_mean - mean
        mean = mean + delta * part
        distances = distances + other_distances + delta.square() * count * part
        count = total
    return mean, distances / count.clamp(min=1), count
