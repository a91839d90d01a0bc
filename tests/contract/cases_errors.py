"""Errors: all ranks hear the same, with every rank's value and the line of the script, and go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coordd import api
from coordd.errors import MismatchError
from coordd.ops.messages import ReduceOp
from coordd.parallel.objects import allgather_object
from tests.contract.cases_completion import begun, stepped
from tests.contract.plugin import plugin
from tests.mpi.cases import ranks


def _odd(reduce: Callable[..., Any]) -> None:
    reduce(plugin().tensor(np.ones(3 + api.rank())), name="odd", op=ReduceOp.SUM)


HERE = f"cases_errors.py:{_odd.__code__.co_firstlineno + 1}"


@ranks(2)
def case_ranks_that_disagree_on_a_shape_all_hear_of_both_and_of_the_line() -> None:
    for reduce in plugin().reductions:
        with pytest.raises(MismatchError) as caught:
            _odd(reduce)
        told = str(caught.value)
        for words in ("shape of 'odd'", "rank 0: (3,) at ", "rank 1: (4,) at "):
            assert words in told
        assert told.count(HERE) == 2
        assert len(set(allgather_object(told))) == 1
        _goes_on(reduce)


@ranks(2)
def case_ranks_that_train_different_models_are_told_which_parameter_differs() -> None:
    outputs = (
        4 + api.rank()
    )  # which no other case has: TensorFlow takes gradients of the same names and shapes for the same
    with pytest.raises(Exception, match="different parameters") as caught:
        stepped(begun(0.0, outputs=outputs), 0, outputs=outputs)
    for words in ("out", "(600, 4)", "(600, 5)"):
        assert words in str(caught.value)
    _goes_on(plugin().reductions[0])


def _goes_on(reduce: Callable[..., Any]) -> None:
    found = reduce(plugin().tensor(np.ones(3)), name="on", op=ReduceOp.SUM)
    assert plugin().view(found).tolist() == [2.0] * 3
