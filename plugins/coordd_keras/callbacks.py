"""Keras callbacks for training on several ranks, under Horovod's names, for all supported backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from coordd import api
from coordd.errors import ArgumentError
from coordd.parallel.collective_calls import CollectiveCall
from coordd_keras.operations import broadcast_variables
from coordd_keras.state import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CommitStateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the root's model and optimizer variables to all ranks after the first batch.

    Only then do all variables exist, however they are built; differences from the first step are overwritten.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        """Stores the settings.

        Args:
            root_rank: the global rank whose values are copied.
            device: Horovod's argument; not needed.
            local_variables: variables that stay local to each rank.
        """
        super().__init__()
        self._root = root_rank
        self._local = {id(variable): variable for variable in local_variables or ()}
        self._done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts after the first batch."""
        if self._done:
            return
        self._done = True
        variables = [*self.model.variables, *self.model.optimizer.variables]
        broadcast_variables([variable for variable in variables if id(variable) not in self._local], self._root)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages an epoch's metrics over the ranks; put it before the callbacks that use the metrics."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages the metrics that are numbers.

        Raises:
            MismatchError: on all ranks: their metrics differ.
            RefusedError: another rank has raised an error here.
        """
        found = {} if logs is None else logs
        found.update(
            _averaged("MetricAverageCallback", {name: found[name] for name in found if _is_number(found[name])})
        )


def _is_number(value: Any) -> bool:
    array = np.asarray(value)
    return not array.ndim and array.dtype.kind in "biuf"


def _averaged(what: str, metrics: dict[str, Any]) -> dict[str, float]:
    """Averages metrics over the ranks; first compares their names across ranks in a collective call.

    Without the comparison, a rank with other metrics would average unrelated values, or wait forever.
    """
    if api.size() == 1:
        return {}
    with CollectiveCall(what) as call:
        call.advice = "compile all models with the same metrics, and give fit the same validation data and callbacks"
        call.lines += sorted(metrics)
        mine = np.array([float(metrics[name]) for name in call.lines])
    averaged = api.allreduce(mine, name="coordd.metrics") if mine.size else mine
    return dict(zip(call.lines, averaged.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the initial learning rate by a factor that depends on the epoch, and corrects the momentum."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Stores the schedule.

        Args:
            initial_lr: the learning rate that is multiplied.
            multiplier: a factor, or a function that returns the factor for an epoch, counted from 0.
            start_epoch: the first epoch in which the schedule applies.
            end_epoch: the first epoch in which it no longer applies; None for no end.
            staircase: whether to change the rate between epochs only, or with each batch.
            momentum_correction: whether to scale SGD's momentum buffers at once when the rate changes.
            steps_per_epoch: number of batches per epoch; by default Keras's count.

        Raises:
            ArgumentError: `multiplier` is a constant and `staircase` is False.
        """
        super().__init__()
        if not callable(multiplier) and not staircase:
            text = "a constant multiplier changes nothing between batches: leave staircase=True, or give a function"
            raise ArgumentError(text)
        self._initial = initial_lr
        self._factor = multiplier if callable(multiplier) else lambda _: multiplier
        self._start, self._end = start_epoch, end_epoch
        self._staircase = staircase
        self._corrects = momentum_correction
        self._steps = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Determines the number of batches per epoch.

        Raises:
            ArgumentError: the number is unknown, and the rate changes with each batch.
        """
        self._steps = self._steps or self.params.get("steps")
        if not self._staircase and not self._steps:
            text = "how many batches an epoch has is not known: give steps_per_epoch"
            raise ArgumentError(text)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Stores the epoch's number."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate."""
        if self._epoch < self._start or (self._end is not None and self._epoch >= self._end):
            return
        if self._staircase and batch == 0:
            self._change(self._factor(self._epoch))
        elif not self._staircase:
            assert self._steps is not None  # noqa: S101 - see `on_train_begin`
            self._change(self._factor(self._epoch + batch / self._steps))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the learning rate to the logs."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _change(self, factor: float) -> None:
        optimizer = self.model.optimizer
        before, after = float(optimizer.learning_rate), self._initial * factor
        optimizer.learning_rate = after
        if self._corrects and isinstance(optimizer, keras.optimizers.SGD) and optimizer.built and before:
            # SGD's velocity contains the learning rate, so scaling it once is the correction of Goyal et al. (2017).
            for velocity in optimizer.momentums if optimizer.momentum else ():
                velocity.assign(velocity * (after / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate with each batch from that of a single rank to that of all ranks."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Stores the schedule.

        Args:
            initial_lr: the rate at the end, usually that of one rank times the number of ranks.
            warmup_epochs: number of epochs of the warmup.
            momentum_correction: as in `LearningRateScheduleCallback`.
            steps_per_epoch: as in `LearningRateScheduleCallback`.
            verbose: 1 to print the rate at the end.
        """

        def factor(epoch: float) -> float:
            done = epoch + 1.0 / (self._steps or 1)
            return 1.0 / api.size() * (done * (api.size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, factor, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the learning rate to the logs; with `verbose`, rank 0 prints the end of the warmup."""
        super().on_epoch_end(epoch, logs)
        if self._end is not None and epoch == self._end - 1 and self._verbose and api.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")  # noqa: T201 - Keras's way


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model of the job, on rank 0, by a metric that is averaged over the ranks."""

    def __init__(self, filepath: str, monitor: str = "val_loss", **details: Any) -> None:
        """Stores the settings.

        Args:
            filepath: where to save.
            monitor: the metric.
            details: other arguments of `keras.callbacks.ModelCheckpoint`; only saving after epochs is supported.
        """
        super().__init__(filepath, monitor=monitor, save_best_only=True, **details)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages the metric over the ranks, and saves on rank 0."""
        found = dict(logs or {})
        found |= _averaged("BestModelCheckpoint", {name: found[name] for name in [self.monitor] if name in found})
        if api.rank() == 0:
            super().on_epoch_end(epoch, found)
