"""What ranks disagree on is told to all of them, with each value and where it was submitted."""

from __future__ import annotations

import pytest

from coordd.negotiation.validation import sites, verdict
from coordd.ops.messages import Announcement, Kind, ReduceOp, Request, Response
from tests.star import allreduce

W = allreduce("w", 2)


@pytest.mark.parametrize(
    ("attribute", "other", "texts"),
    [
        ("operation", Request(Kind.BROADCAST, "w", "float32", (2,)), ("allreduce", "broadcast")),
        ("dtype", allreduce("w", 2, dtype="float64"), ("float32", "float64")),
        ("shape", allreduce("w", 2, 1), ("(2,)", "(2, 1)")),
        ("reduction", allreduce("w", 2, op=ReduceOp.MAX), ("sum", "max")),
        ("scale factors", allreduce("w", 2, prescale=0.5), ("prescale 1.0, postscale 1.0", "prescale 0.5, ")),
        ("scale factors", allreduce("w", 2, postscale=1 + 1e-12), ("prescale 1.0, postscale 1.0", "1.000000000001")),
        ("root rank", allreduce("w", 2, root=1), ("-1", "1")),
    ],
)
def test_a_difference_is_named_with_both_values_and_their_sites(attribute, other, texts):
    parts = {1: Announcement(W, "a.py:1"), 2: Announcement(other, "b.py:2"), 4: Announcement(W, "a.py:1")}
    response = verdict(parts)
    assert (response.attribute, response.recipients) == (attribute, (0, 1, 2))
    assert f": ranks disagree on the {attribute} of 'w' (ranks 0, 2: {texts[0]}" in response.error
    assert " at a.py:1; rank 1: " in response.error
    assert texts[1] in response.error
    assert response.error.endswith(" at b.py:2)")


@pytest.mark.parametrize(
    ("other", "phrase"),
    [
        (Request(Kind.ALLGATHER, "w", "float32", (2,)), "Mismatched operations: "),
        (allreduce("w", 2, dtype="float64"), "Mismatched data types: "),
        (allreduce("w", 3), "Mismatched ALLREDUCE tensor shapes: "),
        (allreduce("w", 2, prescale=2.0), "Mismatched prescale and/or postscale factors: "),
        (allreduce("w", 2, op=ReduceOp.MAX), "Mismatched reduction operation: "),
    ],
)
def test_a_difference_begins_with_horovods_words_for_it(other, phrase):
    assert verdict({1: Announcement(W), 2: Announcement(other)}).error.startswith(phrase)


def test_horovods_words_for_a_difference_name_the_operation():
    roots = [Announcement(Request(Kind.BROADCAST, "w", "float32", (2,), root=root)) for root in (0, 1)]
    assert verdict(dict(zip((1, 2), roots, strict=True))).error.startswith("Mismatched BROADCAST root ranks: ")
    assert verdict({1: gather(2, 3), 2: gather(2, 4)}).error.startswith("Mismatched ALLGATHER tensor shapes: ")


def test_what_agrees_is_carried_out_as_the_lowest_rank_has_it():
    assert verdict({2: Announcement(W), 1: Announcement(W)}) == Response(W)


def gather(*shape: int) -> Announcement:
    return Announcement(Request(Kind.ALLGATHER, "g", "float32", shape))


def test_first_dimensions_of_an_allgather_may_differ():
    response = verdict({1: gather(2, 3), 4: gather(0, 3), 2: gather(5, 3)})
    assert not response.error
    assert response.sizes == (2, 5, 0)


@pytest.mark.parametrize("other", [gather(2, 4), gather(2), gather(2, 3, 1)])
def test_the_other_dimensions_of_an_allgather_may_not(other):
    assert verdict({1: gather(2, 3), 2: other}).attribute == "shape"


def test_sites_are_listed_by_rank_and_once():
    parts = {
        1 << 2: Announcement(W, "c.py:3"),
        1 << 0 | 1 << 4: Announcement(W, "b.py:2"),
        1 << 1: Announcement(W),
        1 << 3: Announcement(W, "b.py:2"),
    }
    assert sites(parts) == ["b.py:2", "c.py:3"]
