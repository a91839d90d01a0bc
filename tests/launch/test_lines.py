from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.launch.lines import Lines, Piece

TEXT = st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n", b"\xc3\xa9", b"0123456789"])).map(b"".join)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[first:last] for first, last in pairwise(edges)]


def pieces(chunks: list[bytes], limit: int = 8) -> list[Piece]:
    lines = Lines(limit)
    return [piece for chunk in chunks for piece in lines.feed(chunk)] + lines.flush()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"one\ntwo\n", [(b"one", b"\n"), (b"two", b"\n")]),
        (b"one\r\ntwo", [(b"one", b"\n"), (b"two", b"")]),
        (b"\r 1%\r 2%\n", [(b"", b"\r"), (b" 1%", b"\r"), (b" 2%", b"\n")]),
        (b"a\r\r\n", [(b"a", b"\r"), (b"", b"\n")]),
        (b"a\r", [(b"a", b"\r")]),
        (b"\n\n", [(b"", b"\n"), (b"", b"\n")]),
        (b"0123456789\n", [(b"01234567", b""), (b"89", b"\n")]),
        (b"01234567\n", [(b"01234567", b""), (b"", b"\n")]),
        (b"", []),
    ],
)
def test_lines_end_where_they_should(data, expected):
    assert pieces([data]) == expected


@given(TEXT, st.lists(st.integers(0, 1000)), st.integers(1, 12))
def test_the_pieces_do_not_depend_on_how_the_stream_was_cut(data, places, limit):
    assert pieces(cut(data, places), limit) == pieces([data], limit)


@given(TEXT, st.lists(st.integers(0, 1000)), st.integers(1, 12))
def test_nothing_is_lost_and_nothing_is_too_long(data, places, limit):
    found = pieces(cut(data, places), limit)
    assert b"".join(piece.text + piece.end for piece in found) == data.replace(b"\r\n", b"\n")
    assert all(len(piece.text) <= limit for piece in found)
    assert not any(set(piece.text) & set(b"\r\n") for piece in found)


def test_a_carriage_return_waits_for_the_newline_that_may_follow():
    lines = Lines(80)
    assert lines.feed(b"bar\r") == []
    assert lines.unfinished
    assert lines.feed(b"\n") == [Piece(b"bar", b"\n")]
    assert not lines.unfinished


def test_a_stream_that_falls_quiet_shows_its_unfinished_line():
    lines = Lines(80)
    lines.feed(b"name? ")
    assert lines.flush() == [Piece(b"name? ", b"")]
    assert lines.feed(b"bob\n") == [Piece(b"bob", b"\n")]


def test_a_long_line_takes_linear_time():
    chunk = b"x" * (1 << 20)
    assert len(Lines(1 << 10).feed(chunk)) == 1 << 10
