from __future__ import annotations

import pytest
import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.inputs import Call, only


class Many(nn.Module):
    def forward(self, batch, *more, scale=1, **rest):
        return batch


def test_leaves_are_named_after_arguments_and_paths():
    call = Call.bound(Many(), ({"a b": 1, "c": (2, None)}, 3, 4))
    assert call.values == {"batch_a_b": 1, "batch_c_0": 2, "batch_c_1": None, "more_0": 3, "more_1": 4}
    assert call.arguments() == (({"a b": 1, "c": (2, None)}, 3, 4), {})
    assert call.arguments([5, 6, 7, 8, 9])[0][1:] == (8, 9)


def test_names_differ():
    assert Call.bound(Many(), {"batch": {"a b": 1, "a_b": 2}}).values == {"batch_a_b": 1, "batch_a_b_2": 2}


def test_names_do_not_depend_on_how_arguments_are_passed():
    plain = Call.bound(Many(), ([1],))
    assert Call.bound(Many(), {"batch": [1]}) == plain == Call.bound(Many(), [1])
    assert Call.bound(Many(), {"batch": 1, "scale": 2, "extra": 3}).values == {"batch": 1, "scale": 2, "extra": 3}


def test_a_mapping_that_names_no_arguments_is_the_argument():
    assert Call.bound(nn.Linear(1, 1), {"x": 1}).values == {"input_x": 1}


def test_a_chain_takes_one_argument():
    model = nn.Sequential(nn.Linear(1, 1))
    tensor = torch.ones(1)
    assert only(model, tensor) is tensor
    assert only(model, (tensor,)) is tensor
    assert only(model, {"input": tensor}) is tensor
    assert only(model, (1, 2)) == (1, 2)
    with pytest.raises(ArgumentError, match="takes one argument, not 2"):
        only(Many(), {"batch": 1, "scale": 2})


def test_what_forward_does_not_take_is_refused():
    with pytest.raises(ArgumentError, match=r"Linear.forward.* does not take this batch, a tuple of 2: too many"):
        Call.bound(nn.Linear(1, 1), (1, 2))
