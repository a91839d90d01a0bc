from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.launch.frames import LIMIT, TEXT, Ended, Output, Started, Waiting, decode, encode, whole
from coordd.launch.lines import Piece
from coordd.launch.outcome import Outcome

RANKS = st.integers(0, 100_000)
LINES = st.binary(max_size=TEXT).map(lambda text: text.replace(b"\n", b"").replace(b"\r", b""))
WORDS = st.text(st.characters(exclude_characters="\n\x1f", exclude_categories=["Cs"]), max_size=60)
FRAMES = st.one_of(
    st.builds(Output, RANKS, st.sampled_from([1, 2]), st.builds(Piece, LINES, st.sampled_from([b"", b"\r", b"\n"]))),
    st.builds(Started, RANKS, st.from_regex(r"[a-z][a-z0-9.-]{0,60}", fullmatch=True), WORDS),
    st.builds(Waiting, RANKS, st.booleans()),
    st.builds(
        Ended, RANKS, st.builds(Outcome, RANKS, st.integers(0, 64), *[st.booleans()] * 2, WORDS, WORDS, st.booleans())
    ),
)


@given(FRAMES)
def test_a_frame_survives_the_way_as_one_line(frame):
    line = encode(frame)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line) <= LIMIT
    assert decode(line[:-1]) == frame


@given(st.binary(max_size=200))
def test_what_the_launcher_says_is_no_frame(line):
    assert decode(line) is None


@given(FRAMES, st.integers(0, LIMIT), st.binary(max_size=20))
def test_a_torn_frame_does_no_harm(frame, place, noise):
    line = encode(frame)[:-1]
    decode(line[:place] + noise)
    decode(noise + line[place:])


def test_a_long_exception_is_cut_to_fit():
    frame = Ended(3, Outcome(1, exception="ValueError: " + "é" * 5000, last="x\x1fy\nz" * 1000))
    line = encode(frame)
    assert len(line) <= LIMIT
    assert decode(line[:-1]).outcome.exception.startswith("ValueError: é")


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="packet mode is Linux's own")
def test_one_read_returns_one_write_in_packet_mode():
    ear, mouth = os.pipe()
    whole(mouth)
    os.write(mouth, b"one\n")
    os.write(mouth, b"two\n")
    assert [os.read(ear, 4096), os.read(ear, 4096)] == [b"one\n", b"two\n"]
    os.close(ear)
    os.close(mouth)


def test_packet_mode_leaves_what_is_no_pipe_alone(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        whole(file.fileno())
