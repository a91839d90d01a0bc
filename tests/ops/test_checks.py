"""Numbers that make no sense are refused by every public function, on the caller's line, and nothing is announced."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coordd.torch as cd
from coordd import api
from coordd.config import Config, knobs
from coordd.errors import ArgumentError, ConfigError
from coordd.gradients.bucketing import Grouping
from coordd.gradients.settings import Choices
from coordd.ops.arguments import check_splits
from coordd.ops.checks import finite, whole
from coordd.ops.handles import Handle
from coordd.ops.process_sets import ProcessSet
from coordd.pipeline.config import PipelineConfig
from tests.local_ranks import each_rank

NOT_FINITE = [math.nan, math.inf, -math.inf, np.float32("nan"), "1", b"1", True, None, 1j, 10**400, [1.0]]
NOT_WHOLE = [1.0, 0.5, math.nan, math.inf, "1", True, np.True_, None, 1j, [1], np.float64(1)]


@given(st.integers() | st.integers(-(2**31), 2**31 - 1).map(np.int64))
def test_every_integer_is_whole(value):
    assert whole(value, "x") == int(value)
    assert type(whole(value, "x")) is int


@given(st.integers(), st.integers())
def test_a_bound_is_kept(value, least):
    if value >= least:
        assert whole(value, "x", least=least) == value
    else:
        with pytest.raises(ArgumentError, match=rf"^x is a whole number of {least} or more, not {value}"[:60]):
            whole(value, "x", least=least)


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9))
def test_every_real_number_is_finite(value):
    assert finite(value, "x") == value


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_what_is_no_integer_is_told(value):
    with pytest.raises(ArgumentError, match=r"^x is a whole number, not "):
        whole(value, "x")


@pytest.mark.parametrize("value", NOT_FINITE, ids=lambda value: repr(value)[:20])
def test_what_is_not_finite_is_told(value):
    with pytest.raises(ArgumentError, match=r"^x is a finite number, not .{1,90}$"):
        finite(value, "x")


def factors(call):
    """The calls with each bad factor."""
    return [
        pytest.param(lambda name=name, bad=bad, call=call: call(**{name: bad}), id=f"{name}={bad!r}"[:40])
        for name in ("prescale_factor", "postscale_factor")
        for bad in (math.nan, math.inf, "2", True)
    ]


ROW = torch.ones(1)
BAD_CALLS = [
    *factors(lambda **factor: cd.allreduce_async_(ROW, **factor)),
    *factors(lambda **factor: cd.grouped_allreduce_async_([ROW], **factor)),
    *factors(lambda **factor: cd.reducescatter_async(ROW, **factor)),
    *(
        pytest.param(call, id=name)
        for name, call in {
            "op": lambda: cd.allreduce_async_(ROW, op=99),
            "op, a truth value": lambda: cd.allreduce_async_(ROW, op=True),
            "op, text": lambda: cd.allreduce_async_(ROW, op="Sum"),
            "root": lambda: cd.broadcast_async_(ROW, 0.0),
            "root, a truth value": lambda: cd.broadcast_async_(ROW, False),
            "root, negative": lambda: cd.broadcast_async_(ROW, -1),
            "destination": lambda: cd.send_async(ROW, "1", "x"),
            "destination, negative": lambda: cd.send_async(ROW, -1, "x"),
            "source": lambda: cd.recv_async(ROW, 0.5, "x"),
            "splits": lambda: cd.alltoall_async(ROW, torch.tensor([0.5, 0.5])),
            "predivide": lambda: optimizer(gradient_predivide_factor=math.nan),
            "predivide, zero": lambda: optimizer(gradient_predivide_factor=0.0),
            "passes": lambda: optimizer(backward_passes_per_step=math.nan),
            "passes, a fraction": lambda: optimizer(backward_passes_per_step=1.5),
            "groups": lambda: optimizer(num_groups=0.5),
            "axis": lambda: cd.Grid(dp=2.0),
            "axis, a truth value": lambda: cd.Grid(dp=True, tp=2),
            "a set, empty": lambda: cd.ProcessSet([]),
            "a set to add, empty": lambda: cd.add_process_set([]),
        }.items()
    ),
]


def optimizer(**choices):
    model = torch.nn.Linear(1, 1)
    return cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **choices)


@pytest.mark.parametrize("call", BAD_CALLS)
def test_every_public_function_refuses_numbers_that_make_no_sense_and_goes_on(call):
    def body(rank):
        with pytest.raises(ArgumentError):
            call()
        return api.allreduce(np.array([1.0 + rank])).item()

    assert each_rank(2, body) == [1.5] * 2


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: cd.Compression.topk(ratio=math.nan), "ratio is a finite number"),
        (lambda: cd.Compression.powersgd(rank=2.5), "the rank of PowerSGD is a whole number"),
        (lambda: cd.Compression.int8(block=1.5), "block is a whole number"),
        (lambda: Choices(predivide=math.nan), "gradient_predivide_factor is a finite number above 0"),
        (lambda: Grouping(math.nan, kind=()), "num_groups is a whole number"),
        (lambda: PipelineConfig(microbatches=2.5), "microbatches is a whole number"),
        (lambda: PipelineConfig(microbatches=True), "microbatches is a whole number"),
        (lambda: PipelineConfig(data_parallel=[2, 0.5]), "data_parallel is a whole number"),
        (lambda: PipelineConfig(schedule="interleaved", chunks=0), "chunks is a whole number of 1 or more"),
        (lambda: PipelineConfig(clip_norm=math.nan), "clip_norm is nan"),
        (lambda: PipelineConfig(memory_cap=math.nan), "an amount of memory is a finite number above 0"),
        (lambda: Handle("x").wait(math.nan), "timeout is a finite number"),
        (lambda: check_splits(np.array([2**63, 2**63], np.uint64), 2, 2), "Sum of splits entries is greater"),
    ],
)
def test_every_choice_refuses_them(make, told):
    with pytest.raises(ArgumentError, match=told):
        make()


@given(st.lists(st.integers(-3, 5) | st.floats() | st.booleans() | st.text(max_size=2), max_size=4))
def test_a_process_set_has_ranks_or_is_refused(ranks):
    good = ranks and all(type(rank) is int and rank >= 0 for rank in ranks) and len(set(ranks)) == len(ranks)
    if good:
        assert ProcessSet(ranks).ranks == tuple(sorted(ranks))
    else:
        with pytest.raises(ArgumentError, match="process set"):
            ProcessSet(ranks)


@pytest.mark.parametrize("ranks", [0, "01", b"01", 1.5, object()], ids=lambda ranks: type(ranks).__name__)
def test_what_lists_no_ranks_is_no_process_set(ranks):
    with pytest.raises(ArgumentError, match=r"made of ranks, as in ProcessSet\(\[0, 1\]\)"):
        ProcessSet(ranks)


NUMBERS = [knob for knob in knobs() if knob.kind in {int, float}]


@pytest.mark.parametrize("knob", NUMBERS, ids=lambda knob: knob.name)
@given(st.floats() | st.integers() | st.booleans() | st.text(max_size=5) | st.complex_numbers())
def test_a_setting_is_in_its_range_or_refused(knob, value):
    """As an argument, and as the text of its variable."""
    legal = type(value) in ({int, float} if knob.kind is float else {int}) and knob.low <= value <= knob.high
    if legal:
        assert getattr(Config(**{knob.name: value}), knob.name) == value
    else:
        with pytest.raises(ConfigError, match=f"^{knob.name}="):
            Config(**{knob.name: value})
    text = str(value).strip().replace("\0", "")
    try:
        found = knob.parse(text, source="x") if text else knob.default
    except ConfigError:
        return
    assert found is None or knob.low <= found <= knob.high
