"""One rank's view of a locked plan: buckets fill up, words are given one after the other, and a lock ends cleanly."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordd.bucket import Locked
from coordd.handles import Handle
from coordd.lock import Lock
from coordd.table import Entry
from tests.star import allreduce

BUCKETS = ((0, 2), (1,))


def entry(slot: int) -> Entry:
    request = allreduce(f"w{slot}")
    return Entry(request, np.empty(0), Handle(request.name))


def test_a_bucket_is_complete_when_all_are_there_and_keeps_the_order_of_the_lock():
    lock = Lock(7, BUCKETS)
    late, early = entry(2), entry(0)
    assert lock.gather(2, late) is None
    assert lock.partial
    word = lock.gather(0, early)
    assert (word.lock, word.index, word.occurrence) == (7, 0, 1)
    assert word.bucket.entries == (early, late)
    assert word.bucket.request is early.request
    assert not lock.partial
    assert lock.flying


def test_it_knows_what_is_locked():
    lock = Lock(7, BUCKETS)
    assert [slot in lock for slot in (-1, 0, 1, 2, 3)] == [False, True, True, True, False]
    assert sorted(lock.slots) == [0, 1, 2]


def test_occurrences_are_counted_by_bucket():
    lock = Lock(7, BUCKETS)
    for occurrence in (1, 2, 3):
        word = lock.gather(1, entry(1))
        assert (word.index, word.occurrence) == (1, occurrence)
        assert lock.land(word) is None
    assert lock.lasted == 3
    assert not lock.flying


def test_a_broken_lock_gives_what_was_gathered_back_and_one_invalid_word_a_bucket():
    lock, held = Lock(7, BUCKETS), entry(0)
    lock.gather(0, held)
    assert lock.dissolve() == ([Locked(7, 0, 1), Locked(7, 1, 1)], [held])
    assert not lock.partial


def test_the_invalid_word_waits_for_the_outcome_of_the_valid_one():
    lock = Lock(7, BUCKETS)
    word = lock.gather(1, entry(1))
    assert lock.dissolve() == ([Locked(7, 0, 1)], [])
    assert lock.flying
    assert lock.land(word) == Locked(7, 1, 2)
    assert not lock.flying


def test_a_refused_bucket_needs_no_other_word():
    lock = Lock(7, BUCKETS)
    lock.refuse(lock.gather(1, entry(1)))
    assert lock.dissolve() == ([Locked(7, 0, 1)], [])


@given(st.lists(st.lists(st.sampled_from("gbo"), max_size=12), min_size=2, max_size=4), st.randoms())
def test_all_ranks_give_the_same_number_of_words(scripts, rng):
    """One bucket of one slot; ranks gather, break, or get to know an outcome, in any order."""
    locks = [Lock(1, ((0,),)) for _ in scripts]
    given_: list[list[Locked]] = [[] for _ in scripts]
    open_: list[Locked | None] = [None for _ in scripts]

    def outcome(rank: int) -> None:
        word = open_[rank]
        words = [told[word.occurrence - 1] for told in given_ if len(told) >= word.occurrence]
        if len(words) < len(locks):
            return
        open_[rank] = None
        if all(told.bucket for told in words):
            last = locks[rank].land(word)
            given_[rank] += [last] if last else []
        else:
            locks[rank].refuse(word)
            given_[rank] += locks[rank].dissolve()[0]

    def act(rank: int, what: str) -> None:
        ended = given_[rank] and (given_[rank][-1].bucket is None or locks[rank]._lines[0].ended)
        if what == "o" and open_[rank] is not None:
            outcome(rank)
        elif what == "b":
            given_[rank] += locks[rank].dissolve()[0]
        elif what == "g" and open_[rank] is None and not ended and not locks[rank]._broken:
            open_[rank] = locks[rank].gather(0, entry(0))
            given_[rank].append(open_[rank])

    turns = [(rank, what) for rank, script in enumerate(scripts) for what in script]
    rng.shuffle(turns)
    for rank, what in turns:
        act(rank, what)
    for what in "b" + "o" * 30:  # in the end all break, and all outcomes become known
        for rank in range(len(scripts)):
            act(rank, what)
    assert len({len(told) for told in given_}) == 1
    assert open_ == [None] * len(scripts)
    assert all(word.bucket for told in given_ for word in told[:-1])
    assert any(told[-1].bucket is None for told in given_)
