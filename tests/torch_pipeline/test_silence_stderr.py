from __future__ import annotations

import logging
import sys
import threading

from coordd_torch.pipeline.silence_stderr import hushed


def test_other_threads_are_heard(capsys):
    with hushed():
        sys.stderr.write("mine\n")
        other = threading.Thread(target=sys.stderr.write, args=("another's\n",))
        other.start()
        other.join()
    sys.stderr.write("mine again\n")
    assert capsys.readouterr().err == "another's\nmine again\n"


def test_the_loggers_that_are_named_are_silent_and_talk_again(caplog):
    silent, other = logging.getLogger("torch.some"), logging.getLogger("coordd.some")
    with hushed("torch.some"):
        silent.warning("one")
        other.warning("two")
    silent.warning("three")
    assert caplog.messages == ["two", "three"]
