"""`discard_step`: a rank that cannot begin its step says so, and the next step is again that of all ranks."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd_torch.reducer import Reducer
from tests.local_ranks import each_rank
from tests.torch_plugin.test_discarded import loss_of
from tests.torch_plugin.training import LARGE, WAYS, attempts, same, weights

SIZES = {"a": 3, "b": LARGE, "c": 2}
STEPS = 7
MOMENTS = ["forward", "start", "middle", "end"]


class BadBatchError(Exception):
    """What a forward pass raises."""


def passes(net, factor, moment, optimizer, local=0, number=0):  # noqa: PLR0917 - what a step is
    """Makes the backward passes of one step; ``local`` of them only accumulate, the last may fail at a moment."""
    for _ in range(local):
        if number % 2:
            with optimizer.no_sync():
                loss_of(net, factor).backward()
        else:
            loss_of(net, factor).backward()
    if moment == "forward":
        raise BadBatchError
    loss_of(net, factor, moment).backward()


def factor_of(rank, number):
    return 1.0 + rank + 3 * number


def train(rank, count, moment, fails, *, local=0, clears=True, **options):
    """Makes steps of which one or two fail on some ranks; returns the numbers of those that were made."""
    net = weights(SIZES)
    optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), **options)
    made = []
    for number in range(STEPS):
        if clears:
            optimizer.zero_grad()
        failing = moment if (number, rank) in fails else ""
        try:
            passes(net, factor_of(rank, number), failing, optimizer, local, number if local else 0)
        except (BadBatchError, MemoryError, cd.DiscardedStepError):
            optimizer.discard_step()
            continue
        optimizer.step()
        made.append(number)
        if not clears:
            net.zero_grad()
    return made, net.state_dict()


def reference(count, numbers, local=0):
    net = weights(SIZES)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for number in numbers:
        optimizer.zero_grad()
        factor = sum(factor_of(rank, number) for rank in range(count)) / count
        (loss_of(net, factor) * (1 + local)).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("way", [*WAYS[:3], {"lock_steps": 2, "fusion_mb": 0.1}], ids=str)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fails", [{(0, 1)}, {(3, 0)}, {(3, 1), (4, 1)}, {(2, 0), (2, 1), (6, 1)}], ids=str)
def test_the_steps_that_are_made_are_those_of_one_process(way, moment, fails):
    found = each_rank(2, lambda rank: train(rank, 2, moment, fails), **way)
    kept = [number for number in range(STEPS) if number not in {number for number, _ in fails}]
    assert [made for made, _ in found] == [kept] * 2
    same([state for _, state in found], reference(2, kept))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fails", [{(0, 3)}, {(3, 0), (4, 2), (5, 1)}], ids=str)
def test_four_ranks(moment, fails):
    found = each_rank(4, lambda rank: train(rank, 4, moment, fails))
    kept = [number for number in range(STEPS) if number not in {number for number, _ in fails}]
    assert [made for made, _ in found] == [kept] * 4
    same([state for _, state in found], reference(4, kept))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fails", [{(0, 1)}, {(3, 1)}, {(4, 0)}], ids=str)
def test_a_step_of_several_passes(moment, fails):
    """Every second step accumulates in `no_sync`, the others by ``backward_passes_per_step``."""

    def synchronized(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        made = []
        for number in range(STEPS):
            optimizer.zero_grad()
            try:
                passes(net, factor_of(rank, number), moment if (number, rank) in fails else "", optimizer, 1, 1)
            except (BadBatchError, MemoryError, cd.DiscardedStepError):
                optimizer.discard_step()
                continue
            optimizer.step()
            made.append(number)
        return made, net.state_dict()

    kept = [number for number in range(STEPS) if number not in {number for number, _ in fails}]
    for way in (synchronized, lambda rank: _passes_per_step(rank, moment, fails)):
        found = each_rank(2, way)
        assert [made for made, _ in found] == [kept] * 2
        same([state for _, state in found], reference(2, kept, local=1))


def _passes_per_step(rank, moment, fails):
    return train(rank, 2, moment, fails, local=1, backward_passes_per_step=2)


@pytest.mark.parametrize("fails", [{(1, 1), (2, 1)}, {(0, 0), (1, 1), (2, 1), (5, 1)}], ids=str)
@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_has_to_be_cleared_before_the_next_step(moment, fails):
    """Not even by an optimizer that is asked to clear gradients after each step that was made only."""
    found = each_rank(2, lambda rank: train(rank, 2, moment, fails, clears=False))
    kept = [number for number in range(STEPS) if number not in {number for number, _ in fails}]
    assert [made for made, _ in found] == [kept] * 2
    same([state for _, state in found], reference(2, kept))


def test_a_process_set_and_ranks_that_are_no_members():
    some = cd.ProcessSet([0, 2])

    def body(rank):
        if rank == 1:
            return None
        return train(rank // 2, 2, "forward", {(0, 1), (4, 0)}, process_set=some)

    found = [each for each in each_rank(3, body) if each is not None]
    assert [made for made, _ in found] == [[1, 2, 3, 5, 6]] * 2
    same([state for _, state in found], reference(2, [1, 2, 3, 5, 6]))


def test_ranks_that_join():
    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), uneven="join"
        )
        for _ in range(2):
            for number in range(3 + 2 * rank):
                optimizer.zero_grad()
                try:
                    passes(net, 1.0, "forward" if (number, rank) in {(0, 2), (4, 1)} else "", optimizer)
                except (BadBatchError, cd.DiscardedStepError):
                    optimizer.discard_step()
                    continue
                optimizer.step()
            optimizer.join()
        return net.state_dict()

    same(each_rank(3, body))


def test_adasum():
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), op=cd.Adasum
        )
        made = []
        for number in range(STEPS):
            optimizer.zero_grad()
            try:
                passes(
                    net, 1.0 + rank, "forward" if (number, rank) in {(0, 1), (3, 0), (4, 1)} else "", optimizer, 0, 0
                )
                optimizer.step()
            except (BadBatchError, cd.DiscardedStepError):
                optimizer.discard_step()
            else:
                made.append(number)
        return made, net.state_dict()

    found = each_rank(2, body)
    assert [made for made, _ in found] == [[1, 2, 5, 6]] * 2
    same([state for _, state in found])


def test_every_rank_hears_which_rank_has_discarded_its_step_and_why():
    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        if rank:
            try:
                int("row 7")
            except ValueError:
                optimizer.discard_step()
        else:
            with pytest.raises(cd.DiscardedStepError, match=r"rank 1 has called discard_step\(\) .*row 7"):
                loss_of(net, 1.0).backward()
        with pytest.raises(cd.DiscardedStepError) as caught:
            optimizer.step()
        return str(caught.value)

    for text in each_rank(2, body):
        assert "rank 1 has called discard_step() at " in text


CHAINS = {"from the error": True, "in its handler": False, "from None": None}


@pytest.mark.parametrize("moment", ["forward", "middle"])
@pytest.mark.parametrize("chained", CHAINS)
def test_an_error_of_the_step_may_be_wrapped(chained, moment):
    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        made = []
        for number in range(5):
            optimizer.zero_grad()
            try:
                try:
                    passes(net, 1.0, moment if rank == 0 and number == 2 else "", optimizer)
                except (BadBatchError, MemoryError, cd.DiscardedStepError) as error:
                    if CHAINS[chained] is False:
                        raise ValueError(number)  # noqa: B904 - as in a script
                    raise ValueError(number) from (error if CHAINS[chained] else None)
            except ValueError:
                optimizer.discard_step()
                continue
            optimizer.step()
            made.append(number)
        return made

    assert each_rank(2, body) == [[0, 1, 3, 4]] * 2


class Broken:
    """A compression that fails once."""

    def __init__(self):
        self.fails = False

    def compress(self, tensor):
        if self.fails:
            self.fails = False
            raise ValueError("out of range")
        return tensor, None

    def decompress(self, tensor, _):
        return tensor


def clip_too_early(net, *_):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def break_compression(_, __, broken):
    broken.fails = True


def take_memory(_, optimizer, __):
    reducer = optimizer._coordd
    reducer._start = fails_once(reducer._start)


@pytest.mark.parametrize("cause", [clip_too_early, break_compression, take_memory])
def test_an_error_of_step_itself_discards_one_step(cause):
    """It averages there after passes that only accumulate; the recipe calls `discard_step` after any error."""

    def body(rank):
        net, broken = weights(SIZES), Broken()
        chosen = {"compression": broken} if cause is break_compression else {}
        given = torch.optim.SGD(net.parameters(), lr=1e-3)
        optimizer = cd.DistributedOptimizer(given, net.named_parameters(), **chosen)
        made = []
        for number in range(6):
            try:
                optimizer.zero_grad()
                for _ in range(2):
                    with optimizer.no_sync():
                        sum(parameter.sum() * (1.0 + number) for parameter in net.parameters()).backward()
                if rank == 0 and number == 3:
                    cause(net, optimizer, broken)
                optimizer.step()
                made.append((number, float(net.a.grad[0])))
            except (cd.PeerError, cd.ShutdownError):
                raise
            except (ValueError, MemoryError, cd.CoorddError):
                optimizer.discard_step()
        return made

    assert each_rank(2, body) == [[(number, 2.0 * (1 + number)) for number in (0, 1, 2, 4, 5)]] * 2


def fails_once(function):
    left = [MemoryError("no memory")]

    def start(*args, **options):
        if left:
            raise left.pop()
        return function(*args, **options)

    return start


def test_it_may_come_too_late():
    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(net, 1.0).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(net, 1.0).backward()
        with pytest.raises(cd.CoorddError, match="come too late"):
            optimizer.discard_step()
        optimizer.step()
        return net.state_dict()

    same(each_rank(2, body))


def test_one_process_alone_clears_its_gradients():
    def body(_):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        loss_of(net, 1.0).backward()
        optimizer.discard_step()
        optimizer.step()
        return [value.grad for value in net.values()], net["a"].tolist()

    assert each_rank(1, body) == [([None] * 3, [1.0] * 3)]


@pytest.mark.parametrize("fails", [0, 3])
def test_sparse_gradients(fails):
    def body(rank):
        net = nn.ModuleDict({"table": nn.Embedding(5, 2, sparse=True), "last": nn.Linear(2, 1, bias=False)})
        with torch.no_grad():
            for value in net.parameters():
                value.fill_(1.0)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        for number in range(6):
            optimizer.zero_grad()
            if number == fails and rank == 1:
                optimizer.discard_step()
                continue
            try:
                net["last"](net["table"](torch.tensor([rank, 2]))).sum().backward()
            except (cd.DiscardedStepError, cd.MismatchError):
                assert number == fails
                optimizer.discard_step()
            else:
                optimizer.step()
        return net.state_dict()

    same(each_rank(2, body))


def test_a_pass_waits_for_ranks_that_discard_the_step_before_only_after_an_error():
    """They are in another collective of that step, which fails. The gradients of the pass are those of its own step."""

    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        loss_of(net, 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not rank:
            with pytest.raises(cd.MismatchError, match="ranks wait for each other"):
                cd.allreduce(torch.ones(1), name="metric")
        optimizer.discard_step()
        loss_of(net, 1.0 + rank).backward()
        return [value.grad.flatten()[0].item() for value in net.values()]

    assert each_rank(2, body) == [[1.5, 3.0, 4.5]] * 2


def test_the_next_pass_keeps_its_first_gradient_if_the_step_before_is_discarded_elsewhere():
    """One rank clears the gradients of a step that has not ended; another one discards it."""

    def body(rank):
        net = weights({**SIZES, "unused": 2})
        used = {name: net[name] for name in SIZES}
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
        for number in range(4):
            loss_of(used, 1.0 + rank).backward()
            if number == 2:
                if rank:
                    net.zero_grad()
                else:
                    optimizer.discard_step()
                continue
            optimizer.step()
            if number < 3:
                net.zero_grad()
        return [value.grad.flatten()[0].item() for value in used.values()]

    assert each_rank(2, body) == [[1.5, 3.0, 4.5]] * 2


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_of_another_optimizer_is_discarded_unless_it_is_complete(steps):
    def body(rank):
        first, second = weights(SIZES), weights(SIZES)
        one, other = (
            cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
            for net in (first, second)
        )
        for _ in range(steps):
            loss_of(second, 1.0).backward()
            other.step()
            other.zero_grad()
        loss_of(second, 1.0).backward()
        try:
            if rank:
                one.discard_step()
            else:
                loss_of(first, 1.0).backward()
            one.step()
        except cd.DiscardedStepError:
            one.discard_step()
            if steps:  # all ranks know that no more is to come
                with pytest.raises(cd.CoorddError, match="come too late"):
                    other.discard_step()
            else:
                other.discard_step()
        return [value.grad is None for value in second.values()]

    assert each_rank(2, body) == [[not steps] * 3] * 2


def test_adasum_hears_that_ranks_have_waited_for_each_other():
    """So that operations without a name pair at once."""

    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters(), op=cd.Adasum
        )
        heard = []
        for number in range(6):
            try:
                _ = 1 / (1 - rank or number - 2)
                cd.allreduce(torch.ones(1))
                loss_of(net, 1.0 + rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            except (ZeroDivisionError, cd.MismatchError, cd.DiscardedStepError) as error:
                heard.append((number, type(error).__name__))
                optimizer.discard_step()
        return heard, net.state_dict()

    found = each_rank(2, body)
    assert [heard for heard, _ in found] == [
        [(2, "DiscardedStepError"), (3, "MismatchError")],
        [(2, "ZeroDivisionError"), (3, "MismatchError")],
    ]
    same([state for _, state in found])


@pytest.mark.parametrize("wrapped", [False, True])
def test_only_the_step_of_which_a_collective_has_failed_is_discarded(wrapped):
    def body(rank):
        net = weights(SIZES)

        def attempt(optimizer, number):
            try:
                _ = 1 / (1 - rank or number - 2)
                with optimizer.no_sync():
                    loss_of(net, 1.0).backward()
                cd.allreduce(torch.ones(1), name="metric")
                loss_of(net, 1.0).backward()
            except cd.MismatchError as error:
                if wrapped:
                    raise ValueError(number) from error
                raise

        return attempts(net, 5, attempt, ZeroDivisionError, ValueError)

    (first, values), (second, others) = each_rank(2, body)
    assert [[number for number, _ in heard] for heard in (first, second)] == [[2], [2]]
    same([values, others])


def test_an_error_of_a_later_forward_pass_discards_that_step():
    """Though the step before it was discarded, too, and nothing has been begun since."""

    def body(rank):
        net = weights(SIZES)

        def attempt(_, number):
            if (rank, number) == (0, 1):
                raise BadBatchError
            if number == 2:
                cd.barrier() if rank else cd.allreduce(torch.ones(1), name="metric")
            loss_of(net, factor_of(rank, number)).backward()

        return attempts(net, 5, attempt, BadBatchError)

    (first, values), (second, others) = each_rank(2, body)
    assert first == [(1, BadBatchError), (2, cd.MismatchError)]
    assert second == [(1, cd.DiscardedStepError), (2, cd.MismatchError)]
    same([values, others])


@pytest.mark.parametrize("op", [cd.Average, cd.Adasum], ids=["average", "adasum"])
def test_a_backward_pass_that_fails_in_the_step_after_a_discarded_one_discards_its_own_step(op):
    """Before its first gradient, on a rank that has not answered the error of the step before."""

    def body(rank):
        net, made = weights(SIZES), []
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=op)
        for number in range(8):
            net.zero_grad()
            fails = (number, rank) in {(3, 0), (4, 1)}
            try:
                loss_of(net, factor_of(rank, number), "start" if fails else "").backward()
                optimizer.step()
                made.append(number)
            except cd.DiscardedStepError:
                pass
            except MemoryError:
                optimizer.discard_step()
        return made, {name: value.detach() for name, value in net.items()}

    (first, values), (second, others) = each_rank(2, body)
    assert first == second == [0, 1, 2, 5, 6, 7]
    same([values, others])


def step_of(net, optimizer, factor, *, fails):
    optimizer.zero_grad()
    if fails:
        raise BadBatchError
    loss_of(net, factor).backward()
    optimizer.step()


def test_ranks_that_discard_steps_of_different_optimizers_are_told():
    """Each waits for the other to discard its own; the second error says so."""

    def body(rank):
        first, second = weights(SIZES), weights(SIZES)
        optimizers = [
            cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-3), net.named_parameters())
            for net in (first, second)
        ]
        if not rank:
            with pytest.raises(cd.MismatchError, match="ranks wait for each other"):
                cd.allreduce(torch.ones(1), name="metric")
        optimizers[rank].discard_step()
        if rank:
            with pytest.raises(cd.MismatchError, match=r"rank 1 for 'opt1\."):
                optimizers[1].zero_grad()
        else:
            optimizers[0].zero_grad()
        optimizers[1 - rank].discard_step()
        for optimizer, net in zip(optimizers, (first, second), strict=True):
            optimizer.zero_grad()
            loss_of(net, 1.0 + rank).backward()
            optimizer.step()
        return [net.state_dict() for net in (first, second)]

    found = each_rank(2, body)
    for states in zip(*found, strict=True):
        same(list(states))


def fail_if(bad):
    if bad:
        raise BadBatchError


@pytest.mark.parametrize("clears", ["outside", "inside"])
@pytest.mark.parametrize("moment", ["before", "middle"])
def test_a_bad_batch_with_batch_normalization_over_all_ranks(clears, moment):
    """The other rank is in a collective of its forward pass, where it gets an error; every rank loses that batch."""

    def body(rank):
        low = torch.nn.Sequential(torch.nn.Linear(4, 8), cd.SyncBatchNorm(8))
        top = torch.nn.Linear(8, 2)
        net = torch.nn.Sequential(low, top)
        cd.broadcast_parameters(net.state_dict())
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.05), net.named_parameters())
        lost = []
        for number in range(6):
            failing = moment if (number, rank) == (3, 1) else ""
            if clears == "outside":
                optimizer.zero_grad()
            try:
                if clears == "inside":
                    optimizer.zero_grad()
                fail_if(failing == "before")
                hidden = low(torch.randn(8, 4))
                fail_if(failing == "middle")
                top(hidden).square().mean().backward()
            except (BadBatchError, cd.DiscardedStepError, cd.MismatchError):
                lost.append(number)
                optimizer.discard_step()
                continue
            optimizer.step()
        return lost, net.state_dict()

    (first, values), (second, others) = each_rank(2, body)
    assert first == second == [3]
    same([values, others])


def test_of_two_optimizers_each_discards_its_own_step():
    """The rank that hears of the first one's has not discarded the second one's by that."""

    def body(rank):
        nets = [weights({"a": 3}) for _ in range(2)]
        first, second = (cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets)
        made = []
        for number in range(6):
            try:
                for net, optimizer in zip(nets, (first, second), strict=True):
                    step_of(net, optimizer, factor_of(rank, number), fails=(rank, number) == (1, 3))
                made.append(number)
            except (BadBatchError, cd.DiscardedStepError):
                first.discard_step()
                second.discard_step()
        return made, [net["a"].tolist() for net in nets]

    found = each_rank(2, body)
    assert found[0] == found[1]
    assert found[0][0] == [0, 1, 2, 4, 5]


def interrupted_after(function):
    """Makes a function that ends by an error on rank 1, once, as if a signal's handler had raised it."""
    times = itertools.count()

    def called(self, *args, **options):
        found = function(self, *args, **options)
        if self.channel.daemon.world.rank == 1 and not next(times):
            text = "a handler's"
            raise TimeoutError(text)
        return found

    return called


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_that_can_be_discarded_no_more_fails_the_job(monkeypatch, steps):
    """All buckets are given away, so the others make the step."""
    started = threading.Barrier(2)

    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        for _ in range(1 + steps):
            optimizer.zero_grad()
            loss_of(net, 1.0).backward()
            optimizer.step()
        started.wait()
        monkeypatch.setattr(Reducer, "_close_buckets", interrupted)
        with pytest.raises((TimeoutError, cd.PeerError)) if rank else pytest.raises(cd.PeerError, match="a handler's"):
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(net, 1.0).backward()
                optimizer.step()

    interrupted = interrupted_after(Reducer._close_buckets)
    each_rank(2, body)


def test_an_error_before_the_last_bucket_is_given_away_discards_the_step(monkeypatch):
    def body(rank):
        net = weights(SIZES)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        for number in range(4):
            if number == 2:
                started.wait()
                monkeypatch.setattr(Reducer, "_start", interrupted)
            optimizer.zero_grad()
            with pytest.raises((TimeoutError, cd.DiscardedStepError)) if number == 2 else contextlib.nullcontext():
                loss_of(net, 1.0).backward()
            if number == 2:
                started.wait()
                monkeypatch.setattr(Reducer, "_start", usual)
                optimizer.discard_step()
            else:
                optimizer.step()
        return net.state_dict()

    started, usual = threading.Barrier(2), Reducer._start
    interrupted = interrupted_after(usual)
    same(each_rank(2, body))
