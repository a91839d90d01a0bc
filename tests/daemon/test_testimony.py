from __future__ import annotations

import linecache
import logging
import re

import pytest

from coordd.daemon.testimony import in_brief
from coordd.errors import PeerError, ShutdownError
from coordd.ops.handles import Handle

FAILED = PeerError(1, "failed: ValueError: bad", "Traceback (most recent call last): …\nValueError: bad\n")


def raised(error: BaseException) -> BaseException:
    """The error, as it is when it has come through coordd and this line."""
    handle: Handle[None] = Handle("w")
    handle.fail(error)
    with pytest.raises(type(error)) as caught:
        handle.result()
    return caught.value


def test_the_line_is_the_one_that_waited_whatever_ran_after_it():
    def wait():
        try:
            raise FAILED  # here
        finally:
            wait.done = True

    with pytest.raises(PeerError) as caught:
        wait()
    number = int(re.search(r":(\d+); ", in_brief(caught.value))[1])
    assert linecache.getline(__file__, number).strip() == "raise FAILED  # here"


def test_it_says_who_has_failed_and_why_and_where_this_rank_was():
    first, second = in_brief(raised(FAILED)).splitlines()
    assert first == "coordd.errors.PeerError: rank 1 failed: ValueError: bad"
    assert second.startswith(f"  this rank was at {__file__}:")
    assert second.endswith("; COORDD_LOG_LEVEL=debug shows the whole traceback")


def test_what_an_operation_in_a_graph_raises_is_of_tensorflow_and_has_ours_in_its_text():
    kind = type("UnknownError", (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"})
    text = "Graph execution error:\n\nPeerError: rank 1 failed: ValueError: bad\nTraceback (most recent call last):\n"
    first, second = in_brief(raised(kind(text))).splitlines()
    assert first == "coordd.errors.PeerError: rank 1 failed: ValueError: bad"
    assert f"this rank was at {__file__}:" in second
    assert not in_brief(raised(kind("MismatchError: ranks disagree")))
    assert not in_brief(raised(ValueError(text)))


def test_notes_are_part_of_it():
    error = PeerError(1, "was ended by SIGTERM")
    error.add_note("in epoch 3")
    assert in_brief(error).splitlines()[:2] == ["coordd.errors.PeerError: rank 1 was ended by SIGTERM", "in epoch 3"]


@pytest.mark.parametrize("error", [ValueError("bad"), ShutdownError("w", (1,)), KeyboardInterrupt()])
def test_it_is_for_victims_of_a_failure_only(error):
    assert not in_brief(raised(error))


def test_what_came_of_something_else_too_needs_its_traceback():
    error = PeerError(1, "was ended by SIGTERM")
    error.__context__ = ValueError("mine")
    assert not in_brief(raised(error))
    error = PeerError(1, "failed: ValueError: bad", "…")
    error.__cause__ = ValueError("mine")
    assert not in_brief(raised(error))


def test_nothing_is_left_out_where_everything_is_logged(caplog):
    caplog.set_level(logging.DEBUG, "coordd")
    assert not in_brief(raised(FAILED))
