"""One rank's view of a locked plan: buckets fill up, words are given one after the other, and a lock ends cleanly."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordd.negotiation.bucket import Locked
from coordd.negotiation.locked_plan import Lock
from coordd.negotiation.tensor_table import Entry
from coordd.ops.handles import Handle
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


class Rank:
    """One rank with one bucket of one slot; ``given`` are its words."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.lock = Lock(1, ((0,),))
        self.given: list[Locked] = []
        self.open: Locked | None = None
        self.broken = False
        self._ranks = ranks
        ranks.append(self)

    def gather(self) -> None:
        if not self.broken and self.open is None:
            self.open = self.lock.gather(0, entry(0))
            self.given.append(self.open)

    def shatter(self) -> None:
        if not self.broken:
            self.broken = True
            self.given += self.lock.dissolve()[0]

    def learn(self) -> None:
        """Gets to know the outcome of its word, if all have given theirs."""
        if self.open is None or any(len(rank.given) < self.open.occurrence for rank in self._ranks):
            return
        word, self.open = self.open, None
        if all(rank.given[word.occurrence - 1].bucket for rank in self._ranks):
            last = self.lock.land(word)
            self.given += [last] if last else []
        else:
            self.lock.refuse(word)
            self.shatter()


@given(st.integers(2, 4), st.lists(st.tuples(st.integers(0, 3), st.sampled_from("gggllls")), max_size=60))
def test_all_ranks_give_the_same_number_of_words(size, turns):
    """Ranks gather, break, or get to know an outcome, in any order; in the end all break."""
    ranks: list[Rank] = []
    for _ in range(size):
        Rank(ranks)
    rest = [(rank, what) for what in "s" + "l" * 60 for rank in range(size)]
    for number, what in [*turns, *rest]:
        rank = ranks[number % size]
        {"g": rank.gather, "l": rank.learn, "s": rank.shatter}[what]()
    assert len({len(rank.given) for rank in ranks}) == 1
    assert all(rank.open is None for rank in ranks)
    assert all(word.bucket for rank in ranks for word in rank.given[:-1])
    assert any(rank.given[-1].bucket is None for rank in ranks)


def test_what_is_held_and_how_many_buckets_there_are_can_be_seen():
    lock, held = Lock(7, BUCKETS), entry(0)
    assert (lock.buckets, lock.held) == (len(BUCKETS), [])
    lock.gather(0, held)
    assert lock.held == [held]
