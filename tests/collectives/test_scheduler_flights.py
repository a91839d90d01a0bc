"""Operations in flight: what starts when, what is packed, and what becomes of arrays if nothing moves."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd.collectives import scheduler
from coordd.collectives.dispatch import Spot
from coordd.collectives.ring import Pulse
from coordd.collectives.scheduler import Flights
from coordd.negotiation.bucket import Bucket, Locked
from coordd.negotiation.tensor_table import Entry
from coordd.ops.event_buffer import Deck
from coordd.ops.messages import Kind, Request
from coordd.transport.local import LocalWorld
from tests.neighbours import in_random_order, planes

LARGE = scheduler._PACKED_BYTES // 4


class Promise:
    """A handle that notes what it is told, in one diary with everybody else's."""

    submitted = 12.5

    def __init__(self, name: str, diary: list[tuple[str, str]]) -> None:
        self.name = name
        self.diary = diary
        self.value: Any = None

    def land(self, value, convert):
        self.value = np.array(value)
        self.diary.append(("result", self.name))

    def resolve(self, result):
        raise AssertionError

    def fail(self, error):
        raise error


class Diary(list[tuple[str, str]]):
    """What happens, in this order; the `Outcomes` of flights."""

    def landed(self, entries):
        self.extend(("landed", entry.request.name) for entry in entries)

    def settled(self, word, *, moved):
        self.append(("moved" if moved else "refused", f"{word.index}.{word.occurrence}"))

    def entry(self, name: str, array: np.ndarray, **request: Any) -> Entry:
        kind = request.pop("kind", Kind.ALLREDUCE)
        found = Request(kind, name, array.dtype.name, array.shape, **request)
        return Entry(found, array, Promise(name, self))

    def bucket(self, sequence: int, *entries: Entry, sizes: Sequence[int] = ()) -> Bucket:
        return Bucket(sequence, entries[0].request, tuple(sizes), entries, slot=sequence)

    def small(self, sequence: int) -> Bucket:
        return self.bucket(sequence, self.entry(str(sequence), np.ones(3)))

    def word(self, index: int, occurrence: int = 1) -> Locked:
        return Locked(7, index, occurrence, self.bucket(0, self.entry(f"{index}.{occurrence}", np.ones(3))))


class Doubling:
    """A plane whose reductions double everything, as soon as their spot is allowed."""

    rank = 0
    world = (0, 1)
    heralded = False

    def __init__(self) -> None:
        self.lane = LocalWorld(1).join(0).collective
        self.deck = Deck()
        self.pulse = Pulse()
        self.started: list[Spot] = []
        self.arrays: list[list[np.ndarray]] = []
        self.allowed: set[int] = set()
        self.refused: list[Spot] = []
        self.doubts: list[bool] = []
        self.invalid: set[int] = set()

    def reduce(self, spot, request, arrays, *, absent, agreed):
        assert not absent
        self.started.append(spot)
        self.arrays.append(list(arrays))
        self.doubts.append(not agreed)
        while spot.slot not in self.allowed:
            yield
        if spot.slot in self.invalid:
            return False
        for array in arrays:
            np.multiply(array, 2, out=array)
        return True

    def refuse(self, spot):
        self.refused.append(spot)
        while spot.slot not in self.allowed:
            yield

    def missing(self, spot):
        return (1,) if spot.slot not in self.allowed else ()

    @property
    def slots(self) -> list[int]:
        return [spot.slot for spot in self.started]


@pytest.fixture
def plane() -> Doubling:
    return Doubling()


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def flights(plane, diary) -> Flights:
    return Flights(plane, diary)


def test_buckets_start_in_order_a_few_at_a_time(flights, plane, diary):
    for sequence in range(1, 8):
        flights.start(diary.small(sequence))
    assert flights.advance()
    assert plane.slots == [1, 2, 3, 4]
    assert not flights.advance()
    plane.allowed |= {2, 4}
    assert flights.advance()
    assert diary == [("landed", "2"), ("result", "2"), ("landed", "4"), ("result", "4")]
    assert len(flights) == 5
    assert flights.advance()
    assert plane.slots == [1, 2, 3, 4, 5, 6]
    plane.allowed |= set(range(8))
    while flights:
        assert flights.advance()
    assert plane.slots == list(range(1, 8))
    assert sorted(name for what, name in diary if what == "result") == [str(sequence) for sequence in range(1, 8)]
    assert not any(plane.doubts)


def test_words_do_not_wait_for_what_is_negotiated(flights, plane, diary):
    """Others may wait for a word before they can start what this rank waits for."""
    for sequence in range(1, 7):
        flights.start(diary.small(sequence))
    flights.advance()
    words = [Spot.of_word(diary.word(index), plane.lane).slot for index in range(6)]
    plane.allowed |= set(words)
    for index in range(6):
        flights.give(diary.word(index))
    assert flights.advance()
    assert plane.slots == [1, 2, 3, 4, *words]
    assert [what for what in diary if what[0] == "moved"] == [("moved", f"{index}.1") for index in range(6)]
    assert plane.doubts == [False] * 4 + [True] * 6


def test_words_on_one_bucket_wait_for_each_other_and_for_no_other(flights, plane, diary):
    slots = [Spot.of_word(diary.word(index), plane.lane).slot for index in (0, 1)]
    for index, occurrence in [(0, 1), (0, 2), (1, 1)]:
        flights.give(diary.word(index, occurrence))
    flights.give(Locked(7, 0, 3))
    flights.advance()
    assert plane.slots == slots
    plane.allowed.add(slots[1])
    flights.advance()
    assert ("moved", "1.1") in diary
    plane.allowed.add(slots[0])
    while flights:
        assert flights.advance()
    assert [name for what, name in diary if what == "moved"] == ["1.1", "0.1", "0.2"]
    assert [spot.stamp & 0xFFFFFFFF for spot in plane.refused] == [3]


def test_results_come_after_the_books_are_in_order(flights, plane, diary):
    """A handle that is resolved may submit the same name at once: the table and the lock must know of the end."""
    word = diary.word(2)
    plane.allowed.add(Spot.of_word(word, plane.lane).slot)
    flights.give(word)
    flights.advance()
    assert diary == [("landed", "2.1"), ("moved", "2.1"), ("result", "2.1")]


def test_a_refused_word_leaves_arrays_and_handles_alone(flights, plane, diary):
    small, large = np.arange(5.0), np.arange(LARGE, dtype=np.float32)
    entries = [diary.entry("a", small), diary.entry("b", small[::2]), diary.entry("c", large.astype(float))]
    word = Locked(7, 3, 1, diary.bucket(0, *entries))
    slot = Spot.of_word(word, plane.lane).slot
    plane.allowed.add(slot)
    plane.invalid.add(slot)
    flights.give(word)
    assert flights.advance()
    assert diary == [("refused", "3.1")]
    assert small.tolist() == [0, 1, 2, 3, 4]
    assert not flights


def test_what_is_small_is_packed_and_what_is_large_is_reduced_where_it_lies(flights, plane, diary):
    plane.allowed.add(1)
    arrays = [
        np.ones(4, np.float32),
        np.full(LARGE, 2, np.float32),
        np.full((2, 3), 3, np.float32).T,
        np.ones(0, np.float32),
        np.full(LARGE - 1, 4, np.float32),
        np.array(5, np.float32),
    ]
    before = [array.copy() for array in arrays]
    flights.start(diary.bucket(1, *[diary.entry(str(number), array) for number, array in enumerate(arrays)]))
    flights.advance()
    ((packed, large),) = plane.arrays
    assert packed.size == 4 + 6 + LARGE - 1 + 1
    assert not any(np.shares_memory(packed, array) for array in arrays)
    assert np.shares_memory(large, arrays[1])
    for array, old in zip(arrays, before, strict=True):
        assert np.array_equal(array, 2 * old)


def test_one_small_tensor_alone_is_not_copied(flights, plane, diary):
    plane.allowed.add(1)
    arrays = [np.ones(3, np.float32), np.ones(LARGE, np.float32)]
    flights.start(diary.bucket(1, *[diary.entry(str(number), array) for number, array in enumerate(arrays)]))
    flights.advance()
    assert all(np.shares_memory(*pair) for pair in zip(plane.arrays[0], arrays, strict=True))


def test_strides_are_no_matter_and_what_lies_between_is_left_alone(flights, plane, diary):
    plane.allowed.add(1)
    whole = np.ones((40, 40, 40))
    part = whole[1:-1, ::3, ::-1]
    flights.start(diary.bucket(1, diary.entry("a", part), diary.entry("b", np.ones(3))))
    flights.advance()
    assert (part == 2).all()
    assert whole.sum() == whole.size + part.size


def test_waiting_words_are_listed_with_who_is_missing(flights, plane, diary):
    flights.start(diary.small(1))
    flights.give(diary.word(0))
    flights.give(Locked(7, 1, 1))
    flights.advance()
    ((since, waiting),) = flights.waiting()
    assert (since, waiting.name, waiting.missing) == (12.5, "0.1", (1,))


def test_what_is_thrown_away_is_returned_and_never_goes_on(flights, plane, diary):
    for sequence in range(1, 7):
        flights.start(diary.small(sequence))
    flights.give(diary.word(0))
    flights.give(Locked(7, 1, 1))
    flights.advance()
    gone = flights.clear()
    assert sorted(entry.request.name for entry in gone) == ["0.1", "1", "2", "3", "4", "5", "6"]
    assert not flights
    plane.allowed |= set(range(400))
    assert not flights.advance()
    assert not diary
    flights.give(diary.word(0, 2))  # nothing of before is in its way
    flights.advance()
    assert ("moved", "0.2") in diary


def test_a_barrier_needs_no_data(flights, plane, diary):
    flights.start(diary.bucket(1, diary.entry("b", np.empty(0), kind=Kind.BARRIER)))
    flights.advance()
    assert diary == [("landed", "b"), ("result", "b")]
    assert not plane.started


def waited(flights: Flights) -> Generator[None, None, None]:
    while flights:
        flights.advance()
        yield


@pytest.mark.parametrize("way", ["memory", "lane"])
def test_gathers_and_broadcasts_are_of_their_members(way):
    """Blocks of several rows and of none; the root is a global rank."""
    with planes("aab", way=way) as world:
        diaries = [Diary() for _ in world.planes]
        flying = [Flights(plane, diary) for plane, diary in zip(world.planes, diaries, strict=True)]
        sizes, members = (2, 0, 3), (0, 2)
        for rank, (flights, diary) in enumerate(zip(flying, diaries, strict=True)):
            rows = np.full((sizes[rank], 2), rank)
            flights.start(diary.bucket(1, diary.entry("g", rows, kind=Kind.ALLGATHER), sizes=sizes))
            if rank in members:
                root = diary.entry("r", np.full(4, rank), kind=Kind.BROADCAST, root=2, members=members)
                flights.start(diary.bucket(2, root))
        world.run(lambda plane: waited(flying[plane.rank]))
    for rank, diary in enumerate(diaries):
        assert [what for what, _ in diary][:2] == ["landed", "result"]
        assert sorted(name for what, name in diary if what == "result") == ["g", "r"][: 1 + (rank in members)]


@settings(deadline=None, max_examples=50)
@given(
    names=st.sampled_from(["a", "aa", "aaa", "ab", "aab", "abab"]),
    way=st.sampled_from(["memory", "lane"]),
    steps=st.integers(1, 4),
    seed=st.integers(0, 1 << 32),
)
def test_negotiated_buckets_and_words_fly_together_on_real_planes(names, way, steps, seed):
    """Words come in an order of each rank's own; some ranks refuse one occurrence, and all hear so."""
    source = random.Random(seed)
    lines, ranks = 3, range(len(names))
    refusals = {
        (line, source.randint(1, steps)): source.choice(ranks) for line in range(lines) if source.random() < 0.5
    }
    arrays: dict[tuple[int, str], np.ndarray] = {}

    def array(rank: int, name: str, size: int) -> np.ndarray:
        arrays[rank, name] = np.full(size, 1 << rank, np.int64)
        return arrays[rank, name]

    with planes(names, way=way) as world:
        diaries = [Diary() for _ in ranks]
        flying = [Flights(plane, diary) for plane, diary in zip(world.planes, diaries, strict=True)]
        for rank, (flights, diary) in enumerate(zip(flying, diaries, strict=True)):
            turns = [(line, occurrence) for occurrence in range(1, steps + 1) for line in range(lines)]
            turns.sort(key=lambda turn: turn[1] + random.Random(seed * 7 + rank * 31 + turn[0]).random())
            for number in range(1, 6):
                size = (5, 30_000)[number % 2]
                flights.start(diary.bucket(number, diary.entry(f"n{number}", array(rank, f"n{number}", size))))
            for line, occurrence in turns:
                name = f"{line}.{occurrence}"
                bucket = diary.bucket(0, diary.entry(name, array(rank, name, (3, 9000, 40_000)[line])))
                willing = refusals.get((line, occurrence)) != rank
                flights.give(Locked(7, line, occurrence, bucket if willing else None))
        in_random_order({rank: waited(flying[rank]) for rank in ranks}, seed)
        assert not any(world.lent())
    for (rank, name), found in arrays.items():
        refused = name[0] != "n" and tuple(map(int, name.split("."))) in refusals
        assert set(found.tolist()) == {1 << rank if refused else sum(1 << other for other in ranks)}
    for rank, diary in enumerate(diaries):
        for (line, occurrence), culprit in refusals.items():
            assert (("refused", f"{line}.{occurrence}") in diary) == (rank != culprit)


def test_who_nods_off_is_rung_by_the_next_piece_of_news(monkeypatch):
    with planes("aa") as world:
        first, second = (Flights(plane, Diary()) for plane in world.planes)
        rung: list[int] = []
        monkeypatch.setattr("os.write", lambda descriptor, _: rung.append(descriptor))
        for flights in (first, second):
            flights.start(Diary().small(1))
        first.advance()
        assert not first.nod_off()  # there is nothing more to do: it may sleep
        assert not rung
        second.advance()
        assert set(rung) == {world.planes[1]._commons.boards[0]._bell}
        first.wake_up()
        rung.clear()
        while first or second:
            first.advance()
            second.advance()
        assert not rung


def test_who_nods_off_with_nothing_in_flight_is_rung_for_messages_only(monkeypatch):
    with planes("aa") as world:
        first, second = (Flights(plane, Diary()) for plane in world.planes)
        rung: list[int] = []
        monkeypatch.setattr("os.write", lambda descriptor, _: rung.append(descriptor))
        assert not first.nod_off()
        second.start(Diary().small(1))
        second.advance()
        assert not rung
        world.planes[1]._commons.boards[0].call()
        assert len(rung) == 1
        first.wake_up()
        world.planes[1]._commons.boards[0].call()
        assert len(rung) == 1


def test_who_nods_off_looks_a_last_time():
    """What has come since the look before would ring nobody."""
    with planes("aa") as world:
        first, second = (Flights(plane, Diary()) for plane in world.planes)
        for flights in (first, second):
            flights.start(Diary().small(1))
            flights.advance()
        assert first.nod_off()
        assert not first
