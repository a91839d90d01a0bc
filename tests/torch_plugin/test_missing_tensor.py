"""The blocking forms in place report a call without its tensor, though only the form that they call is refusable."""

from __future__ import annotations

import pytest
import torch

import coordd.torch as cd
from coordd.errors import RefusedError
from tests.local_ranks import each_rank


@pytest.mark.parametrize("function", [cd.allreduce_, cd.broadcast_])
def test_a_missing_tensor_of_one_rank_is_reported_to_the_others(function):
    rest = {"root_rank": 0} if function is cd.broadcast_ else {}

    def body(rank):
        with pytest.raises(TypeError if rank else RefusedError):
            function(**({} if rank else {"tensor": torch.ones(2)}), **rest)
        return True

    assert each_rank(2, body) == [True, True]
