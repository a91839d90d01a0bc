"""Reasons for a discarded step: gathered from all ranks after a flag among the gradients has reported the discard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from coordd.daemon.operations import Operations
from coordd.errors import CoorddError, DiscardedStepError, brief
from coordd.negotiation.tensor_table import Site, show_site
from coordd.ops.handles import Handle
from coordd.ops.process_sets import ProcessSet

__all__ = [
    "discarded",
    "error_of",
    "given_up",
    "is_discarded",
    "of_step",
    "reduced_already",
    "tell",
]

_LONGEST = 500


def tell(operations: Operations, name: str, reason: str, process_set: ProcessSet) -> Handle[Any]:
    """Starts to gather the reasons of all ranks that take part in the step.

    Args:
        operations: the operations of this rank.
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
    """Waits for the reasons of all ranks, and returns the error made of them."""
    lines = map(json.loads, bytes(handle.result()).decode("ascii").splitlines())
    return discarded([(rank, reason) for rank, reason in lines if reason], optimizer)


def discarded(reasons: Sequence[tuple[int, str]], optimizer: str) -> DiscardedStepError:
    """Returns the error of a discarded step of one of several optimizers."""
    error = DiscardedStepError(reasons)
    error.optimizer = optimizer
    return error


def is_discarded(error: BaseException | None, optimizer: str) -> bool:
    """Returns whether an error reports a discarded step of this optimizer; other optimizers' steps need their own."""
    return isinstance(error, DiscardedStepError) and error.optimizer == optimizer


def given_up(site: Site, error: BaseException | None) -> str:
    """Describes, as the end of a sentence, where a script called `discard_step`, and the error that it caught."""
    cause = "" if error is None else f" after {brief(error)[:_LONGEST]}"
    return f"has called discard_step() at {show_site(site)}{cause}"


def of_step(error: BaseException, *, own: bool, cause: BaseException | None = None) -> bool:
    """Returns whether an error, or a cause of it, is from a discarded step or from that step's backward pass.

    Args:
        error: the error that the script handles.
        own: whether this rank's backward pass caused the discard; otherwise a failing one belongs to a later step.
        cause: the error for which this rank has discarded the step, if known.
    """
    return any(
        isinstance(each, DiscardedStepError) or each is cause or (own and _of_backward(each))
        for each in _origins(error)
    )


def _of_backward(error: BaseException) -> bool:
    """Returns whether an error was raised inside a backward pass of PyTorch."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_engine_run_backward":
            return True
        trace = trace.tb_next
    return False


def _origins(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its chain of causes and contexts, also those that ``raise ... from None`` does not show."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def reduced_already() -> CoorddError:
    """Returns the error of a rank that discards a step too late: other ranks already have its gradients."""
    text = (
        "discard_step() has come too late: the gradients of this step are reduced, and other ranks may have used them. "
        "Call it for what fails before backward() returns; to leave a step out after that, let all ranks decide alike, "
        "and call optimizer.zero_grad() instead of optimizer.step(). Of several backward passes of a step, put all but "
        "the last one into optimizer.no_sync()"
    )
    return CoorddError(text)
