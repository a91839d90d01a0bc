from __future__ import annotations

import io
import os

import pytest

from coordd.launch.frames import Output
from coordd.launch.lines import Piece
from coordd.launch.logs import Logs
from coordd.launch.screen import Screen, Sink

CLEAR = "\r\x1b[2K"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Both:
    """A screen whose two streams are read together, as a terminal shows them."""

    def __init__(self, *, terminal=False, logs=None, **options):
        self.file = io.BytesIO()
        self.clock = Clock()
        sinks = (Sink(self.file, terminal=terminal, columns=20, **options) for _ in range(2))
        self.screen = Screen(*sinks, logs=logs, clock=self.clock)

    def show(self, *pieces, rank=0, stream=1):
        for text, end in pieces:
            self.screen.show(Output(rank, stream, Piece(text.encode(), end.encode())))
        return self

    @property
    def text(self):
        return self.file.getvalue().decode()


def test_each_line_stands_under_its_rank():
    both = Both().show(("one", "\n"), rank=0).show(("two", "\n"), rank=13, stream=2)
    assert both.text == "[0] one\n[13] two\n"


def test_ranks_cannot_break_each_others_lines():
    both = Both().show(("lo", "")).show(("other", "\n"), rank=1).show(("ss", "\n"))
    assert both.text == "[1] other\n[0] loss\n"


def test_a_line_that_never_ends_is_shown_at_the_end():
    both = Both().show(("partial", ""))
    both.screen.finish()
    both.screen.finish()
    assert both.text == "[0] partial\n"


def test_on_a_terminal_an_unfinished_line_gives_way_to_a_finished_one():
    both = Both(terminal=True).show(("10%", "\r")).show(("epoch", "\n"), rank=1)
    assert both.text == f"[0] 10%{CLEAR}[1] epoch\n[0] 10%"
    both.show(("20%", "\n"))
    assert both.text.endswith(f"[0] 10%{CLEAR}[0] 20%\n")


def test_on_a_terminal_a_bar_is_redrawn_in_place_and_only_if_it_changed():
    both = Both(terminal=True).show(("", "\r"), (" 1%", ""), ("", "\r"), (" 2%", ""), ("", "\n"))
    assert both.text == f"[0]  1%{CLEAR}[0]  2%{CLEAR}[0]  2%\n"


def test_on_a_terminal_a_drawn_line_is_no_wider_than_that():
    both = Both(terminal=True).show(("x" * 50, "\r"))
    assert len(both.text) == 19
    both.show(("", "\n"))
    assert both.text.endswith("[0] " + "x" * 50 + "\n")


def test_elsewhere_a_bar_is_shown_when_it_is_done_and_now_and_then():
    both = Both().show((" 1%", "\r"), (" 2%", "\r"))
    assert not both.text
    both.clock.now = 11.0
    both.show((" 3%", "\r"), (" 4%", "\r"))
    assert both.text == "[0]  3%\n"
    both.show(("100%", "\r"), ("", "\n"))
    assert both.text == "[0]  3%\n[0] 100%\n"


def test_colours_are_for_terminals_that_want_them():
    assert Both(terminal=True, colour=True).show(("x", "\n"), rank=1).text == "\x1b[33m[1]\x1b[0m x\n"
    assert Both(terminal=True).show(("x", "\n"), rank=1).text == "[1] x\n"


def test_without_prefix_lines_are_as_they_were():
    file = io.BytesIO()
    sink = Sink(file, terminal=False)
    Screen(sink, sink, prefix=False).show(Output(3, 1, Piece(b"\xff\xfe", b"\n")))
    assert file.getvalue() == b"\xff\xfe\n"


def test_the_launcher_speaks_between_the_lines():
    both = Both(terminal=True).show(("10%", "\r"))
    both.screen.say("coordd: hello")
    both.screen.pass_on(1, b"mpirun says")
    assert both.text == f"[0] 10%{CLEAR}coordd: hello\n[0] 10%{CLEAR}mpirun says\n[0] 10%"


def test_an_endless_line_is_cut_rather_than_kept():
    both = Both().show(*[("x" * 1000, "")] * 200)
    assert both.text.count("\n") == 3


STORY = [("Traceback (most recent call last):", "\n"), ("ValueError: bad", "\n")]


def test_ranks_that_fail_alike_are_shown_once_when_they_are_quiet():
    both = Both()
    for rank in (2, 0, 1):
        both.show(*STORY, rank=rank, stream=2)
    both.show(("epoch", "\n"), rank=3)
    both.screen.settle()
    assert both.text == "[3] epoch\n"
    both.clock.now = both.screen.due
    both.screen.settle()
    both.screen.settle()
    told = "[0] Traceback (most recent call last):\n[0] ValueError: bad\ncoordd: the same on ranks 1-2\n"
    assert both.text == f"[3] epoch\n{told}"


def test_two_ranks_that_fail_alike_at_the_end_are_shown_once_and_logged_twice(tmp_path):
    logs = Logs(tmp_path)
    both = Both(logs=logs)
    for piece in STORY:
        both.show(piece, rank=0, stream=2).show(piece, rank=1, stream=2)
    both.screen.finish()
    logs.close()
    assert both.text.endswith("[0] ValueError: bad\ncoordd: the same on rank 1\n")
    assert (tmp_path / "rank.0.log").read_text("utf-8") == (tmp_path / "rank.1.log").read_text("utf-8")


def test_the_cause_is_shown_before_what_it_meant_to_the_others():
    both = Both()
    for rank in (0, 2, 3):
        both.show(("coordd.errors.PeerError: rank 1 failed: ValueError: bad", "\n"), rank=rank, stream=2)
        both.show(("  this rank was at a.py:3", "\n"), rank=rank, stream=2)
    both.show(*STORY, rank=1, stream=2)
    both.screen.finish()
    assert both.text.splitlines() == [
        "[1] Traceback (most recent call last):",
        "[1] ValueError: bad",
        "[0] coordd.errors.PeerError: rank 1 failed: ValueError: bad",
        "[0]   this rank was at a.py:3",
        "coordd: the same on ranks 2-3",
    ]


@pytest.mark.parametrize("first", [STORY[0][0], "  + Exception Group " + STORY[0][0]])
def test_a_traceback_that_interrupts_a_progress_bar_has_lines_of_its_own(first, tmp_path):
    logs = Logs(tmp_path)
    both = Both(logs=logs)
    for rank in range(2):
        both.show((" 10%", "\r"), (f" {rank}0%{first}", "\n"), STORY[1], rank=rank, stream=2)
    both.screen.finish()
    logs.close()
    told = f"[0]  00%\n[1]  10%\n[0] {first}\n[0] ValueError: bad\ncoordd: the same on rank 1\n"
    assert both.text == told
    assert (tmp_path / "rank.0.log").read_text("utf-8").startswith(f" 00%{first}\n")


def test_a_rank_that_goes_on_after_a_traceback_is_shown_in_order():
    both = Both().show(*STORY, stream=2).show(("going on", "\n"))
    assert both.text == "[0] Traceback (most recent call last):\n[0] ValueError: bad\n[0] going on\n"


def test_on_a_terminal_what_is_kept_leaves_nothing_drawn():
    both = Both(terminal=True).show(("Traceback", ""), stream=2).show((" (most recent call last):", "\n"), stream=2)
    assert both.text == f"[0] Traceback{CLEAR}"


def test_a_reader_that_has_gone_is_no_error():
    class Gone(io.BytesIO):
        def write(self, _):
            raise BrokenPipeError

    screen = Screen(Sink(Gone(), terminal=False), Sink(io.BytesIO(), terminal=False))
    assert not screen.closed
    screen.show(Output(0, 1, Piece(b"x", b"\n")))
    screen.show(Output(0, 1, Piece(b"y", b"\n")))
    assert screen.closed


def test_logs_get_finished_lines_of_both_streams(tmp_path):
    folder = tmp_path / "deep" / "logs"
    logs = Logs(folder)
    both = Both(logs=logs).show((" 1%", "\r"), ("100%", "\n")).show(("oops", "\n"), stream=2).show(("x", "\n"), rank=1)
    assert (folder / "rank.0.log").read_text("utf-8") == "100%\noops\n"
    assert (folder / "rank.1.log").read_text("utf-8") == "x\n"
    logs.close()
    logs = Logs(folder)
    logs.write(1, b"next job")
    logs.close()
    assert (folder / "rank.1.log").read_text("utf-8") == "next job\n"
    assert both.text.count("\n") == 3


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(OSError, match="file"):
        Logs(tmp_path / "file" / "logs")


def test_what_nobody_reads_is_not_left_to_the_interpreters_end():
    """Python, which could not write it, would end with the exit code 120."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as file:
        os.close(reading)
        sink = Sink(file, terminal=False)
        sink.write(b"x" * 10_000)
        assert sink.closed
        file.flush()
