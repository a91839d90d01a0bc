"""Allreduce in all its forms, against what a single process computes."""

import threading

import pytest
import torch
from torch.testing import assert_close

import coordd.torch as cd
from tests.mpi.cases import EVERY, ranks
from tests.mpi.reference import everyones, mine, reduced

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
OPERATIONS = {
    **dict.fromkeys(FLOATS, (cd.Average, cd.Sum, cd.Min, cd.Max, cd.Product)),
    **dict.fromkeys(INTEGERS, (cd.Sum, cd.Min, cd.Max, cd.Product)),
    **dict.fromkeys((torch.complex64, torch.complex128), (cd.Average, cd.Sum, cd.Product)),
    torch.bool: (cd.Min, cd.Max, cd.Product),
}


@ranks(*EVERY)
def case_every_type_under_every_operation() -> None:
    for dtype, operations in OPERATIONS.items():
        for op in operations:
            result = cd.allreduce(mine(dtype), op=op)
            assert result.dtype == dtype
            assert_close(result, reduced(everyones(dtype), op))


def case_what_has_no_meaning_is_refused_and_the_daemon_goes_on() -> None:
    for dtype, op in [(torch.int32, cd.Average), (torch.bool, cd.Sum), (torch.complex64, cd.Max)]:
        with pytest.raises(cd.ArgumentError, match=op.name.lower()):
            cd.allreduce(torch.ones(3).to(dtype), op=op)
    with pytest.raises(cd.ArgumentError, match="to_dense"):
        cd.allreduce(torch.ones(3).to_sparse())
    assert cd.allreduce(torch.tensor(1), op=cd.Sum) == cd.size()


@ranks(4)
def case_sixteen_bits_are_added_up_in_thirty_two() -> None:
    # One after the other in bf16, 256 + 1 + 1 + 1 would remain 256; in fp16 the same happens from 2048 on.
    for dtype, large, total in [(torch.bfloat16, 256.0, 260.0), (torch.float16, 2048.0, 2052.0)]:
        value = large if cd.rank() == 0 else 1.0
        assert cd.allreduce(torch.full((9,), value, dtype=dtype), op=cd.Sum).tolist() == [total] * 9


def case_in_place_changes_the_tensor_and_out_of_place_does_not() -> None:
    expected = reduced(everyones(), cd.Average)
    tensor = mine()
    assert_close(cd.allreduce(tensor), expected)
    assert torch.equal(tensor, mine())
    assert cd.allreduce_(tensor) is tensor
    assert_close(tensor, expected)
    tensor = mine()
    assert cd.synchronize(cd.allreduce_async_(tensor)) is tensor
    assert_close(tensor, expected)


def case_handles_are_waited_for_in_any_order() -> None:
    handles = [cd.allreduce_async(mine(seed=seed), op=cd.Sum) for seed in range(20)]
    for seed in reversed(range(20)):
        assert_close(cd.synchronize(handles[seed]), reduced(everyones(seed=seed)))
        assert cd.poll(handles[seed])


def case_groups_keep_the_order_of_their_tensors() -> None:
    shapes = [(4,), (2, 3), (), (7, 1)]
    expected = [reduced(everyones(shape=shape), cd.Average) for shape in shapes]
    tensors = [mine(shape=shape) for shape in shapes]
    for result in (cd.grouped_allreduce(tensors), cd.synchronize(cd.grouped_allreduce_async(tensors))):
        assert_close(list(result), expected)
    result = cd.grouped_allreduce_(tensors)
    assert all(one is other for one, other in zip(result, tensors, strict=True))
    assert_close(tensors, expected)
    assert_close(list(cd.synchronize(cd.grouped_allreduce_async_(tensors))), expected)


def case_factors_apply_before_and_after() -> None:
    for dtype in FLOATS:
        result = cd.allreduce(mine(dtype), op=cd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        assert_close(result, reduced(everyones(torch.float64), cd.Sum).mul(1.5).to(dtype), rtol=2e-2, atol=2e-2)
    with pytest.raises(cd.ArgumentError, match="prescale"):
        cd.allreduce(torch.ones(3, dtype=torch.int32), op=cd.Sum, prescale_factor=0.5)


def case_scalars_and_empty_tensors() -> None:
    assert_close(cd.allreduce(mine(shape=()), op=cd.Sum), reduced(everyones(shape=())))
    for shape in [(0,), (3, 0, 2)]:
        assert cd.allreduce(torch.empty(shape)).shape == shape
        assert cd.allreduce_(torch.empty(shape)).shape == shape


def case_any_memory_layout() -> None:
    whole = mine(shape=(6, 8))
    expected = reduced(everyones(shape=(6, 8)))
    assert_close(cd.allreduce(whole.t(), op=cd.Sum), expected.t())
    assert_close(cd.allreduce(whole[::2, 1::3], op=cd.Sum), expected[::2, 1::3])
    assert_close(cd.allreduce(whole[0].expand(5, 8), op=cd.Sum), expected[0].expand(5, 8))
    cd.allreduce_(whole[1::2, ::2], op=cd.Sum)
    assert_close(whole[1::2, ::2], expected[1::2, ::2])
    assert torch.equal(whole[::2], mine(shape=(6, 8))[::2])
    image = mine(shape=(2, 3, 4, 5)).to(memory_format=torch.channels_last)
    assert_close(cd.allreduce_(image, op=cd.Sum), reduced(everyones(shape=(2, 3, 4, 5))), check_stride=False)


def case_a_layout_may_differ_between_the_ranks() -> None:
    # Plain MPI would add the values as they lie in memory.
    tensor = mine(shape=(4, 6))
    other = tensor if cd.rank() else tensor.t().contiguous().t()
    assert_close(cd.allreduce_(other, op=cd.Sum), reduced(everyones(shape=(4, 6))), check_stride=False)


def case_names_match_whatever_the_order_on_each_rank() -> None:
    seeds = torch.randperm(40, generator=torch.Generator().manual_seed(cd.rank())).tolist()
    handles = {seed: cd.allreduce_async(mine(seed=seed), name=f"order.{seed}", op=cd.Sum) for seed in seeds}
    for seed, handle in handles.items():
        assert_close(cd.synchronize(handle), reduced(everyones(seed=seed)))


def case_many_tensors_of_mixed_types_step_after_step() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int32]
    for step in range(4):
        handles = [
            cd.allreduce_async(mine(dtypes[i % 4], (i % 23,), seed=step * 200 + i), name=f"mixed.{i}", op=cd.Sum)
            for i in range(200)
        ]
        for i, handle in enumerate(handles):
            expected = reduced(everyones(dtypes[i % 4], (i % 23,), seed=step * 200 + i))
            assert_close(cd.synchronize(handle), expected)


def case_a_tensor_larger_than_every_buffer() -> None:
    count = 12_500_003
    tensor = torch.arange(count, dtype=torch.float32).remainder_(1000).add_(cd.rank())
    expected = torch.arange(count, dtype=torch.float32).remainder_(1000).mul_(cd.size())
    expected += sum(range(cd.size()))
    assert torch.equal(cd.allreduce_(tensor, op=cd.Sum), expected)


def case_reruns_are_bitwise_equal_and_so_are_the_ranks() -> None:
    runs = []
    for _ in range(3):
        handles = [cd.allreduce_async(mine(shape=(97, 13), seed=i), name=f"rerun.{i}") for i in range(11)]
        runs.append(torch.stack([cd.synchronize(handle) for handle in handles]))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    for copy in cd.allgather(runs[0][None]):
        assert torch.equal(copy, runs[0])


def case_gradients_flow() -> None:
    weights = torch.arange(5.0)
    for op in (cd.Sum, cd.Average):
        tensor = mine(shape=(5,)).requires_grad_()
        (cd.allreduce(tensor, op=op) * weights * (cd.rank() + 1)).sum().backward()
        assert_close(tensor.grad, reduced([weights * (rank + 1) for rank in range(cd.size())], op))


def case_compressed_tensors_come_back_in_their_type() -> None:
    tolerances = {cd.Compression.none: 1e-6, cd.Compression.fp16: 2e-3, cd.Compression.bf16: 2e-2}
    for compression, tolerance in tolerances.items():
        result = cd.allreduce(mine(), compression=compression)
        assert result.dtype == torch.float32
        assert_close(result, reduced(everyones(), cd.Average), rtol=tolerance, atol=tolerance)


def case_threads_submit_side_by_side() -> None:
    results = {}

    def work(thread: int) -> None:
        for i in range(25):
            results[thread, i] = cd.allreduce(mine(seed=thread * 25 + i), name=f"thread.{thread}.{i}", op=cd.Sum)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (number, i), result in results.items():
        assert_close(result, reduced(everyones(seed=number * 25 + i)))
    assert len(results) == 100


def case_a_process_set_reduces_among_its_members() -> None:
    pairs = [cd.ProcessSet([rank, rank + 1]) for rank in range(0, cd.size(), 2)]
    pair = pairs[cd.rank() // 2]
    expected = reduced([everyones()[rank] for rank in pair.ranks])
    assert_close(cd.allreduce(mine(), op=cd.Sum, process_set=pair), expected)
