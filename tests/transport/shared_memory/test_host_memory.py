"""How the ranks of a host meet: who sees whom, who has come how far, and what happens where somebody cannot be seen."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.daemon.wakeup import Bell
from coordd.transport.local import LocalWorld
from coordd.transport.shared_memory import host_memory as module
from coordd.transport.shared_memory.board import Board, Card
from coordd.transport.shared_memory.host_memory import Commons, Meeting, join, share
from tests.neighbours import neighbours


@pytest.fixture
def three():
    with neighbours([2, 5, 7]) as world:
        yield world


def met(world: list[Commons], stamp: int = 1, slot: int = 0) -> list[Meeting]:
    return [commons.meeting(slot, stamp, (2, 5, 7)) for commons in world]


def test_members_see_how_far_the_others_are(three):
    first, second, third = met(three)
    assert [meeting.me for meeting in (first, second, third)] == [0, 1, 2]
    assert first.enter()
    assert second.enter()
    assert third.enter()
    assert not first.all_open(1)
    second.lay_open(2)
    third.lay_open(1)
    assert first.all_open(1)
    assert not first.all_open(2)
    assert not second.all_open(1)  # the first has not
    second.hand_out(1)
    assert not first.all_reduced(1)
    third.hand_out(3)
    assert first.all_reduced(1)


def test_a_rank_that_has_not_come_counts_as_nothing(three):
    first, second, third = met(three)
    assert first.enter()
    assert second.enter()
    second.lay_open(1)
    second.finish()
    assert (first.all_open(1), first.all_reduced(1), first.words()) == (False, False, None)
    assert not three[0].boards[7].has_reached(0, 1)
    assert third.enter()
    assert first.words()
    assert three[0].boards[7].has_reached(0, 1)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_an_invalid_word_counts_at_once_and_a_valid_one_with_the_last(three, late):
    meetings = met(three)
    early = [meeting for place, meeting in enumerate(meetings) if place != late]
    assert early[0].enter(word=True)
    assert early[1].enter(word=late != 1)
    assert early[0].words() is (None if late != 1 else False)
    assert meetings[late].enter(word=True)
    assert early[0].words() is (late != 1)
    assert early[1].words() is True  # its own does not count


@pytest.mark.parametrize("valid", [False, True])
def test_a_verdict_is_the_first_members(three, valid):
    meetings = met(three)
    for meeting in meetings:
        assert meeting.enter()
    assert [meeting.verdict() for meeting in meetings] == [None] * 3
    meetings[0].conclude(valid=valid)
    assert [meeting.verdict() for meeting in meetings] == [valid] * 3


def test_a_slot_is_free_once_all_have_done_with_it(three):
    old, new = met(three, 1), met(three, 2)
    assert old[0].enter()
    assert not new[0].enter()  # it has not done so itself
    old[0].finish()
    assert not new[0].enter()
    for meeting in old[1:]:
        assert meeting.enter()
        assert not new[0].enter()
        meeting.finish()
    assert new[0].enter()
    assert not new[0].all_open(1)
    assert not new[0].all_reduced(1)
    # Who is seen with a later stamp has finished.
    assert old[1].all_reduced(1 << 40) is True
    assert old[1].verdict() is True
    assert new[1].enter()
    assert new[1].verdict() is None
    assert new[1].words() is None


def test_slots_of_other_operations_are_not_in_the_way(three):
    assert met(three, 5, slot=1)[0].enter()
    other = met(three, 3, slot=2)
    assert other[0].enter()
    other[1].enter()
    other[2].enter()
    assert other[0].words() is True
    assert not three[1].mine.has_reached(1, 5)


def test_sets_of_ranks_that_overlap_may_use_a_slot_one_after_the_other(three):
    """The rank that is in both sets keeps the second operation from the first one's slot, and nobody else."""
    pair, other = [three[me].meeting(0, 1, (2, 5)) for me in (0, 1)], [three[me].meeting(0, 2, (5, 7)) for me in (1, 2)]
    assert other[1].enter()
    assert not other[0].enter()
    assert other[1].words() is None
    for meeting in pair:
        assert meeting.enter()
        meeting.finish()
    assert other[0].enter()
    assert other[1].words() is True


@pytest.mark.parametrize(
    "news", [Meeting.enter, lambda m: m.lay_open(1), lambda m: m.hand_out(1), lambda m: m.conclude(valid=True)]
)
def test_every_piece_of_news_rings_who_sleeps(news: Callable[[Meeting], object], monkeypatch):
    rung = []

    def ring(board):
        rung.append(board)

    monkeypatch.setattr(Board, "ring", ring)
    with neighbours(range(3)) as world:
        news(world[1].meeting(0, 1, (0, 1)))
        assert rung == [world[1].boards[0]]


def test_a_place_is_where_the_array_lies_or_nowhere(three):
    first, second, _ = met(three)
    block = three[1].heap.allocate(100)
    block[:] = np.arange(100)
    for leg in (0, 16):
        second.place(leg, three[1].heap.locate(block[30 + leg :]))
        assert first.has_place(1, leg)
        assert first.place_of(1, leg)[:3].tolist() == [30 + leg, 31 + leg, 32 + leg]
        second.place(leg, three[1].heap.locate(np.zeros(3)))
        assert not first.has_place(1, leg)


def test_a_neighbours_block_is_mapped_once_and_let_go_when_it_is_gone(three):
    owner, neighbour = three[0], three[1]
    blocks = [owner.heap.allocate(8) for _ in range(3)]
    numbers = [owner.heap.locate(block)[0] for block in blocks]
    maps = [neighbour.block(2, number) for number in numbers]
    assert neighbour.block(2, numbers[1]) is maps[1]
    blocks[0][0] = 9
    assert maps[0][0] == 9
    blocks[1] = None
    blocks.append(owner.heap.allocate(8))
    neighbour.block(2, owner.heap.locate(blocks[-1])[0])
    assert set(neighbour._blocks[2]) == {numbers[0], numbers[2], owner.heap.locate(blocks[-1])[0]}


def test_borrowed_memory_is_ours_alone_until_given_back(three):
    commons = three[0]
    lent = [commons.borrow(size) for size in (0, 1, 4096, 4097, 5000, 1 << 20)]
    assert [block.size for block in lent] == [4096, 4096, 4096, 8192, 8192, 1 << 20]
    assert len({commons.heap.locate(block)[0] for block in lent}) == len(lent)
    commons.give_back(lent[3])
    assert commons.borrow(8000) is lent[3]
    assert commons.borrow(8000) is not lent[3]


def meet(
    hosts: list[str], spoil: Callable[[int, list[object]], list[object]] = lambda rank, found: found
) -> list[Commons | None]:
    """All ranks join, each on its thread; ``spoil`` changes what a rank hears from the others."""
    world, bells = LocalWorld(len(hosts)), [Bell() for _ in hosts]
    found: dict[int, Commons | BaseException | None] = {}

    def body(rank: int) -> None:
        try:
            gather = world.join(rank).gather
            found[rank] = join(lambda value: spoil(rank, gather(value)), hosts, rank, bells[rank].descriptor)
        except BaseException as error:  # noqa: BLE001 - raised below
            found[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a rank waits for one that has given up"
    for error in found.values():
        if isinstance(error, BaseException):
            raise error
    return [found[rank] for rank in range(len(hosts))]


def test_the_ranks_of_each_host_join():
    files = psutil.Process().num_fds()
    found = meet(["a", "b", "a", "a"])
    assert [commons.ranks for commons in found] == [(0, 2, 3), (1,), (0, 2, 3), (0, 2, 3)]
    assert [commons.rank for commons in found] == [0, 1, 2, 3]
    found[2].mine.words[found[2].mine.slot(1)] = 77
    assert found[3].boards[2].has_reached(1, 77)
    assert found[1].mine is found[1].boards[1]
    for commons in found:
        commons.close()
    del commons, found
    assert psutil.Process().num_fds() == files


def hidden(rank: int, found: list[object]) -> list[object]:
    """Rank 2 hears of another process than the one that rank 1 is, as in another container."""
    return [card._replace(token=0) if rank == 2 and place == 1 else card for place, card in enumerate(found)]


def test_if_one_rank_cannot_see_a_neighbour_nobody_goes_through_memory():
    """On other hosts neither, for all must go the same way; and nothing stays open."""
    files = psutil.Process().num_fds()

    def spoil(rank, found):
        return hidden(rank, found) if isinstance(found[0], Card) else found

    assert meet(["a", "a", "a", "b"], spoil) == [None] * 4
    assert psutil.Process().num_fds() == files


@pytest.mark.parametrize("error", [OSError, PermissionError])
def test_a_rank_without_such_memory_keeps_nobody_waiting(monkeypatch, error):
    create, files, turns = Board.create, psutil.Process().num_fds(), iter(range(9))

    def fail_once(bell):
        if next(turns) == 1:
            raise error(1, "no memory to share")
        return create(bell)

    monkeypatch.setattr(module.Board, "create", fail_once)
    assert meet(["a", "a", "b"]) == [None] * 3
    assert psutil.Process().num_fds() == files


def test_a_system_without_such_memory_does_without(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    assert meet(["a", "a"]) == [None] * 2


def test_a_host_is_who_really_shares_memory():
    """Rank 2 is in another container of the same name; rank 3, which has not, is left where it says that it is."""
    files = psutil.Process().num_fds()
    machines = ["a", "a", "a", "b", "a"]
    world, bells = LocalWorld(len(machines)), [Bell() for _ in machines]

    def body(rank):
        gather = world.join(rank).gather
        return share(lambda value: unseen(gather(value)), machines, rank, bells[rank].descriptor)

    def unseen(found):
        return [
            card._replace(token=0) if isinstance(card, Card) and place == 2 else card
            for place, card in enumerate(found)
        ]

    with ThreadPoolExecutor(len(machines)) as pool:
        found = list(pool.map(body, range(len(machines))))
    assert {sharing.hosts for sharing in found} == {("a", "a", "a/2", "b", "a")}
    assert [sharing.commons.ranks for sharing in found] == [(0, 1, 4), (0, 1, 4), (2,), (3,), (0, 1, 4)]
    for sharing in found:
        sharing.commons.close()
    del found
    bells.clear()
    assert psutil.Process().num_fds() <= files


@given(
    st.integers(1, 6).flatmap(
        lambda size: st.tuples(
            st.lists(st.sampled_from("ab"), min_size=size, max_size=size),
            st.lists(st.none() | st.sets(st.integers(0, size - 1)), min_size=size, max_size=size),
        )
    )
)
def test_ranks_of_a_host_are_of_one_machine_and_all_see_each_other(drawn):
    machines, sights = drawn
    seen = [None if sight is None else (*{*sight, rank},) for rank, sight in enumerate(sights)]
    hosts = module._hosts(machines, seen)
    for one, other in itertools.combinations(range(len(machines)), 2):
        mutual = None in (seen[one], seen[other]) or (other in seen[one] and one in seen[other])
        if hosts[one] == hosts[other]:
            assert machines[one] == machines[other]
            assert mutual
    if all(other in seen[one] for one in range(len(seen)) if seen[one] is not None for other in range(len(seen))):
        assert hosts == tuple(machines)
