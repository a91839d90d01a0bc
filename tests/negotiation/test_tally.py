"""What a foreman adds up: nothing is lost, nothing is said twice, and nothing of a rank that it has not said itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd.negotiation.tally import Tally
from coordd.negotiation.wire import Batch, bits, mask
from coordd.ops.messages import Announcement, Plan, Report, Request, Response
from tests.star import allreduce

SPANS = {0: 0b000001, 1: 0b000010, 2: 0b001100, 4: 0b110000}
EVERYBODY = 0b111111
SETS = ((), (), (), (0, 1), (2, 4, 5), (3,))
KNOWN = [allreduce(f"k{number}", members=members) for number, members in enumerate(SETS)]
NEW = [allreduce(f"n{number}", members=members) for number, members in enumerate(SETS)]
FIRST = Plan(1, responses=tuple(Response(request, slot=slot) for slot, request in enumerate(KNOWN)))


def tally(batch: int = 32) -> Tally:
    made = Tally(SPANS, batch=batch)
    made.follow(FIRST)
    return made


def say(*names: str, hits: int = 0, fillers: int = 0, ranks: int = 0, seen: int = 1, **details: object) -> Report:
    fresh = tuple(Announcement(allreduce(name, **details), "train.py:1") for name in names)
    return Report(seen, mask(hits), mask(fillers), fresh, ranks=mask(ranks))


def members(request: Request) -> int:
    return sum(1 << rank for rank in request.members) or EVERYBODY


def spoken(report: Report) -> Iterator[tuple[int, str, bool]]:
    """Who says what in a report, and whether only to fill up."""
    ranks = int.from_bytes(report.ranks, "little") or EVERYBODY
    fillers = int.from_bytes(report.fillers, "little")
    for slot in bits(int.from_bytes(report.hits, "little")):
        for rank in bits(ranks & members(KNOWN[slot])):
            yield rank, KNOWN[slot].name, bool(fillers >> slot & 1)
    for announcement in report.fresh:
        for rank in bits(ranks & members(announcement.request)):
            yield rank, announcement.request.name, announcement.filler


sayings = st.tuples(
    st.sampled_from(sorted(SPANS)),
    st.integers(0, EVERYBODY),
    st.lists(st.tuples(st.integers(0, 2 * len(SETS) - 1), st.booleans()), max_size=6, unique_by=lambda one: one[0]),
)
moments = st.lists(st.one_of(sayings, st.booleans()), max_size=25)


@settings(max_examples=400, deadline=None)
@given(moments, st.sampled_from((1, 2, 32)))
def test_what_goes_in_comes_out_once_and_of_the_same_ranks(moments, batch):
    made = tally(batch)
    told: Counter[tuple[int, str, bool]] = Counter()
    said: set[tuple[int, str]] = set()
    found: Counter[tuple[int, str, bool]] = Counter()
    for moment in moments:
        if isinstance(moment, bool):
            found.update(one for report in made.turn(late=moment) for one in spoken(report))
            continue
        child, ranks, tensors = moment
        ranks &= SPANS[child]
        whole = ranks in {0, SPANS[child]}
        ranks = ranks or SPANS[child]
        hits = fillers = 0
        fresh = []
        for number, filler in tensors:
            request = (KNOWN + NEW)[number]
            group = {(rank, request.name) for rank in bits(ranks & members(request))}
            if not group or group & said:
                continue
            said |= group
            told.update((*one, filler) for one in group)
            if number < len(KNOWN):
                hits |= 1 << number
                fillers |= filler << number
            else:
                fresh.append(Announcement(request, "train.py:1", filler))
        made.hear(child, Report(1, mask(hits), mask(fillers), tuple(fresh), ranks=b"" if whole else mask(ranks)))
    found.update(one for report in made.turn(late=True) for one in spoken(report))
    assert found == told
    assert not made.holds


# What all say alike


def test_known_tensors_go_up_as_bits_when_the_last_has_come():
    made = tally()
    for child in (4, 0, 2):
        made.hear(child, say(hits=0b11))
        assert made.turn() == []
    assert made.holds
    made.hear(1, say(hits=0b01))
    assert made.turn() == [Report(1, b"\1", floor=1)]
    made.hear(1, say(hits=0b10))
    assert made.turn() == [Report(1, b"\2", floor=1)]
    assert not made.holds


def test_a_process_set_waits_for_its_members_only():
    made = tally()
    made.hear(0, say(hits=0b1000))
    made.hear(1, say(hits=0b1000))
    assert made.turn() == [Report(1, b"\x08", floor=0)]


def test_fillers_and_the_real_thing_are_told_apart():
    made = tally()
    for child in SPANS:
        made.hear(child, say(hits=0b11, fillers=0b11 if child == 1 else 0b01))
    assert [(one.hits, one.fillers, one.ranks) for one in made.turn()] == [
        (b"\1", b"\1", b""),
        (b"\2", b"", mask(EVERYBODY & ~0b10)),
        (b"\2", b"\2", b"\2"),
    ]


def test_equal_batches_go_up_as_they_are():
    made, batch = tally(), Batch(Announcement(allreduce(f"w{number}"), "train.py:1") for number in range(40))
    for child in SPANS:
        made.hear(child, Report(1, fresh=batch if child else tuple(batch)))
    [report] = made.turn()
    assert report.fresh == batch
    assert report.ranks == b""


def test_batches_that_were_cut_elsewhere_are_compared_tensor_by_tensor():
    made, names = tally(4), [f"w{number}" for number in range(8)]
    for child, cut in ((0, 4), (1, 4), (2, 8), (4, 6)):
        made.hear(child, say(*names[:cut]))
    assert [told.request.name for report in made.turn() for told in report.fresh] == names[:4]
    made.hear(0, say(*names[4:]))
    made.hear(1, say(*names[4:]))
    assert [told.request.name for report in made.turn() for told in report.fresh] == names[4:6]


def test_they_go_up_in_the_order_of_the_lowest_rank():
    made = tally()
    for child in (4, 2, 1):
        made.hear(child, say("c", "b", "a"))
    made.hear(0, say("a", "c", "b"))
    [report] = made.turn()
    assert [told.request.name for told in report.fresh] == ["a", "c", "b"]


def test_other_words_for_a_tensor_make_a_report_of_their_own():
    made = tally()
    for child in SPANS:
        made.hear(child, say("w", dtype="float64" if child == 2 else "float32"))
    assert [(one.fresh[0].request.dtype, one.ranks) for one in made.turn()] == [
        ("float32", mask(0b110011)),
        ("float64", mask(0b001100)),
    ]


# What is late


def test_late_ranks_are_named_when_they_come():
    made = tally()
    for child in (0, 1, 4):
        made.hear(child, say("w", hits=1))
    assert made.turn() == []
    early = mask(0b110011)
    assert [(one.hits, len(one.fresh), one.ranks) for one in made.turn(late=True)] == [
        (b"\1", 0, early),
        (b"", 1, early),
    ]
    made.hear(2, say("w", hits=1))
    rest = mask(0b001100)
    assert [(one.hits, len(one.fresh), one.ranks) for one in made.turn()] == [(b"\1", 0, rest), (b"", 1, rest)]


@pytest.mark.parametrize(
    "answer", [Plan(2, hits=b"\1"), Plan(2, voids=b"\1"), Plan(2, responses=(Response(KNOWN[0]),))]
)
def test_an_answer_begins_the_next_round(answer):
    """Who was reported early in the last round is new in this one."""
    made = tally()
    made.hear(0, say(hits=1))
    made.turn(late=True)
    made.follow(answer)
    for child in SPANS:
        made.hear(child, say(hits=1, seen=2))
    assert [(one.hits, one.ranks) for one in made.turn()] == [(b"\1", b"")]


def test_a_refusal_concerns_those_who_got_it():
    made = tally()
    for child in (0, 1):
        made.hear(child, say("w", hits=1))
    made.turn(late=True)
    for request in (allreduce("w"), KNOWN[0]):
        made.follow(Plan(2, responses=(Response(request, error="no", recipients=(0,)),)))
    for child in (2, 4):
        made.hear(child, say("w", hits=1, seen=2))
    assert made.turn() == []
    made.hear(0, say("w", hits=1, seen=2))
    assert {one.ranks for one in made.turn()} == {mask(0b111101)}


# What changes its meaning


def test_bits_are_reported_with_their_date_before_their_slot_changes_hands():
    made = tally()
    made.hear(0, say(hits=0b11))
    made.follow(Plan(2, responses=(Response(allreduce("x"), slot=0),)))
    assert made.turn() == [Report(1, b"\3", ranks=b"\1", floor=0)]
    made.hear(1, say(hits=0b11))
    assert made.turn() == [Report(1, b"\1", ranks=b"\2", floor=0)]
    for child in (2, 4):
        made.hear(child, say(hits=0b10, seen=2))
    assert made.turn() == [Report(2, b"\2", ranks=mask(0b111110), floor=1)]


def test_no_later_report_is_older_than_the_floor():
    made = tally()
    for sequence in range(2, 6):
        made.follow(Plan(sequence))
    for child, seen in ((0, 5), (1, 3), (2, 4), (4, 5)):
        made.hear(child, say("w", seen=seen))
    assert [(one.seen, one.floor) for one in made.turn()] == [(5, 3)]
    made.hear(1, Report(5, floor=4))
    made.hear(2, Report(5))
    for child in SPANS:
        made.hear(child, say("v", seen=5))
    assert [one.floor for one in made.turn()] == [5]


def test_a_sign_of_life_comes_after_256_silent_plans():
    made = tally()
    for sequence in range(2, 300):
        made.follow(Plan(sequence))
    for child in SPANS:
        made.hear(child, Report(255))
    assert made.turn() == []
    for child in SPANS:
        made.hear(child, Report(256))
    assert made.turn() == [Report(299, floor=256)]
    assert made.turn() == []


# Locks


def test_what_a_lock_overtakes_goes_up_with_its_date():
    made = tally()
    made.hear(0, say("w", hits=0b11))
    made.follow(Plan(2, lock=((0,),)))
    assert [(one.seen, one.hits, len(one.fresh)) for one in made.turn()] == [(1, b"\3", 0), (1, b"", 1)]
    made.hear(1, say("w", hits=0b11))
    assert [(one.seen, one.hits, len(one.fresh), one.ranks) for one in made.turn()] == [
        (1, b"\1", 0, b"\2"),
        (1, b"", 1, b"\2"),
    ]


def test_the_first_who_breaks_a_lock_is_heard_at_once():
    made = tally()
    made.follow(Plan(2, lock=((0,),)))
    made.hear(4, Report(2, b"\1", unlock=2, lasted=9))
    assert [(one.unlock, one.lasted, one.ranks, one.hits) for one in made.turn()] == [(2, 9, mask(0b110000), b"")]
    made.hear(1, Report(2, b"\1", unlock=2, lasted=8))
    assert made.turn() == []
    assert made.holds
