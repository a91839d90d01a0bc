"""Stages: their modes."""

from __future__ import annotations

import pytest
from torch import nn

from coordd_torch.pipeline.capture import capture, stage


def modes(module):
    return [each.training for each in module.children()]


def build():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())


def test_what_is_frozen_stays_so():
    model = build()
    model[1].eval()
    whole = stage(capture(model), 0, 2)
    assert modes(whole.train()) == [True, False, True]
    assert modes(whole.eval()) == [False, False, False]
    assert modes(whole.train()) == [True, False, True]
    whole.eval().restore()
    assert modes(model) == [True, False, True]
    again = stage(capture(model), 0, 2)
    assert modes(again.train()) == [True, False, True]


@pytest.mark.parametrize("training", [True, False])
def test_a_model_in_either_mode_trains(training):
    model = build().train(training)
    whole = stage(capture(model), 0, 2)
    assert modes(whole.train()) == [True] * 3
    whole.restore()
    assert modes(model) == [training] * 3
