from __future__ import annotations

import threading

from coordd.losses import Losses


def test_who_watches_a_rank_hears_of_its_loss_and_of_no_others():
    losses, mine, other = Losses(), threading.Event(), threading.Event()
    losses.watch(1, mine)
    losses.watch(2, other)
    losses.note(1)
    assert (mine.is_set(), other.is_set()) == (True, False)


def test_who_comes_too_late_hears_at_once():
    losses, gone = Losses(), threading.Event()
    losses.note(1)
    losses.watch(1, gone)
    assert gone.is_set()


def test_nobody_waits_for_one_that_looks_no_more():
    losses, gone = Losses(), threading.Event()
    losses.watch(1, gone)
    losses.end()
    assert gone.is_set()
