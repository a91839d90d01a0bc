"""The tensor table: what a rank says of new tensors, and that none is ever lost."""

from __future__ import annotations

import numpy as np
import pytest

from coordd.errors import DuplicateNameError
from coordd.negotiation.response_cache import ResponseCache
from coordd.negotiation.tensor_table import Entry, TensorTable, announced, show_site
from coordd.ops.handles import Handle
from coordd.ops.messages import Announcement, Report, Request, Response
from tests.star import allreduce

SCRIPT = compile("", "train.py", "exec")
W, V = allreduce("w"), allreduce("v")


def entry(request: Request, line: int | None = 1, *, filler: bool = False) -> Entry:
    site = None if line is None else (SCRIPT, line)
    return Entry(request, np.empty(0), Handle(request.name), site=site, filler=filler)


def knowing(*requests: Request, line: int | None = 1) -> ResponseCache:
    """A cache in which this rank has its own tensors in slots 0, 1, …"""
    cache = ResponseCache(8)
    for slot, request in enumerate(requests):
        cache.store(Response(request, slot=slot))
        cache.adopt(slot, request, None if line is None else (SCRIPT, line))
    return cache


def admit(table: TensorTable, *entries: Entry, cache: ResponseCache, seen: int) -> Report | None:
    """What a rank says after these were submitted."""
    return announced(table.admit(entries), cache, seen=seen)


def test_what_is_new_is_spelled_out_with_its_site():
    report = admit(TensorTable(), entry(W), entry(V, 2, filler=True), cache=ResponseCache(8), seen=7)
    assert report == Report(7, fresh=(Announcement(W, "train.py:1"), Announcement(V, "train.py:2", True)))


def test_what_is_known_is_a_bit():
    report = admit(TensorTable(), entry(V, filler=True), entry(W), cache=knowing(W, V), seen=3)
    assert report == Report(3, hits=b"\x03", fillers=b"\x02")


def test_another_shape_is_news():
    report = admit(TensorTable(), entry(allreduce("w", 5)), cache=knowing(W), seen=3)
    assert report.fresh[0].request.shape == (5,)
    assert not report.hits


def test_another_site_is_news_once():
    cache, table = knowing(W), TensorTable()
    report = admit(table, entry(W, 31), cache=cache, seen=1)
    assert report == Report(1, fresh=(Announcement(W, "train.py:31"),))
    table.take("w")
    assert admit(table, entry(W, 31), cache=cache, seen=2) == Report(2, hits=b"\x01")


def test_the_site_of_another_tensor_under_that_name_does_not_count():
    """Who has told the coordinator of line 31 for one shape has not told it for the other."""
    cache, table = knowing(W), TensorTable()
    admit(table, entry(allreduce("w", 5), 31), cache=cache, seen=1)
    table.take("w")
    assert admit(table, entry(W, 31), cache=cache, seen=2).fresh == (Announcement(W, "train.py:31"),)


def test_an_unknown_site_is_a_site():
    assert admit(TensorTable(), entry(W, None), cache=knowing(W, line=None), seen=1) == Report(1, hits=b"\x01")


def test_without_news_there_is_no_report():
    table = TensorTable()
    assert admit(table, cache=ResponseCache(8), seen=1) is None


def test_a_name_in_flight_is_refused_and_not_told():
    table, first, second = TensorTable(), entry(W, 1), entry(allreduce("w", 5), 2)
    report = admit(table, first, second, cache=ResponseCache(8), seen=0)
    assert report == Report(0, fresh=(Announcement(W, "train.py:1"),))
    assert not first.handle.poll()
    with pytest.raises(DuplicateNameError, match=r"'w', submitted at train\.py:2, is still in flight from train\.py:1"):
        second.handle.result(0)
    assert admit(table, entry(W), cache=ResponseCache(8), seen=0) is None
    assert list(table) == [first]


def test_a_name_can_be_used_again_when_it_is_done():
    table = TensorTable()
    for _ in range(2):
        admit(table, one := entry(W), cache=ResponseCache(0), seen=0)
        assert table.take("w") is one


def test_entries_are_found_until_they_are_taken():
    table, old, young = TensorTable(), entry(W), entry(V)
    assert table.oldest() == []
    admit(table, old, young, cache=ResponseCache(8), seen=0)
    assert (table.oldest(), table.last, len(table)) == ([old], ("v", young.site, young.handle.submitted), 2)
    assert table.find("w") is old
    assert table.take("w") is old
    assert table.oldest() == [young]
    with pytest.raises(KeyError):
        table.take("w")


def test_clearing_returns_everything():
    table = TensorTable()
    table.admit(entries := [entry(W), entry(V)])
    assert table.clear() == entries
    assert len(table) == 0


def test_what_landed_is_the_result_or_becomes_it():
    plain, doubled = entry(W), entry(V)
    doubled.land = lambda array: array * 2
    for one in (plain, doubled):
        one.finish(np.ones(1))
    assert plain.handle.result(0).tolist() == [1.0]
    assert doubled.handle.result(0).tolist() == [2.0]


def test_a_site_is_a_file_and_a_line():
    assert show_site((SCRIPT, 31)) == "train.py:31"
    assert show_site(None) == "an unknown place"


def test_names_that_are_used_once_leave_nothing_behind():
    table, cache = TensorTable(), ResponseCache(2)
    sizes = set()
    for number in range(100):
        admit(table, entry(allreduce(f"noname.{number}", transient=True)), cache=cache, seen=0)
        table.take(f"noname.{number}")
        sizes.add(sum(len(part) for part in vars(table).values() if hasattr(part, "__len__")))
    assert len(sizes) == 1


def test_an_entry_may_be_used_again_and_starts_anew():
    table, again = TensorTable(), entry(W)
    for _ in range(2):
        assert table.admit([again]) == [again]
        assert (again.released, again.awaited) == (False, False)
        again.released = again.awaited = True
        table.take("w")
