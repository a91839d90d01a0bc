from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import coordd.torch as cd
from coordd_torch.compression import Compression, made
from tests.local_ranks import each_rank
from tests.torch_plugin.training import alone, same, together

PAGE = Path(__file__).parents[2] / "docs" / "compression.md"
NARROW = {Compression.fp16: torch.float16, Compression.bf16: torch.bfloat16}


def test_none_is_the_tensor_itself():
    tensor = torch.ones(3)
    small, context = Compression.none.compress(tensor)
    assert small is tensor
    assert Compression.none.decompress(small, context) is tensor


@pytest.mark.parametrize("compression", [*NARROW, *(kind() for kind in NARROW)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_floats_travel_in_sixteen_bits(compression, dtype):
    tensor = torch.tensor([1.0, -0.5, 3.140625], dtype=dtype)
    small, context = compression.compress(tensor)
    assert small.dtype == NARROW[type(made(compression))]
    back = compression.decompress(small, context)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("compression", NARROW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_what_is_narrow_or_no_float_stays_as_it_is(compression, dtype):
    tensor = torch.ones(3).to(dtype)
    small, context = compression.compress(tensor)
    assert small is tensor
    assert compression.decompress(small, context) is tensor


def test_the_range_of_bf16_is_that_of_fp32():
    tensor = torch.tensor([1e38, 70_000.0])
    assert torch.isfinite(Compression.bf16.compress(tensor)[0]).all()
    assert torch.isinf(Compression.fp16.compress(tensor)[0]).all()


def test_sixteen_bits_tell_what_they_save_and_lose():
    compressors = [Compression.bf16() for _ in range(2)]

    def body(rank):
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), [("weight", weight)], compression=compressors[rank]
        )
        for _ in range(20):
            optimizer.zero_grad()
            (weight @ torch.linspace(0, 1, 1000)).backward()
            optimizer.step()

    each_rank(2, body)
    for compressor in compressors:
        assert compressor.ratio == pytest.approx(2.0)
        assert 1e-4 < compressor.error < 2**-8


class InHorovodsWords:
    """A compressor as Horovod's documentation teaches it."""

    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


class Subclassed(cd.Compressor):
    compress = staticmethod(InHorovodsWords.compress)
    decompress = staticmethod(InHorovodsWords.decompress)


@pytest.mark.parametrize("compression", [InHorovodsWords, InHorovodsWords(), Subclassed, Subclassed()])
def test_what_was_written_for_horovod_goes_on_working(compression):
    assert torch.equal(summed(compression), torch.full((4,), 3.0))


def summed(compression):
    def body(rank):
        return cd.allreduce(torch.full((4,), 1.0 + rank), op=cd.Sum, compression=compression)

    return each_rank(2, body)[0]


@pytest.mark.parametrize("compression", [InHorovodsWords, Subclassed])
@pytest.mark.parametrize("op", [cd.Average, cd.Adasum])
def test_what_was_written_for_horovod_trains(compression, op):
    same(together(2, compression=compression, op=op), None if op is cd.Adasum else alone(2), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [getattr(Compression, name) for name in vars(Compression) if name[0] != "_"])
@pytest.mark.parametrize("name", ["ratio", "error"])
def test_a_class_that_is_asked_what_objects_tell_says_so(kind, name):
    with pytest.raises(AttributeError, match=rf"{kind.__name__} is a class.* compression\.{name}$"):
        getattr(kind, name)
    assert getattr(kind(), name) == {"ratio": 1.0, "error": 0.0}[name]
    assert f"compression.{name}" in Compression.__doc__


@pytest.mark.parametrize("nonsense", ["fp16", 3, None, object, InHorovodsWords.compress])
def test_what_is_no_compression_is_refused(nonsense):
    with pytest.raises(cd.ArgumentError, match="is no compression: give one of Compression"):
        made(nonsense)


@pytest.mark.parametrize("compression", [Compression.int8, Compression.topk, Compression.powersgd])
@pytest.mark.parametrize("op", [cd.Min, cd.Max, cd.Product, cd.Adasum])
def test_what_makes_means_makes_nothing_else(compression, op):
    def body(_):
        with pytest.raises(cd.ArgumentError, match="makes sums and averages, not"):
            wrapped(compression, op)

    each_rank(1, body)


def wrapped(compression, op):
    weight = torch.nn.Parameter(torch.ones(2))
    return cd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)], compression=compression, op=op)


@pytest.mark.parametrize("index", [0, 1])
def test_the_page_shows_compressors_that_work(index):
    blocks = re.findall(r"^```python\n(class .*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    names = {"torch": torch, "cd": cd}
    exec(compile("from coordd_torch.rounds import Gather, Mean\n" + blocks[index], str(PAGE), "exec"), names)  # noqa: S102 - our own page
    (kind,) = [found for found in names.values() if isinstance(found, type) and issubclass(found, cd.Compressor)]

    def body(_):
        weight = torch.nn.Parameter(torch.zeros(500))
        compressor = kind()
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.01), [("weight", weight)], compression=compressor
        )
        for _ in range(300):
            optimizer.zero_grad()
            (weight - torch.linspace(-1, 1, 500)).square().sum().backward()
            optimizer.step()
        return weight.detach(), compressor.ratio

    for weight, ratio in each_rank(2, body):
        assert (weight - torch.linspace(-1, 1, 500)).abs().mean() < 0.05
        assert ratio > 1.9
