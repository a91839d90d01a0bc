from __future__ import annotations

import math
import subprocess
import sys

import pytest

from coordd.daemon.testimony import in_brief
from coordd.errors import PeerError
from coordd.launch.tracebacks import Tracebacks, traceback_at

STORY = (b"Traceback (most recent call last):", b'  File "a.py", line 1, in <module>', b"ValueError: two", b"lines")


def kept(*said: tuple[int, tuple[bytes, ...]]) -> Tracebacks:
    """What ranks have said at once."""
    tracebacks = Tracebacks()
    for rank, lines in said:
        assert [tracebacks.keep(rank, line, now=5.0) for line in lines] == [True] * len(lines)
    return tracebacks


def test_what_ranks_say_alike_is_told_once():
    other = (*STORY[:2], b"KeyError: 'k'")
    told = kept((3, STORY), (1, STORY), (2, other), (0, other), (7, STORY)).release()
    assert told == [([0, 2], other), ([1, 3, 7], STORY)]


def test_who_says_in_brief_that_another_rank_has_failed_comes_last():
    brief = tuple(in_brief(PeerError(1, "failed: ValueError: two")).encode().splitlines())
    told = kept((0, brief), (1, STORY), (2, brief)).release()
    assert told == [([1], STORY), ([0, 2], brief)]


@pytest.mark.parametrize(
    ("line", "begin"),
    [
        (b"Traceback (most recent call last):", 0),
        (b"80%|###Traceback (most recent call last):", 7),
        (b"80%|###  + Exception Group Traceback (most recent call last):", 7),
        (b"    | Traceback (most recent call last):", None),
        (b"    | Exception Group Traceback (most recent call last):", None),
        (b"Traceback (most recent call last): is what Python says first", None),
        (b'80%|###  File "a.py", line 1', None),
    ],
)
def test_where_a_traceback_begins(line, begin):
    assert traceback_at(line) == begin


def test_lines_of_several_ranks_do_not_mix():
    tracebacks = Tracebacks()
    for line in STORY:
        for rank in range(2):
            assert tracebacks.keep(rank, line, now=5.0)
    assert tracebacks.release() == [([0, 1], STORY)]


def test_other_lines_are_not_kept():
    tracebacks = kept((0, STORY))
    assert not tracebacks.keep(1, b"epoch 1", now=5.0)
    assert 0 in tracebacks
    assert 1 not in tracebacks
    tracebacks.release()
    assert not tracebacks.keep(0, b"epoch 1", now=5.0)


def test_nobody_waits_for_long():
    tracebacks = Tracebacks()
    assert tracebacks.due == math.inf
    for now in (5.0, 5.2, 5.4):
        tracebacks.keep(0, STORY[0], now=now)
    assert tracebacks.due == pytest.approx(5.7)
    for now in (5.6, 5.9):
        tracebacks.keep(1, STORY[0], now=now)
    assert tracebacks.due == pytest.approx(6.0)
    tracebacks.release()
    assert tracebacks.due == math.inf


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("1 / 0", b"Traceback"),
        ("try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError from e", b"Traceback"),
        ("raise ExceptionGroup('', [ValueError()])", b"  + Exception Group"),
        ("1 +", b'  File "<string>"'),
    ],
)
def test_what_python_says_of_an_exception_is_kept_whole(source, first):
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, check=False).stderr.splitlines()
    assert said[0].startswith(first)
    assert kept((0, tuple(said))).release() == [([0], tuple(said))]


def test_stacks_are_no_tracebacks():
    source = "import faulthandler; faulthandler.dump_traceback()"
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, check=False).stderr.splitlines()
    assert len(said) > 1
    assert not any(Tracebacks().keep(0, line, now=0.0) for line in said)
