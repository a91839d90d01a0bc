"""Operations on tensors, in all their forms, on ranks that are threads."""

from __future__ import annotations

import inspect
import linecache

import pytest
import torch

import coordd.torch as cd
from tests.local_ranks import each_rank, local_ranks

OPS = {
    cd.Average: lambda parts: parts.mean(0),
    cd.Sum: lambda parts: parts.sum(0),
    cd.Min: lambda parts: parts.amin(0),
    cd.Max: lambda parts: parts.amax(0),
    cd.Product: lambda parts: parts.prod(0),
}
LAYOUTS = {
    "plain": lambda x: x,
    "zero dimensions": lambda x: x.flatten()[0],
    "empty": lambda x: x[:, :0],
    "transposed": lambda x: x.mT,
    "every second": lambda x: x.flatten()[::2],
    "column": lambda x: x[..., 1],
    "flipped order": lambda x: x.permute(2, 0, 1),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "large": lambda x: x.repeat(1, 300, 200),
    "large, every second": lambda x: x.repeat(1, 300, 200).flatten()[::2],
}


def part(rank: int) -> torch.Tensor:
    """What a rank contributes."""
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(rank))


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda size: f"{size}-ranks")
def ranks(request):
    with local_ranks(request.param) as found:
        yield found


@pytest.mark.parametrize("op", OPS)
def test_every_form_of_allreduce_gives_the_same(ranks, op):
    wanted = OPS[op](torch.stack([part(rank) for rank in range(len(ranks))]))

    def body(rank):
        mine = part(rank)
        kept = mine.clone()
        found = [cd.allreduce(mine, op=op), cd.synchronize(cd.allreduce_async(mine, name="a", op=op))]
        found += cd.grouped_allreduce([mine, mine], op=op)
        found += cd.synchronize(cd.grouped_allreduce_async([mine], name="b", op=op))
        assert torch.equal(mine, kept)
        places = [mine.clone() for _ in range(4)]
        assert cd.allreduce_(places[0], op=op) is places[0]
        assert cd.synchronize(cd.allreduce_async_(places[1], op=op)) is places[1]
        assert cd.grouped_allreduce_(places[2:3], op=op)[0] is places[2]
        assert cd.synchronize(cd.grouped_allreduce_async_(places[3:], name="c", op=op))[0] is places[3]
        return [*found, *places]

    for found in ranks.each(body):
        for tensor in found:
            torch.testing.assert_close(tensor, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_can_be_reduced_in_place_and_out_of_place(layout):
    inputs = [LAYOUTS[layout](part(rank)) for rank in range(3)]

    def body(rank):
        mine = LAYOUTS[layout](part(rank))
        copied = cd.allreduce(mine, op=cd.Sum)
        assert torch.equal(mine, inputs[rank])
        handles = [cd.allreduce_async_(mine, op=cd.Sum, name="x"), cd.allreduce_async(part(rank), name="y")]
        cd.synchronize(handles[1])
        assert copied.shape == mine.shape
        return copied, cd.synchronize(handles[0])

    for found in each_rank(3, body):
        for tensor in found:
            assert torch.equal(tensor, inputs[0] + inputs[1] + inputs[2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_can_be_broadcast_gathered_and_sent(layout):
    inputs = [LAYOUTS[layout](part(rank)) for rank in range(2)]

    def body(rank):
        mine = LAYOUTS[layout](part(rank))
        if mine.ndim:
            assert torch.equal(cd.allgather(mine), torch.cat(inputs))
        cd.send_async(mine, 1 - rank, "x")
        received = LAYOUTS[layout](torch.zeros(2, 3, 4))
        assert torch.equal(cd.recv(received, 1 - rank, "x"), inputs[1 - rank])
        assert torch.equal(cd.broadcast_(mine, 1), inputs[1])

    each_rank(2, body)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.complex64],
)
def test_any_type_can_be_summed(dtype):
    def body(rank):
        return cd.allreduce(torch.arange(5).to(dtype) + rank, op=cd.Sum)

    for found in each_rank(3, body):
        assert found.dtype == dtype
        assert torch.equal(found, 3 * torch.arange(5).to(dtype) + 3)


def test_bfloat16_is_added_in_fp32():
    found = each_rank(3, lambda rank: cd.allreduce(torch.tensor([[256.0], [1.0], [1.0]][rank]).bfloat16(), op=cd.Sum))
    assert [tensor.item() for tensor in found] == [258.0] * 3


def test_values_beyond_the_type_become_infinite_and_nothing_breaks():
    def body(rank):
        found = cd.allreduce(torch.tensor([6e4, -6e4, 1.0]).half(), op=cd.Sum, name="x")
        return [*found.tolist(), cd.allreduce(torch.tensor([float("inf"), -float("inf")])[rank], op=cd.Sum).item()]

    for found in each_rank(2, body):
        assert found[:3] == [float("inf"), -float("inf"), 2.0]
        assert found[3] != found[3]


def test_booleans_have_any_and_all():
    def body(rank):
        flags = torch.tensor([rank == 0, True, False])
        return [cd.allreduce(flags, op=op).tolist() for op in (cd.Max, cd.Min, cd.Product)]

    assert each_rank(2, body) == [[[True, True, False], [False, True, False], [False, True, False]]] * 2


@pytest.mark.parametrize("compression", [cd.Compression.fp16, cd.Compression.bf16])
def test_compression_keeps_type_and_nearly_the_values(compression):
    wanted = torch.stack([part(rank) for rank in range(2)]).mean(0)

    def body(rank):
        whole = torch.arange(3)
        assert torch.equal(cd.allreduce(whole, op=cd.Sum, compression=compression), 2 * whole)
        single = cd.allreduce(part(rank), compression=compression)
        (grouped,) = cd.grouped_allreduce([part(rank)], compression=compression)
        assert torch.equal(single, grouped)
        return single

    for found in each_rank(2, body):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.01)


def test_scale_factors_and_the_old_flag():
    def body(rank):
        mine = torch.full((2,), rank + 1.0)
        scaled = cd.allreduce(mine, op=cd.Sum, prescale_factor=0.5, postscale_factor=10.0)
        with pytest.warns(DeprecationWarning, match="Parameter `average` has been replaced with `op`") as warned:
            old = [cd.allreduce(mine, average=average).tolist() for average in (True, False)]
        with pytest.raises(ValueError, match="The op parameter supersedes average"):
            cd.allreduce(mine, average=True, op=cd.Sum)
        return scaled.tolist(), old, {linecache.getline(warning.filename, warning.lineno).strip() for warning in warned}

    line = "old = [cd.allreduce(mine, average=average).tolist() for average in (True, False)]"
    assert each_rank(2, body) == [([15.0, 15.0], [[1.5, 1.5], [3.0, 3.0]], {line})] * 2


def test_names_match_whatever_the_order():
    def body(rank):
        names = ["a", "b", "c", "d"]
        handles = {
            name: cd.allreduce_async(torch.tensor([float(ord(name))]), name=name)
            for name in names[:: 1 - 2 * (rank % 2)]
        }
        return [cd.synchronize(handles[name]).item() for name in names]

    assert each_rank(3, body) == [[97.0, 98.0, 99.0, 100.0]] * 3


def test_a_broadcast_takes_the_roots_values(ranks):
    root = len(ranks) - 1

    def body(rank):
        mine = part(rank)
        found = [cd.broadcast(mine, root), cd.synchronize(cd.broadcast_async(mine, root, "x"))]
        assert torch.equal(mine, part(rank))
        assert cd.broadcast_(mine, root) is mine
        other = part(rank)
        assert cd.synchronize(cd.broadcast_async_(other, root_rank=root)) is other
        return [*found, mine, other]

    for found in ranks.each(body):
        assert all(torch.equal(tensor, part(root)) for tensor in found)


def test_an_allgather_joins_uneven_and_empty_blocks(ranks):
    def block(rank):
        return torch.full((rank % 3, 2), float(rank))

    def body(rank):
        found = [cd.allgather(block(rank)), cd.synchronize(cd.allgather_async(block(rank), name="x"))]
        return [*found, *cd.grouped_allgather([block(rank), block(rank)], name="y")]

    wanted = torch.cat([block(rank) for rank in range(len(ranks))])
    for found in ranks.each(body):
        assert all(torch.equal(tensor, wanted) for tensor in found)


def test_a_process_set_leaves_the_others_alone():
    pair, both = cd.ProcessSet([0, 2]), cd.ProcessSet([2, 0])
    assert pair == both

    def body(rank):
        found = []
        if rank != 1:
            handle = cd.allreduce_async(torch.tensor([float(rank)]), op=cd.Sum, process_set=pair)
            found.append(cd.allgather(torch.tensor([rank]), process_set=both).tolist())
            found.append(cd.broadcast(torch.tensor([rank]), 2, process_set=pair).tolist())
            cd.barrier(process_set=pair)
            found.append(cd.synchronize(handle).tolist())
        found.append(cd.allreduce(torch.tensor([1.0]), op=cd.Sum).tolist())  # unnamed, and still in step
        return found

    assert each_rank(3, body) == [[[0, 2], [2], [2.0], [3.0]], [[3.0]], [[0, 2], [2], [2.0], [3.0]]]


def test_a_single_member_is_a_set_too():
    def body(rank):
        alone = cd.ProcessSet([rank])
        return cd.allreduce(torch.tensor([float(rank)]), op=cd.Sum, process_set=alone, name="same").item()

    assert each_rank(3, body) == [0.0, 1.0, 2.0]


def test_a_barrier_holds_everybody_back():
    arrived = []

    def body(rank):
        arrived.append(rank)
        cd.barrier()
        return sorted(arrived)

    assert each_rank(4, body) == [[0, 1, 2, 3]] * 4


def test_polling_tells_whether_it_is_done_and_results_stay():
    def body(rank):
        handle = cd.allreduce_async(torch.ones(2), name="x")
        group = cd.grouped_allreduce_async([torch.ones(2), torch.ones(3)], name="y")
        assert cd.synchronize(handle) is cd.synchronize(handle)
        assert group.wait(10.0)
        assert cd.poll(handle)
        assert cd.poll(group)
        assert [tensor.shape for tensor in cd.synchronize(group)] == [(2,), (3,)]

    each_rank(2, body)


def test_empty_groups_are_allowed():
    def body(rank):
        return cd.grouped_allreduce([]), cd.grouped_allgather([]), cd.synchronize(cd.grouped_allreduce_async([]))

    assert each_rank(2, body) == [((), (), ())] * 2


def test_forms_of_an_operation_take_the_same_arguments():
    """What the in-place asynchronous form takes, its brothers take, too, in the same order."""
    names = list(inspect.signature(cd.allreduce_async_).parameters)
    assert [name for name in inspect.signature(cd.allreduce).parameters if name != "compression"] == names
    arguments = (None, "x", cd.Sum, 2.0, 3.0, cd.global_process_set)

    def body(rank):
        one = torch.ones(1)
        found = [form(one.clone(), *arguments) for form in (cd.allreduce_,)]
        found += [cd.synchronize(form(one.clone(), *arguments)) for form in (cd.allreduce_async, cd.allreduce_async_)]
        found.append(cd.allreduce(one, None, "x", cd.Compression.none, *arguments[2:]))
        found += cd.grouped_allreduce(
            [one], None, "x", cd.Compression.none, cd.Sum, prescale_factor=2.0, postscale_factor=3.0
        )
        return [tensor.item() for tensor in found]

    assert each_rank(2, body) == [[12.0] * 5] * 2


def test_what_changes_in_place_is_known_to_autograd():
    def body(rank):
        for change in (cd.allreduce_, lambda tensor: cd.broadcast_(tensor, 0)):
            base = torch.ones(3, requires_grad=True)
            inner = base * 1
            loss = (inner * inner).sum()
            change(inner)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    each_rank(2, body)


def test_inference_tensors_can_travel():
    def body(rank):
        with torch.inference_mode():
            return cd.allreduce_(torch.ones(2)).tolist(), cd.broadcast(torch.ones(2), 0).tolist()

    assert each_rank(2, body) == [([1.0, 1.0], [1.0, 1.0])] * 2


def test_conjugated_views_travel_by_value():
    def body(rank):
        mine = torch.tensor([1 + 2j]).conj()
        return cd.allreduce(mine, op=cd.Sum).item(), cd.allreduce_(mine, op=cd.Sum).item(), mine.item()

    assert each_rank(2, body) == [(2 - 4j, 2 - 4j, 2 - 4j)] * 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: cd.allreduce(0.5), "a tensor is wanted, not a float"),
        (lambda: cd.alltoall([1.0]), "a tensor is wanted, not a list"),
        (lambda: cd.reducescatter([1.0]), "a tensor is wanted, not a list"),
        (lambda: cd.allreduce(torch.ones(1), process_set=[0]), r"process_set is a list, and must be a ProcessSet"),
        (lambda: cd.allreduce(torch.ones(1), op="sum"), "op is 'sum', and must be Average, Sum, "),
    ],
)
def test_what_has_the_wrong_type_is_refused_with_what_is_wanted(call, text):
    with local_ranks(1) as ranks, pytest.raises(cd.ArgumentError, match=text):
        ranks.each(lambda _: call())


REFUSED = {
    "allreduce": lambda bad: cd.allreduce_async(bad, op=cd.Sum),
    "allreduce in place": lambda bad: cd.allreduce_async_(bad, op=cd.Sum),
    "allgather": cd.allgather_async,
    "broadcast": lambda bad: cd.broadcast_async(bad, 0),
    "broadcast in place": lambda bad: cd.broadcast_async_(bad, 0),
    "alltoall": cd.alltoall_async,
    "reducescatter": lambda bad: cd.reducescatter_async(bad, op=cd.Sum),
}


@pytest.mark.parametrize("form", REFUSED)
def test_a_tensor_that_one_rank_refuses_is_not_paired_with_its_next_one(form):
    def body(rank):
        if rank == 1:
            with pytest.raises(cd.ArgumentError):
                REFUSED[form](torch.eye(2).to_sparse())
        else:
            first = REFUSED[form](torch.full((2, 2), 100.0))
        second = cd.synchronize(REFUSED[form](torch.full((2, 2), float(rank))))
        assert second.max() < 100
        if rank == 0:
            with pytest.raises(cd.RefusedError, match="rank 1 refused"):
                cd.synchronize(first)

    each_rank(2, body)
