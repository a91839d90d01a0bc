"""Errors that name the rank, the cause and what to do next.

Every exception takes data and composes its own text. All of them are `CoorddError`, hence `RuntimeError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

__all__ = [
    "ArgumentError",
    "ChangedError",
    "ConfigError",
    "CoorddError",
    "DeadlockError",
    "DiscardedStepError",
    "DuplicateNameError",
    "ForkedProcessError",
    "HandleError",
    "MismatchError",
    "NonFiniteError",
    "NotInitializedError",
    "PeerError",
    "RefusedError",
    "RemoteTraceback",
    "ShutdownError",
    "StartError",
    "TimelineError",
    "WorkerProcessError",
]

_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class CoorddError(RuntimeError):
    """Base class of all errors that coordd raises."""

    ag_pass_through = True
    """For TensorFlow's AutoGraph: it re-raises the error unchanged, not as an error of another class."""
    _keras_call_info_injected = True
    """For Keras, which otherwise turns an error that passes through a layer into a plain `RuntimeError`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies the text: the arguments that it was composed from no longer exist."""
        return _copy, (type(self), self.args, vars(self))


def _copy(kind: type[CoorddError], args: tuple[object, ...], state: dict[str, object]) -> CoorddError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


class ChangedError(CoorddError):
    """A tensor was written to while it was in flight (``check_in_flight``)."""

    def __init__(self, name: str, site: str) -> None:
        super().__init__(
            f"{name!r}, submitted at {site}, was changed before its data moved: wait for its handle first, or submit a "
            "copy"
        )


class RefusedError(CoorddError):
    """Another rank raised an error in a call that all ranks make together, or rejected its part of an operation.

    Only this call, such as `DistributedOptimizer`, or this operation fails: the daemon goes on.

    Attributes:
        rank: the rank that raised an error.
        reason: what it raised and where, as the end of a sentence that begins with that rank.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank
        self.reason = reason


class ConfigError(CoorddError, ValueError):
    """A setting that cannot be used."""

    @classmethod
    def illegal(cls, source: str, value: object, legal: str) -> Self:
        """Names the setting, its value and the legal values."""
        return cls(f"{source}={value!r} is not usable: give {legal}")

    @classmethod
    def unknown(cls, names: Sequence[str], known: Sequence[str]) -> Self:
        """Names the settings that do not exist, and those that do."""
        return cls(f"no such setting: {', '.join(names)}; there are {', '.join(known)}")


class ArgumentError(CoorddError, ValueError):
    """An operation was given arguments that it does not support."""


class HandleError(CoorddError, ValueError):
    """A value that is not a handle of this process was waited for."""

    def __init__(self, handle: object) -> None:
        super().__init__(
            f"unknown handle {handle!r}: pass what an asynchronous operation of this process returned, once"
        )


class NotInitializedError(CoorddError, ValueError):
    """coordd was used before `init`, or after `shutdown`."""

    def __init__(self) -> None:
        super().__init__(
            "coordd has not been initialized; use hvd.init(), or cd.init(), first (and not after shutdown(): make what "
            "was made before it, such as optimizers and process sets, anew after init())"
        )


class DeadlockError(CoorddError):
    """coordd's own thread was asked to wait for something that only this thread can complete."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} would block coordd's own thread, which alone could complete it: done callbacks, compressors and "
            "functions that convert results run on that thread, so start operations there with the _async functions "
            "and add_done_callback, and wait for them, or leave, in a thread of the script"
        )


class ForkedProcessError(CoorddError):
    """coordd was used in a child made by `fork`, which has no daemon."""

    def __init__(self) -> None:
        super().__init__(
            "coordd was initialized before this process was forked, and neither MPI nor the daemon survives a fork: "
            "use coordd in the parent only, or start workers with the 'spawn' or 'forkserver' method"
        )


class WorkerProcessError(CoorddError):
    """`init` was called in a worker of a rank, such as a data loader's that imports the script again."""

    def __init__(self) -> None:
        super().__init__(
            "this process is a worker of one that has called init(), and is no rank: put what only the script itself "
            "should do, init() included, under `if __name__ == '__main__':`"
        )


class StartError(CoorddError):
    """The ranks could not find each other."""

    @classmethod
    def given_up(cls, seconds: float) -> Self:
        """The error of a rank that has waited as long as ``start_seconds`` allows."""
        return cls(f"it has given up waiting for the other ranks after {seconds:g} s (start_seconds)")


class ShutdownError(CoorddError):
    """An operation was pending, or was started, while the job was shutting down.

    Attributes:
        ranks: the ranks that had left; empty means this rank.
        reason: what those ranks did, as the end of a sentence that begins with their names.
    """

    def __init__(self, name: str, ranks: Sequence[int] = (), *, message: bool = False) -> None:
        """Names the incomplete message or collective, and the ranks that had left; empty means this one."""
        self.ranks = tuple(ranks)
        advice = _MESSAGES if message and not _PIPELINE.fullmatch(name) else _advice(name)
        self.reason = f"left the job while others still waited for {name!r}; {advice}"
        mine = f"{name!r} was not completed because this rank called shutdown() before it was done"
        super().__init__("coordd has been shut down: " + (f"{ranks_text(ranks)} {self.reason}" if ranks else mine))


_PIPELINE = re.compile(r"(opt\d+\.)?pipeline\.(given|loss|outputs|\d+\.[FB]\d+\..*)")
"""Names of the operations that ranks wait for in a pipeline's calls."""
_MESSAGES = "give every send() its recv(), and every recv() its send(), before a rank ends or calls shutdown()"


def _advice(name: str) -> str:
    """Returns advice on how all ranks end together."""
    if _PIPELINE.fullmatch(name):
        return (
            "all ranks of a pipeline must make the same calls with the same batches, so no sampler may deal rows out "
            "to ranks, and none may stop before the others"
        )
    return (
        "give all ranks the same number of batches and operations (in PyTorch by DistributedSampler, drop_last=True; "
        "in Keras by shard(), and set stop_training on all ranks), or end the loop with join() on all ranks; wrap the "
        "optimizer on all ranks, and call shutdown() on none before the others; where a rank of PyTorch skips a batch "
        "that has failed, call optimizer.discard_step() there"
    )


class DiscardedStepError(CoorddError):
    """The gradients of a step are not those of all ranks, so no rank may use them.

    Attributes:
        ranks: the ranks that caused it.
        optimizer: the name prefix of the optimizer of the step, if there may be several.
    """

    optimizer = ""

    def __init__(self, reasons: Sequence[tuple[int, str]]) -> None:
        """Composes the text.

        Args:
            reasons: each causing rank, and what it has done, as the end of a sentence.
        """
        self.ranks = tuple(rank for rank, _ in reasons)
        told = "; ".join(f"rank {rank} {reason}" for rank, reason in reasons) or "ranks have made different passes"
        super().__init__(
            f"this step is discarded on all ranks, and its gradients are cleared: {told}. To go on, catch this error "
            "and begin the next step with optimizer.zero_grad()"
        )


class DuplicateNameError(CoorddError, ValueError):
    """A name was submitted while an operation of the same name was still in flight."""

    def __init__(self, name: str, *, site: str, first_site: str) -> None:
        super().__init__(
            f"a tensor with the same name as another tensor that is currently being processed: {name!r}, submitted at "
            f"{site}, is still in flight from {first_site}; wait for the first one, or use a different tensor name "
            "(typical causes: two backward passes without step(), two optimizers on one parameter)"
        )


class MismatchError(CoorddError):
    """Ranks disagree about one tensor; nothing was moved, and the daemon goes on."""

    def __init__(
        self, name: str, attribute: str, values: Iterable[tuple[str, Sequence[int], Sequence[str]]], *, phrase: str = ""
    ) -> None:
        """Composes the text.

        Args:
            name: the tensor.
            attribute: what differs, such as ``"shape"``.
            values: for each distinct value its text, the ranks that gave it, and where they submitted it.
            phrase: beginning of the text: Horovod's wording, which people search their logs for.
        """
        self.name = name
        self.attribute = attribute
        self.when_heard: Callable[[], None] | None = None
        told = "; ".join(
            f"{ranks_text(ranks)}: {value}" + (f" at {', '.join(sites)}" if sites else "")
            for value, ranks, sites in values
        )
        super().__init__(f"{phrase and phrase + ': '}ranks disagree on the {attribute} of {name!r} ({told})")

    @classmethod
    def told(cls, name: str, attribute: str, text: str) -> Self:
        """Creates the error with the coordinator's text."""
        error = cls(name, attribute, ())
        error.args = (text,)
        return error


class RemoteTraceback(Exception):  # noqa: N818 - it carries another rank's traceback, it is never raised alone
    """The traceback of the rank that failed, as the cause of a `PeerError` here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


def is_deadlock(error: BaseException | None) -> bool:
    """Returns whether an operation failed because ranks wait for each other: some may still submit it."""
    return isinstance(error, MismatchError) and error.attribute == "order"


def note_heard(error: BaseException | None) -> None:
    """Notes that the script was notified of an error; after a deadlock, names start a new count from here on."""
    if isinstance(error, MismatchError) and error.when_heard is not None:
        error.when_heard()


class PeerError(CoorddError):
    """Another rank failed, so nothing that needs it can complete."""

    def __init__(self, rank: int, reason: str, traceback: str = "") -> None:
        """Keeps the culprit's rank, the reason in one line and its traceback, which becomes the cause."""
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        if traceback:
            self.__cause__ = RemoteTraceback(traceback)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.reason, self.traceback)


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats ranks with a leading noun: ``ranks 0-3, 7``."""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {spans(ranks)}"


def brief(error: BaseException) -> str:
    """Formats an exception in one line, without terminal colours: its type as in a traceback, and its text."""
    kind = type(error)
    home = "" if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}."
    text = " ".join(_COLOUR.sub("", str(error)).split())
    return f"{home}{kind.__qualname__}: {text}".removesuffix(": ")


def spans(ranks: Iterable[int]) -> str:
    """Formats ranks as ranges: ``0-3, 7``."""
    pieces: list[list[int]] = []
    for rank in sorted(ranks):
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)


class NonFiniteError(CoorddError, ArithmeticError):
    """A gradient of this rank, or a reduced one, contains an infinity or a NaN."""

    def __init__(self, name: str, rank: int | None, *, nans: int, infinities: int) -> None:
        where = "of all ranks" if rank is None else f"on rank {rank}"
        super().__init__(f"the gradient of {name!r} {where} is not finite: {nans} NaN, {infinities} infinite")


class TimelineError(CoorddError):
    """A recording that cannot be read."""

    def __init__(self, place: object, reason: str) -> None:
        super().__init__(f"no timeline can be made of {place}: {reason}")
