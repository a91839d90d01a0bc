from __future__ import annotations

import subprocess
import sys

import pytest

from coordd.daemon.testimony import in_brief
from coordd.errors import PeerError, RefusedError, ShutdownError
from coordd.launch.lines import Lines, Piece
from coordd.launch.stderr_tail import LastWords

PEER = """
import sys
class RemoteTraceback(Exception): pass
class PeerError(RuntimeError): pass
try:
    try:
        raise RemoteTraceback('\\n###\\nTraceback (most recent call last):\\n  File "a.py"\\nValueError: bad\\n###')
    except RemoteTraceback as cause:
        raise PeerError("rank 1 raised ValueError: bad") from cause
except PeerError:
    {then}
"""

# Each part has a traceback of its own, and something unindented follows.
NESTED = """
import atexit, sys
atexit.register(print, 'a warning', file=sys.stderr)
def caught(error):
    try:
        raise error
    except Exception as same:
        return same
try:
    raise ExceptionGroup("outer", [caught(ValueError(1)), caught(ExceptionGroup("inner", [caught(KeyError(2))]))])
finally:
    pass
"""


def heard(text: str) -> LastWords:
    words = LastWords()
    for piece in Lines(1000).feed(text.encode()):
        words.hear(piece)
    return words


def said_by(source: str) -> LastWords:
    """What a real interpreter says at its end."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    return heard(done.stderr)


@pytest.mark.parametrize(
    ("source", "exception"),
    [
        ("raise ValueError('bad sample')", "ValueError: bad sample"),
        ("raise ValueError('two\\nlines')", "ValueError: two"),
        ("assert False", "AssertionError"),
        ("1 +", "SyntaxError: invalid syntax"),
        ("try: 1/0\nexcept ZeroDivisionError as e: raise KeyError('k') from e", "KeyError: 'k'"),
        ("import sys; sys.exit('gave up')", ""),
        (NESTED, "ExceptionGroup: outer (2 sub-exceptions)"),
        (f"{NESTED.partition('finally')[0]}except Exception: 1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.stderr.write('80%|##'); raise ValueError('bad')", "ValueError: bad"),
    ],
)
def test_the_exception_is_the_last_one_that_python_names(source, exception):
    words = said_by(source)
    assert words.exception == exception
    assert not words.consequence


def test_what_comes_after_the_exception_does_not_hide_it():
    words = heard("Traceback (most recent call last):\n  File\nValueError: bad\nresource_tracker: a warning\n")
    assert (words.exception, words.last) == ("ValueError: bad", "resource_tracker: a warning")


def test_what_tensorflow_logs_as_it_starts_is_not_why_a_process_ends():
    words = heard(
        "cannot find the data\n"
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        "I0000 00:00:1795615955.228341   10301 port.cc:153] oneDNN custom operations are on.\n"
        "W0000 00:00:1795615958.778553   10301 cpu.cc:1] slow\n"
    )
    assert words.last == "cannot find the data"
    assert heard("E0000 00:00:1 10301 cuda.cc:1] no device\n").last.startswith("E0000")


def test_what_pytorch_puts_before_the_lines_of_a_process_group_is_no_part_of_them():
    traceback = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        "    f()",
        "ValueError: bad",
    ]
    words = LastWords()
    for line in traceback:
        words.hear(Piece(f"[rank0]: {line}".encode(), b"\n"))
    assert words.exception == "ValueError: bad"


def test_marks_below_a_line_are_no_exception():
    """Some libraries shorten tracebacks, and indent these differently."""
    words = LastWords()
    for line in ("Traceback (most recent call last):", "    raise different", "^^^^^^^~~~^^", "ValueError: bad"):
        words.hear(Piece(line.encode(), b"\n"))
    assert words.exception == "ValueError: bad"


def test_an_exception_that_was_survived_is_forgotten():
    words = heard("Traceback (most recent call last):\nValueError: logged\n" + "epoch\n" * 100)
    assert (words.exception, words.last) == ("", "epoch")


@pytest.mark.parametrize("then", ["raise", "raise SystemError('while handling')"])
def test_a_peer_error_is_a_consequence_whatever_becomes_of_it(then):
    words = said_by(PEER.format(then=then))
    assert words.consequence
    assert words.exception.endswith("PeerError: rank 1 raised ValueError: bad" if then == "raise" else "while handling")


def test_who_says_in_brief_that_another_rank_has_failed_is_not_the_cause():
    text = in_brief(PeerError(1, "failed: ValueError: bad"))
    words = heard(text)
    assert (words.exception, words.consequence) == (text.splitlines()[0], True)


def test_who_waited_in_vain_for_a_rank_that_left_is_not_the_cause():
    error = ShutdownError("w", (1,))
    words = heard(f"Traceback (most recent call last):\n  File\ncoordd.errors.ShutdownError: {error}\n")
    assert words.consequence


def test_a_rank_that_has_heard_of_a_refusal_is_not_the_cause():
    words = heard(f"Traceback (most recent call last):\n  File\ncoordd.errors.RefusedError: {RefusedError(1, 'no')}\n")
    assert words.consequence


def test_what_a_rank_is_to_blame_for_outweighs_what_it_heard():
    words = heard(
        "Traceback (most recent call last):\n  File\nPeerError: rank 1 left\n"
        "coordd rank 1 ERROR: the job has failed: this rank left the job\n"
    )
    assert (words.exception, words.consequence) == ("it left the job", False)


def test_a_crash_in_native_code_is_told_by_the_fault_handler():
    words = heard("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File\n")
    assert words.exception == "Fatal Python error: Segmentation fault"


def test_a_progress_bar_is_no_last_word_until_it_is_finished():
    words = heard("start\n 10%\r 20%\r 30%\n")
    assert words.last == " 30%"


def test_an_endless_line_takes_no_more_memory():
    words = LastWords()
    for _ in range(100):
        words.hear(Piece(b"x" * 1000, b""))
    assert len(words._line) == 4096
