from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.config import knobs
from coordd.errors import ConfigError
from coordd.host.affinity import DAEMON_CORES, keep_to, read_cpus, write_cpus

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's own")


def in_a_thread(call):
    """Affinity belongs to a thread, so that of the tests stays as it is."""
    result = []

    def body():
        try:
            result.append(call())
        except ConfigError as error:
            result.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return result[0]


def test_the_variable_is_that_of_the_knob():
    assert DAEMON_CORES in {knob.variable for knob in knobs()}


@given(st.frozensets(st.integers(0, 99_999), min_size=1))
def test_a_list_survives_being_written(cpus):
    assert read_cpus(write_cpus(cpus), source="x") == cpus


@pytest.mark.parametrize(("text", "cpus"), [("3", {3}), ("6-7", {6, 7}), ("0,4-5,4", {0, 4, 5}), ("1, 2", {1, 2})])
def test_lists_are_read_as_the_kernel_writes_them(text, cpus):
    assert read_cpus(text, source="x") == cpus


@pytest.mark.parametrize("text", ["", "x", "7-6", "-1", "1-", "1--2", "0x3", "1,,2", "1;2", "999999", "²", "0-9999999"])
def test_nonsense_is_told_what_is_legal(text):
    with pytest.raises(ConfigError, match=r"^cores='.*' is not usable: give processors as the kernel numbers them"):
        read_cpus(text, source="cores")


@linux
def test_a_thread_is_kept_to_what_it_is_told_and_so_are_the_threads_it_starts():
    last = max(os.sched_getaffinity(0))

    def look():
        keep_to(str(last))
        return os.sched_getaffinity(0), in_a_thread(lambda: os.sched_getaffinity(0))

    assert in_a_thread(look) == ({last}, {last})
    assert os.sched_getaffinity(0) != {last} or last == 0


def test_without_a_word_it_may_run_anywhere(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    keep_to("")


@linux
def test_processors_that_are_not_there_are_refused_even_beside_some_that_are():
    here = min(os.sched_getaffinity(0))
    for text in ("9999", f"{here},9999"):
        error = in_a_thread(lambda text=text: keep_to(text))
        assert str(error) == (
            f"daemon_cores={text!r} is not usable: give processors that this process may use, or leave it empty for any"
        )


def test_a_system_that_cannot_pin_says_so(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(ConfigError, match="leave it empty"):
        keep_to("0")
