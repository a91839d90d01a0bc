"""Has one rank raise an error somewhere inside a call that all ranks make together, and looks what the others hear.

A point is the first time that a line of coordd's is reached within the collective call: each ``raise``, collective and
step is such a line. Ranks are threads, and the rank that fails then does nothing more, as a script that catches the
error and ends, or sleeps. The stall check is to be off, for it would let the others hear in the end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import pytest

from coordd import errors
from coordd.daemon import daemon, message_queue, shared_state, wakeup
from coordd.errors import CoorddError, PeerError, RefusedError
from coordd.negotiation import tensor_table
from coordd.ops import handles, process_sets
from coordd.parallel import collective_calls
from tests.local_ranks import LocalRanks, stacks

__all__ = ["EVERY", "InjectedError", "check_all"]

PATIENCE = 30.0
"""Seconds that a call may take on a busy machine."""

SECONDS = 10.0
"""Seconds in which all must have heard: two are promised, on a machine that does nothing else."""

_TURNS = 12
EVERY = [
    pytest.param(turn, marks=[pytest.mark.sweep, pytest.mark.slow], id=f"{turn} of {_TURNS}") for turn in range(_TURNS)
]
"""All points, which takes minutes, so in several turns; a part between 0 and 1 tries some."""

_FOLDERS = tuple(os.sep + name for name in ("coordd", "coordd_torch", "coordd_tensorflow", "coordd_keras"))
_MECHANISM = (collective_calls, daemon, message_queue, wakeup, shared_state, handles, process_sets, errors)
"""What tells the others cannot be what fails."""
_SUBMISSION = (tensor_table,)
"""What is reached while an operation is submitted; an error in there ends the job, see `test_broken_off`."""
_EXCLUDED = frozenset(module.__file__ for module in (*_MECHANISM, *_SUBMISSION))
_FINALIZER = weakref.finalize.__call__.__code__
"""What is called as an object goes away; Python ignores an error in there."""
_EXIT = collective_calls.CollectiveCall.__exit__.__code__
_ENTER = collective_calls.CollectiveCall.__enter__.__code__

Start = Callable[[], AbstractContextManager[LocalRanks]]
Call = Callable[[int], Any]
Make = Callable[[int], Call]
TraceFunction = Callable[[FrameType, str, object], object]


class InjectedError(Exception):
    """What the rank raises."""


class _Tracer:
    """Counts lines that are reached between entering and leaving the collective call; raises at one of them."""

    def __init__(self, point: int = -1) -> None:
        self.seen: dict[tuple[CodeType, int], None] = {}
        self.raised: float | None = None
        self._point = point
        self._inside = False
        self._entered: set[tuple[CodeType, int]] = set()
        """Where calls are entered: Python reaches that line again just before it leaves one, and nothing runs there."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        code = frame.f_code
        if code is _EXIT:
            self._inside = False
        elif code is _ENTER:
            if frame.f_back is not None:
                self._entered.add((frame.f_back.f_code, frame.f_back.f_lineno))
            return self._enter
        elif _ours(code) and not _in_finalizer(frame):
            return self._reach
        return None

    def _enter(self, frame: FrameType, event: str, argument: object) -> TraceFunction:
        self._inside = event == "return"
        return self._enter

    def _reach(self, frame: FrameType, event: str, argument: object) -> TraceFunction:
        place = frame.f_code, frame.f_lineno
        if event == "line" and self._inside and place not in self.seen and place not in self._entered:
            self.seen[place] = None
            if len(self.seen) - 1 == self._point:
                self.raised = time.monotonic()
                raise InjectedError(f"at {told(place)}")
        return self._reach


def told(place: tuple[CodeType, int]) -> str:
    """A line, for people."""
    code, line = place
    return f"{code.co_qualname}, {Path(code.co_filename).name}:{line}"


def sample(points: int, part: float) -> list[int]:
    """Chooses a part of the points, always the same ones, or those of a turn if that is a whole number."""
    if isinstance(part, int):
        return [*range(part, points, _TURNS)]
    return sorted(Random(points).sample(range(points), max(1, round(points * part))))


def _ours(code: CodeType) -> bool:
    excluded = code.co_filename in _EXCLUDED or code.co_name == "__exit__" or code.co_name[0] == "<"
    return not excluded and any(each + os.sep in code.co_filename for each in _FOLDERS)


def _in_finalizer(frame: FrameType | None) -> bool:
    """Says whether an object's finalizer has called this, directly or not."""
    while frame is not None and frame.f_code is not _FINALIZER:
        frame = frame.f_back
    return frame is not None


def _failing(call: Call, rank: int, tracer: _Tracer) -> BaseException | None:
    """Makes a call, and returns what it raises."""
    sys.settrace(tracer)
    try:
        call(rank)
    except (InjectedError, CoorddError) as error:
        return error
    finally:
        sys.settrace(None)
    return None


@dataclass
class _Trial:
    """What came of an error at one point: each rank's error, and when the last of them was raised."""

    point: int
    tracer: _Tracer
    errors: list[BaseException | None]
    ended: float = 0.0

    @property
    def ended_the_job(self) -> bool:
        """Whether the ranks cannot go on together."""
        return any(isinstance(error, PeerError) for error in self.errors)

    def raised_within(self, seconds: float) -> bool:
        """Whether all ranks had heard so many seconds after the error."""
        return self.tracer.raised is None or self.ended - self.tracer.raised < seconds


def check_all(start: Start, make: Make, rank: int, part: float = 0.1) -> list[str]:
    """Has a rank fail at every point, or at a part of them; all other ranks must be told, and no call may hang.

    After each error all ranks make what they need anew, and at the end the call must succeed. Where an error ends the
    job, a new one begins.

    Args:
        start: starts a world.
        make: makes, on each rank, what the call needs, and returns the call.
        rank: which one fails.
        part: of the points, between 0 and 1, or the number of a turn.

    Returns:
        all points, as text.
    """
    with start() as ranks:
        names = _points(ranks, make, rank)
    left = sample(len(names), part)
    while left:
        with start() as ranks:
            trials = _try_all(ranks, make, rank, left, names)
        for trial in trials:
            _judge(names[trial.point], rank, trial)
        left = left[len(trials) :]
    return names


def _points(ranks: LocalRanks, make: Make, rank: int) -> list[str]:
    """Finds all points of a call that succeeds."""
    tracer = _Tracer()

    def body(each: int) -> None:
        call = make(each)
        sys.settrace(tracer if each == rank else None)
        try:
            call(each)
        finally:
            sys.settrace(None)

    ranks.each(body, seconds=PATIENCE)
    return [told(place) for place in tracer.seen]


def _try_all(ranks: LocalRanks, make: Make, rank: int, points: list[int], names: list[str]) -> list[_Trial]:
    """Has a rank fail at these points, one after the other, up to the first that ends the job."""
    together = threading.Barrier(len(ranks))
    trials: list[_Trial] = []

    def body(each: int) -> None:
        for point in points:
            if each == rank:
                trials.append(_Trial(point, _Tracer(point), [None] * len(ranks)))
            call = make(each)
            together.wait(PATIENCE)
            trial = trials[-1]
            trial.errors[each] = _failing(call, each, trial.tracer if each == rank else _Tracer())
            trial.ended = max(trial.ended, time.monotonic())
            together.wait(PATIENCE)
            if trial.ended_the_job:
                return
        make(each)(each)

    try:
        ranks.each(body, seconds=PATIENCE * 60)
    except threading.BrokenBarrierError:
        pytest.fail(f"a rank hangs when rank {rank} fails {names[trials[-1].point]}\n{stacks()}", pytrace=False)
    return trials


def _judge(point: str, rank: int, trial: _Trial) -> None:
    """Looks what the ranks have raised, and how long it took."""
    errors = trial.errors
    where = f"rank {rank} fails in {point}; the ranks raise {errors!r}"
    alike = len({repr(error) for error in errors}) == 1  # of a user's metric, say, coordd makes one error on all ranks
    assert alike or errors[rank] is not None, where
    for each, error in enumerate(errors):
        if not alike and each != rank:
            assert isinstance(error, RefusedError | PeerError), where
            assert error.rank == rank, where
    assert trial.raised_within(SECONDS), f"{where}; after {trial.ended - (trial.tracer.raised or 0.0)} s"
