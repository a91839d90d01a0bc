"""What people search their logs for is still there, with the ranks, the tensor and the line of code added.

Where Horovod's sentence begins with its own name, ours begins with coordd's.
"""

from __future__ import annotations

import re

import horovod.torch as hvd
import pytest
import torch

from tests.local_ranks import each_rank


def two(*calls):
    """Has each of two ranks make a call of its own, and returns the one error that both get."""

    def body(rank):
        with pytest.raises(hvd.HorovodInternalError) as caught:
            calls[rank]()
        return str(caught.value)

    told = each_rank(2, body)
    assert told[0] == told[1]
    return told[0]


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def w(operation, *args, **more):
    """A call of an operation on the tensor 'w'."""
    return lambda: operation(*args, name="w", **more)


MISMATCHES = {
    "Mismatched data types": (
        w(hvd.allreduce, ones(2)),
        w(hvd.allreduce, ones(2, dtype=torch.float64)),
        ("float32", "float64"),
    ),
    "Mismatched operations": (w(hvd.allreduce, ones(2)), w(hvd.allgather, ones(2)), ("allreduce", "allgather")),
    "Mismatched ALLREDUCE tensor shapes": (
        w(hvd.allreduce, ones(17, 17)),
        w(hvd.allreduce, ones(17, 18)),
        ("(17, 17)", "(17, 18)"),
    ),
    "Mismatched BROADCAST tensor shapes": (
        w(hvd.broadcast, ones(2), 0),
        w(hvd.broadcast, ones(3), 0),
        ("(2,)", "(3,)"),
    ),
    "Mismatched ALLGATHER tensor shapes": (
        w(hvd.allgather, ones(2, 4)),
        w(hvd.allgather, ones(2, 5)),
        ("(any, 4)", "(any, 5)"),
    ),
    "Mismatched ALLTOALL tensor shapes": (
        w(hvd.alltoall, ones(2, 4)),
        w(hvd.alltoall, ones(2, 5)),
        ("(any, 4)", "(any, 5)"),
    ),
    "Mismatched REDUCESCATTER tensor shapes": (
        w(hvd.reducescatter, ones(2, 4)),
        w(hvd.reducescatter, ones(2, 5)),
        ("(2, 4)", "(2, 5)"),
    ),
    "Mismatched prescale and/or postscale factors": (
        w(hvd.allreduce, ones(2)),
        w(hvd.allreduce, ones(2), prescale_factor=2.0),
        ("prescale 1.0", "prescale 2.0"),
    ),
    "Mismatched reduction operation": (
        w(hvd.allreduce, ones(2), op=hvd.Sum),
        w(hvd.allreduce, ones(2), op=hvd.Average),
        ("sum", "average"),
    ),
    "Mismatched BROADCAST root ranks": (w(hvd.broadcast, ones(2), 0), w(hvd.broadcast, ones(2), 1), ("0", "1")),
}


@pytest.mark.parametrize("phrase", MISMATCHES)
def test_ranks_that_disagree_are_told_in_horovods_words_and_by_name(phrase):
    *calls, (first, second) = MISMATCHES[phrase]
    told = two(*calls)
    assert told.startswith(f"{phrase}: ")
    assert re.search(
        rf"'w' \(rank 0: {re.escape(first)}.* at \S+test_phrases.py:\d+; rank 1: {re.escape(second)}", told
    )


def model(*names):
    found = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in names})
    for parameter in found.parameters():
        torch.nn.init.ones_(parameter)  # alike on all ranks
    return found


def optimizer(net, *, named=None, **more):
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters() if named is None else named, **more)


def backward(net, times):
    for _ in range(times):
        sum(part(ones(1)).sum() for part in net.values()).backward()


def distributed_backward(times, **more):
    net = model("a")
    kept = optimizer(net, **more)
    backward(net, times)
    kept.step()


def twice(start):
    first, second = start(), start()
    first.result()
    second.result()


WRONG = {
    "Requested twice": (
        "a tensor with the same name as another tensor that is currently being processed",
        lambda: twice(lambda: hvd.allreduce_async(ones(2), name="w")),
    ),
    "what to do then": (
        "use a different tensor name",
        lambda: twice(lambda: hvd.allreduce_async(ones(2), name="w")),
    ),
    "not a member": (
        "is not a member of the provided process set",
        lambda: hvd.allreduce(ones(2), process_set=hvd.ProcessSet([1 - hvd.rank()])),
    ),
    "no such set": (
        "Process set provided does not exist",
        lambda: hvd.allreduce(ones(2), process_set=hvd.ProcessSet([0, 1, 2])),
    ),
    "no such root": (
        "broadcast received invalid root rank 5 for provided process set",
        lambda: hvd.broadcast(ones(2), 5),
    ),
    "scalar in alltoall": ("tried to ALLTOALL a rank-zero tensor", lambda: hvd.alltoall(ones())),
    "splits": ("alltoall expects a 1D splits tensor", lambda: hvd.alltoall(ones(2), torch.ones(2, 2).int())),
    "too many rows": (
        "Sum of splits entries is greater than the first dimension of tensor",
        lambda: hvd.alltoall(ones(2), torch.tensor([2, 2])),
    ),
    "no splits": (
        "splits not provided, but first dimension of tensor is not an even multiple of the number of workers",
        lambda: hvd.alltoall(ones(3)),
    ),
    "too few splits": (
        "Number of entries in splits does not equal number of workers",
        lambda: hvd.alltoall(ones(2), torch.tensor([2])),
    ),
    "scalar": ("tried to ALLGATHER a rank-zero tensor", lambda: hvd.allgather(ones())),
    "type": ("Tensor type bool is not supported", lambda: hvd.allreduce(ones(2, dtype=torch.bool))),
    "average and op": (
        "The op parameter supersedes average. Please provide only one of them.",
        lambda: hvd.allreduce(ones(2), average=True, op=hvd.Sum),
    ),
    "predivide": (
        "gradient_predivide_factor not supported with op != Average",
        lambda: optimizer(model("a"), op=hvd.Sum, gradient_predivide_factor=2.0),
    ),
    "passes": ("backward_passes_per_step must be > 0", lambda: optimizer(model("a"), backward_passes_per_step=0)),
    "no names": (
        "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_par",
        lambda: optimizer(net := model("a"), named=list(net.parameters())),
    ),
    "duplicate names": (
        "Parameter names in named_parameters must be unique. Found duplicates: a",
        lambda: optimizer(net := model("a", "b"), named=[("a", each) for each in net.parameters()]),
    ),
    "missing names": (
        "named_parameters was specified, but one or more model parameters were not named",
        lambda: optimizer(net := model("a", "b"), named=list(net.named_parameters())[:1]),
    ),
    "too many passes": (
        "Gradients were computed more than backward_passes_per_step times before call to step()",
        lambda: distributed_backward(3, backward_passes_per_step=2),
    ),
    "what to do about them": (
        "Increase backward_passes_per_step to accumulate gradients locally",
        lambda: distributed_backward(3, backward_passes_per_step=2),
    ),
    "state": ("invalid params of type: int", lambda: hvd.broadcast_parameters(3, root_rank=0)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_on_a_rank_is_told_in_horovods_words(case):
    phrase, call = WRONG[case]

    def body(_):
        with pytest.raises(hvd.HorovodInternalError, match=re.escape(phrase)):
            call()

    each_rank(2, body)


@pytest.mark.parametrize("use", [hvd.rank, lambda: hvd.allreduce(ones(2)), lambda: optimizer(model("a"))])
def test_before_init_the_words_are_horovods(use):
    with pytest.raises(ValueError, match=r"has not been initialized; use hvd\.init\(\)"):
        use()


def test_who_leaves_early_has_shut_the_job_down():
    assert "has been shut down: rank 1 left" in str(hvd.ShutdownError("w", (1,)))
    assert "has been shut down: 'w' was not completed" in str(hvd.ShutdownError("w"))


def test_the_old_flag_is_warned_about_in_horovods_words():
    def body(_):
        with pytest.warns(
            DeprecationWarning, match="Parameter `average` has been replaced with `op` and will be removed"
        ):
            return hvd.allreduce(ones(2), average=False).tolist()

    assert each_rank(1, body) == [[1, 1]]


@pytest.mark.parametrize("handle", [None, 3, "x", object()])
def test_what_is_no_handle_is_refused_not_answered_by_none(handle):
    for ask in (hvd.synchronize, hvd.poll):
        with pytest.raises(ValueError, match="unknown handle"):
            ask(handle)


def test_clearing_gradients_between_backward_and_step_is_no_error():
    def body(_):
        net = model("a")
        kept = optimizer(net)
        backward(net, 1)
        kept.zero_grad(set_to_none=True)
        backward(net, 1)
        kept.step()
        return net["a"].weight.item() is not None

    assert each_rank(2, body) == [True, True]
