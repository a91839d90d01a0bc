"""Errors say who, what and what next, and survive pickling, for users send them between processes."""

from __future__ import annotations

import pickle
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd import errors
from coordd.errors import (
    ArgumentError,
    ChangedError,
    ConfigError,
    CoorddError,
    DeadlockError,
    DiscardedStepError,
    DuplicateNameError,
    ForkedProcessError,
    HandleError,
    MismatchError,
    NonFiniteError,
    NotInitializedError,
    PeerError,
    RefusedError,
    ShutdownError,
    StartError,
    TimelineError,
    WorkerProcessError,
    brief,
    spans,
)

EVERY = [
    ArgumentError("no such rank"),
    ChangedError("w", "a.py:1"),
    ConfigError.illegal("COORDD_FUSION_MB", "x", "a number"),
    ConfigError.unknown(["fuse"], ["fusion_mb"]),
    CoorddError("bad"),
    DeadlockError("waiting for 'w'"),
    DiscardedStepError([(1, "could not finish its backward pass at a.py:1")]),
    DuplicateNameError("w", site="a.py:2", first_site="a.py:1"),
    ForkedProcessError(),
    HandleError(7),
    MismatchError("w", "shape", [("(2,)", [0], ["a.py:1"]), ("(3,)", [1], [])]),
    NonFiniteError("w", 1, nans=2, infinities=0),
    NotInitializedError(),
    PeerError(1, "raised ValueError", "Traceback (most recent call last): …"),
    RefusedError(1, "refused DistributedOptimizer at a.py:1: ValueError: bad"),
    ShutdownError("w", (1, 2)),
    ShutdownError("w"),
    StartError("too late"),
    TimelineError("there", "no ranks"),
    WorkerProcessError(),
]


def test_every_error_is_tried_and_is_a_coordd_error():
    classes = {getattr(errors, name) for name in errors.__all__} - {errors.RemoteTraceback}
    assert {type(error) for error in EVERY} == classes
    assert all(issubclass(each, CoorddError) and issubclass(each, RuntimeError) for each in classes)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling(error):
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_an_error_is_one_line(error):
    assert str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("kind", [ArgumentError, ConfigError, HandleError, NotInitializedError])
def test_bad_input_is_a_value_error_as_in_horovod(kind):
    assert issubclass(kind, ValueError)


def test_a_mismatch_names_each_value_who_has_it_and_where_it_comes_from():
    values = [("(2,)", [0, 1, 2, 5], ["a.py:1", "a.py:9"]), ("(3,)", [4], [])]
    error = MismatchError("w", "shape", values)
    assert str(error) == "ranks disagree on the shape of 'w' (ranks 0-2, 5: (2,) at a.py:1, a.py:9; rank 4: (3,))"
    assert (error.name, error.attribute) == ("w", "shape")


def test_a_mismatch_can_be_told_in_the_coordinators_words():
    error = MismatchError.told("w", "shape", "as the coordinator says")
    assert (str(error), error.name, error.attribute) == ("as the coordinator says", "w", "shape")


def test_a_peers_traceback_is_the_cause():
    error = PeerError(3, "raised KeyError: 'x'", "Traceback …\n  File train.py, line 9\nKeyError: 'x'\n")
    assert (str(error), error.rank, error.reason) == ("rank 3 raised KeyError: 'x'", 3, "raised KeyError: 'x'")
    shown = "".join(traceback.format_exception(error))
    assert "File train.py, line 9" in shown
    assert "direct cause" in shown


def test_a_peer_without_a_traceback_has_no_cause():
    assert PeerError(3, "died").__cause__ is None


@pytest.mark.parametrize(("ranks", "who"), [((1,), "rank 1 left"), ((0, 1, 2), "ranks 0-2 left"), ((), "this rank")])
def test_a_shutdown_says_who_left(ranks, who):
    error = ShutdownError("w", ranks)
    assert who in str(error)
    assert "'w'" in str(error)
    assert error.ranks == ranks


def test_a_shutdown_tells_pipelines_something_else_than_replicas():
    for name in ("pipeline.given", "opt2.pipeline.loss", "opt1.pipeline.12.F3.0>1"):
        text = str(ShutdownError(name, (1,)))
        assert "the same calls with the same batches" in text
        assert "DistributedSampler" not in text
    for name in ("w", "pipeline.0.weight", "given"):
        assert "DistributedSampler" in str(ShutdownError(name, (1,)))


@pytest.mark.parametrize(
    ("ranks", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((7, 2, 3, 4, 0), "0, 2-4, 7"), (range(100), "0-99")]
)
def test_ranks_are_written_shortly(ranks, text):
    assert spans(ranks) == text


@given(st.sets(st.integers(0, 200)))
def test_short_ranks_can_be_read_back(ranks):
    pieces = [piece.split("-") for piece in spans(ranks).split(", ") if piece]
    assert {rank for piece in pieces for rank in range(int(piece[0]), int(piece[-1]) + 1)} == ranks


def test_an_exception_in_one_line_is_as_a_traceback_ends_without_notes_and_colours():
    error = ArithmeticError("calling Layer\n\n\x1b[1man odd batch\x1b[0m")
    error.add_note("a note")
    assert brief(error) == "ArithmeticError: calling Layer an odd batch"
    assert brief(ArgumentError("no")) == "coordd.errors.ArgumentError: no"
    assert brief(KeyboardInterrupt()) == "KeyboardInterrupt"
