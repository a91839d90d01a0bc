"""The roll call says what a plain table of slots and ranks says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordd.negotiation.roll import Roll
from coordd.negotiation.wire import bits

masks = st.integers(0, 63)
said = st.tuples(st.integers(1, 63), masks, masks)
deeds = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), said),
        st.tuples(st.just("drop"), masks),
        st.tuples(st.just("withdraw"), st.tuples(masks, st.integers(0, 5))),
    ),
    max_size=12,
)


class Table:
    """The same, slot by slot."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}
        self.filled: dict[int, int] = {}

    def enter(self, what):
        ranks, hits, fillers = what
        for slot in bits(hits):
            self.told[slot] = self.told.get(slot, 0) | ranks
            self.filled[slot] = self.filled.get(slot, 0) | (ranks if fillers >> slot & 1 else 0)

    def drop(self, slots):
        for slot in bits(slots):
            self.told.pop(slot, None)
            self.filled.pop(slot, None)

    def withdraw(self, what):
        ranks, slot = what
        if slot in self.told:
            self.told[slot] &= ~ranks
            self.filled[slot] &= ~ranks
            if not self.told[slot]:
                self.drop(1 << slot)

    def slots(self, holds) -> int:
        return sum(1 << slot for slot in self.told if holds(self.told[slot], self.filled[slot]))


@given(deeds, masks, masks)
def test_it_says_what_a_table_says(done, wanted, slots):
    roll, table = Roll(), Table()
    for deed, what in done:
        getattr(table, deed)(what)
        getattr(roll, deed)(*(what if isinstance(what, tuple) else (what,)))
    assert roll.slots == table.slots(lambda told, filled: True)
    assert roll.void == table.slots(lambda told, filled: told == filled)
    assert roll.earnest == table.slots(lambda told, filled: not filled)
    assert roll.complete(slots, wanted) == table.slots(lambda told, filled: told & wanted == wanted) & slots
    for slot in range(6):
        assert roll.ranks(slot) == (table.told.get(slot, 0), table.filled.get(slot, 0))


@given(deeds)
def test_no_slot_is_in_two_groups_and_no_group_is_empty(done):
    roll = Roll()
    for deed, what in done:
        getattr(roll, deed)(*(what if isinstance(what, tuple) else (what,)))
    groups = [slots for _, _, slots in roll]
    assert all(groups)
    assert sum(groups) == roll.slots


def test_a_thousand_tensors_that_all_say_alike_are_one_group():
    roll = Roll()
    for rank in range(10_000):
        roll.enter(1 << rank, (1 << 1000) - 1)
    assert list(roll) == [((1 << 10_000) - 1, 0, (1 << 1000) - 1)]
