"""What in a value cannot be pickled."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from coordd.pipeline.pickling_diagnosis import culprit


def function():
    return None


LAMBDA = lambda: None  # noqa: E731 - has no name to be found by


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LAMBDA, "value"),
        ([1, (2, LAMBDA)], "value[1][1]"),
        ({"a": 1, "b": {"c": LAMBDA}}, "value['b']['c']"),
        (SimpleNamespace(fine=function, config=SimpleNamespace(act=LAMBDA)), "value.config.act"),
    ],
)
def test_the_smallest_part_that_fails_is_named(value, path):
    assert culprit(value, pickle.dumps) == (path, LAMBDA)


def test_a_whole_is_named_whose_parts_are_fine():
    class Local:
        """Of a class that cannot be found by its name."""

        def __init__(self):
            self.fine = 3

    value = [Local()]
    path, found = culprit(value, pickle.dumps)
    assert (path, found) == ("value[0]", value[0])
