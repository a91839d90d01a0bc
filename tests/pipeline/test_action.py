"""Actions that print and parse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.pipeline.action import RECEIVES, SENDS, Action, Kind

NUMBERS = st.integers(0, 10_000)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.FORWARD, 0)),
        ("10B31", Action(10, Kind.BACKWARD, 31)),
        ("0SEND_F3>1", Action(0, Kind.SEND_FORWARD, 3, 1)),
        ("0RECV_B3<1", Action(0, Kind.RECV_BACKWARD, 3, 1)),
        ("4REDUCE", Action(4, Kind.REDUCE)),
        ("4STEP2", Action(4, Kind.STEP, 2)),
    ],
)
def test_an_action_prints_and_parses(text, action):
    assert str(action) == text
    assert Action.parse(text) == action


@given(NUMBERS, st.sampled_from(sorted(Kind)), NUMBERS, NUMBERS)
def test_every_action_does(stage, kind, microbatch, peer):
    action = Action(stage, kind, microbatch, peer if kind in RECEIVES | SENDS else -1)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2", "2X0", "2F0 ", "2f0", "2F-1", "2F0>", "2SEND_F0>x"])
def test_anything_else_is_refused(text):
    with pytest.raises(ArgumentError, match="actions look like 2F0"):
        Action.parse(text)


def test_an_action_has_words_for_errors():
    assert Action.parse("2F0").told == "the forward pass of microbatch 0 in stage 2"
    assert Action.parse("1STEP").told == "the optimizer's step in stage 1"
    assert all(Action(0, kind, 0).told.startswith("the ") for kind in Kind)
