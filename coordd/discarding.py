"""Why a step is discarded: gathered from all ranks once a flag among the gradients has told them that it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from coordd.errors import CoorddError, DiscardedStepError, brief, is_deadlock
from coordd.handles import Handle
from coordd.operations import Operations
from coordd.process_sets import ProcessSet
from coordd.table import Site, show_site

__all__ = [
    "discarded",
    "error_of",
    "given_up",
    "is_discarded",
    "of_step",
    "past_deadlocks",
    "reduced_already",
    "tell",
]

_LONGEST = 500


def tell(operations: Operations, name: str, reason: str, process_set: ProcessSet) -> Handle[Any]:
    """Starts to gather what ranks have done, from all that take part in the step.

    Args:
        operations: the way to the others.
        name: equal on all ranks.
        reason: what this rank has done, as the end of a sentence; empty if nothing.
        process_set: the ranks that take part.
    """
    line = json.dumps([operations.daemon.world.rank, reason]) + "\n"
    data = np.frombuffer(bytearray(line, "ascii"), np.uint8)
    handle = operations.allgather(data, name=name, process_set=process_set)
    if reason:
        operations.daemon.note_told(handle)
    return handle


def error_of(handle: Handle[Any], optimizer: str = "") -> DiscardedStepError:
    """Waits for what all ranks have told, and makes the error of it."""
    lines = map(json.loads, bytes(handle.result()).decode("ascii").splitlines())
    return discarded([(rank, reason) for rank, reason in lines if reason], optimizer)


def discarded(reasons: Sequence[tuple[int, str]], optimizer: str) -> DiscardedStepError:
    """Makes the error of a step of one of several optimizers."""
    error = DiscardedStepError(reasons)
    error.optimizer = optimizer
    return error


def is_discarded(error: BaseException | None, optimizer: str) -> bool:
    """Whether an error says that a step of this optimizer was discarded; another one's may have to be discarded yet."""
    return isinstance(error, DiscardedStepError) and error.optimizer == optimizer


def given_up(site: Site, error: BaseException | None) -> str:
    """Says, as the end of a sentence, where a script has called `discard_step`, and the error that it has caught."""
    cause = "" if error is None else f" after {brief(error)[:_LONGEST]}"
    return f"has called discard_step() at {show_site(site)}{cause}"


def of_step(error: BaseException, *, own: bool) -> bool:
    """Says whether an error, or one that it was raised from, is of a discarded step, or out of its backward pass.

    Args:
        error: what the script handles.
        own: whether this rank's backward pass has had the step discarded; else one that fails is of a later step.
    """
    return any(isinstance(each, DiscardedStepError) or (own and _of_backward(each)) for each in _origins(error))


def _of_backward(error: BaseException) -> bool:
    """Says whether an error has come out of a backward pass of PyTorch's."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_engine_run_backward":
            return True
        trace = trace.tb_next
    return False


def _origins(error: BaseException | None) -> Iterator[BaseException]:
    """Lists an error, and those that it was raised from, or while they were handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextmanager
def past_deadlocks() -> Iterator[None]:
    """Goes on after an error because ranks have waited for each other."""
    try:
        yield
    except CoorddError as error:
        if not is_deadlock(error):
            raise


def reduced_already() -> CoorddError:
    """Makes the error of a rank that would discard a step whose gradients the other ranks have."""
    text = (
        "discard_step() has come too late: the gradients of this step are reduced, and other ranks may have used them. "
        "Call it for what fails before backward() returns; to leave a step out after that, let all ranks decide alike, "
        "and call optimizer.zero_grad() instead of optimizer.step(). Of several backward passes of a step, put all but "
        "the last one into optimizer.no_sync()"
    )
    return CoorddError(text)
