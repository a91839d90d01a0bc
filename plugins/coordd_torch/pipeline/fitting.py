"""Training loop over epochs, with one line of progress for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from coordd.errors import ArgumentError
from coordd_torch.pipeline.rows import rows_of, taken

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["History", "fit", "screen"]


@dataclass
class History:
    """Results of each epoch: the mean loss over its rows, and that of the validation data, if there are any.

    With ``loss_reduction="sum"`` it is the sum over all rows that the epoch was trained with.
    """

    loss: list[float] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)


class Trainable(Protocol):
    """Interface of the trained object.

    Attributes:
        epochs: number of epochs trained so far; it selects the row order of the next one.
    """

    epochs: int

    def train_batch(self, x: Any, y: Any) -> float:
        """Runs one training step, and returns the mean loss."""
        ...

    def eval_batch(self, x: Any, y: Any) -> float:
        """Returns the mean loss."""
        ...


def fit(
    pipe: Trainable,
    x: Any,
    y: Any,
    *,
    epochs: int,
    batch_size: int,
    validation_data: tuple[Any, Any] | None,
    shuffle: bool,
    seed: int,
    least: int,
    least_evaluated: int,
    compare: Callable[[], None],
    ended: Callable[[], bool],
    console: Console | None,
    summed: bool = False,
) -> History:
    """Trains over epochs.

    Args:
        pipe: the trained object.
        x: inputs of all rows.
        y: targets of all rows.
        epochs: number of passes over the rows.
        batch_size: rows of a step; the last step of an epoch has the remaining rows.
        validation_data: inputs and targets whose loss is computed after each epoch.
        shuffle: whether each epoch uses a new row order, the same on all ranks.
        seed: of these orders.
        least: minimum number of rows of a batch; a smaller rest of an epoch is skipped.
        least_evaluated: the same for batches of the validation data.
        compare: compares the arguments of all ranks, once they are known to be right on this one.
        ended: called before the first step and after each step; if it returns True, training stops. The history does
            not include an incomplete epoch.
        console: where progress is shown; None for nowhere.
        summed: whether losses are sums over rows.

    Raises:
        ArgumentError: inputs and targets have different numbers of rows, or too few for one batch, or the validation
            data is no pair.
    """
    rows = _enough("a batch", (x, y), batch_size, least)
    if validation_data is not None:
        _enough("a batch of the validation data", _pair(validation_data), batch_size, least_evaluated)
    compare()
    history = History()
    if ended():
        return history
    for epoch in range(epochs):
        begin, total = time.perf_counter(), 0.0
        luck = torch.Generator("cpu").manual_seed(seed + pipe.epochs)
        order = torch.randperm(rows, generator=luck, device="cpu") if shuffle else None
        parts = list(_parts(rows, batch_size, least))
        for part in _shown(parts, f"epoch {epoch + 1}/{epochs}", console):
            chosen = part if order is None else order[part]
            loss = pipe.train_batch(taken(x, chosen), taken(y, chosen))
            total += loss if summed else loss * (part.stop - part.start)
            if ended():
                return history
        pipe.epochs += 1
        history.loss.append(total if summed else total / parts[-1].stop)
        text = f"epoch {epoch + 1}/{epochs}: loss {history.loss[-1]:.4f}"
        if validation_data is not None:
            found = _evaluated(pipe.eval_batch, *validation_data, batch_size, least_evaluated, summed=summed)
            history.val_loss.append(found)
            text += f", validation loss {history.val_loss[-1]:.4f}"
        if console is not None:
            console.print(f"{text}, {time.perf_counter() - begin:.1f} s", highlight=False)
    return history


def _enough(what: str, values: Any, batch_size: int, least: int) -> int:
    rows = rows_of(values)
    if min(rows, batch_size) < least:
        raise ArgumentError(f"{what} needs at least {least} rows, and gets {min(rows, batch_size)}: give more")
    return rows


def _pair(validation_data: Any) -> Any:
    if len(validation_data) != 2:
        raise ArgumentError(f"validation_data is a pair of inputs and targets, and not {len(validation_data)} things")
    return validation_data


def _evaluated(
    evaluate: Callable[[Any, Any], float], x: Any, y: Any, batch_size: int, least: int, *, summed: bool
) -> float:
    parts = list(_parts(rows_of((x, y)), batch_size, least))
    losses = [evaluate(taken(x, part), taken(y, part)) for part in parts]
    if summed:
        return float(sum(losses))
    return float(
        sum(loss * (part.stop - part.start) for loss, part in zip(losses, parts, strict=True)) / parts[-1].stop
    )


def _parts(rows: int, size: int, least: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        if min(size, rows - start) >= least:
            yield slice(start, min(start + size, rows))


def screen() -> Console:
    """Creates the console for progress output."""
    from rich.console import Console  # imported here to save memory where it is not used

    return Console()


def _shown(parts: list[slice], title: str, console: Console | None) -> Iterator[slice]:
    """Shows a progress bar on a terminal, and removes it at the end."""
    if console is None or not console.is_terminal:
        yield from parts
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(parts, description=title)
