"""Gradients that come together in several backward passes: final when `step` uses them, or an error on all ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank, local_ranks
from tests.torch_plugin.test_compressed_bucket import MAKERS
from tests.torch_plugin.test_reducer import Checkpointed
from tests.torch_plugin.training import ROWS, alone, batch, model, same, settled, together, weights, wrapped

mse = nn.functional.mse_loss


def clipped(net, optimizer):
    assert nn.utils.clip_grad_norm_(net.parameters(), 0.05) > 0.05
    optimizer.step()


def local(optimizer):
    """The context of the passes before the last one; one process needs none."""
    return optimizer.no_sync() if hasattr(optimizer, "no_sync") else contextlib.nullcontext()


def losses(net, inputs, targets):
    return [mse(net(inputs), targets), net(inputs).square().mean(), net[:2](inputs).abs().mean()]


def several(net, optimizer, inputs, targets):
    optimizer.zero_grad()
    for loss in losses(net, inputs, targets):
        loss.backward()
    clipped(net, optimizer)


def of_one_graph(net, optimizer, inputs, targets):
    optimizer.zero_grad()
    hidden = net(inputs)
    mse(hidden, targets).backward(retain_graph=True)
    hidden.square().mean().backward()
    clipped(net, optimizer)


def without_exchange(net, optimizer, inputs, targets):
    optimizer.zero_grad()
    *first, last = losses(net, inputs, targets)
    with local(optimizer):
        for loss in first:
            loss.backward()
    last.backward()
    clipped(net, optimizer)


def without_exchange_but_synchronized(net, optimizer, inputs, targets):
    optimizer.zero_grad()
    with local(optimizer):
        for loss in losses(net, inputs, targets):
            loss.backward()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    clipped(net, optimizer)


def exchanged_after_some_without(net, optimizer, inputs, targets):
    """An exchange, then passes of this rank alone, then an exchange of all that has come together."""
    optimizer.zero_grad()
    first, second, last = losses(net, inputs, targets)
    first.backward()
    with local(optimizer):
        second.backward()
    last.backward()
    clipped(net, optimizer)


WRITTEN = [several, of_one_graph, without_exchange, without_exchange_but_synchronized, exchanged_after_some_without]


@pytest.mark.parametrize("step", WRITTEN)
@pytest.mark.parametrize("settings", [{}, {"shared_memory": False}, {"fusion_mb": 1e-4}], ids=str)
@pytest.mark.parametrize("op", [cd.Average, cd.AveragePresent])
def test_several_backward_passes_add_up_as_in_one_process(step, settings, op):
    same(together(3, step=step, settings=settings, op=op), alone(3, step=step))


@pytest.mark.parametrize("step", WRITTEN)
@pytest.mark.parametrize("reentrant", [False, True])
def test_so_do_those_of_checkpointed_layers(step, reentrant):
    def body(net, optimizer, inputs, targets):
        parts = Checkpointed(net, reentrant=reentrant, whole=False)
        optimizer.zero_grad()
        contexts = [
            local(optimizer) if step is without_exchange else contextlib.nullcontext(),
            contextlib.nullcontext(),
        ]
        for number, context in enumerate(contexts):
            with context:
                mse(parts(inputs.detach().clone()), targets * (number + 1)).backward()
        clipped(net, optimizer)

    same(together(2, step=body), alone(2, step=body))


def doubled(net):
    for value in net.values():
        value.grad = None if value.grad is None else value.grad * 2.0


def some_cleared(net):
    net["b"].grad = None


@pytest.mark.parametrize("moved_in", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize("change", [doubled, some_cleared])
def test_gradients_that_are_replaced_or_partly_cleared_between_two_passes_are_of_one_step(change, moved_in):
    """A rank that has computed only those in its first pass must not take the second one for a new step."""

    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net)
        if moved_in:
            settled(net, optimizer)
        for _step in range(2):
            optimizer.zero_grad()
            (net["b"].sum() if rank else sum(value.sum() for value in net.values())).backward()
            change(net)
            (sum(value.sum() for value in net.values()) * (rank + 1)).backward()
            seen = [value.grad[0].item() for value in net.values()]
            optimizer.step()
        return seen

    wanted = [2.5, 3.5] if change is doubled else [2.0, 1.5]
    assert each_rank(2, body) == [wanted] * 2


@pytest.mark.parametrize("moved_in", [False, True], ids=["first step", "later"])
def test_gradients_that_are_all_cleared_by_hand_begin_a_new_step(moved_in):
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net, op=cd.Sum)
        if moved_in:
            settled(net, optimizer)
        for _try in range(3):
            for value in net.values():
                value.grad = None
            (net["b"].sum() if rank else sum(value.sum() for value in net.values())).backward()
        return [value.grad[0].item() for value in net.values()]

    assert each_rank(2, body) == [[1.0, 2.0]] * 2


def test_so_do_those_of_which_ranks_use_different_parameters():
    def body(rank):
        net = weights({"a": 3, "b": 2, "c": 2})
        optimizer = wrapped(net)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            (net["a"].sum() * (rank + 1)).backward()
            (net["a"].sum() + (net["b"].sum() * 4 if rank else 0)).backward()
            found.append([None if value.grad is None else value.grad[0].item() for value in net.values()])
            optimizer.step()
        return found

    assert each_rank(2, body) == [[[2.5, 2.0, None]] * 3] * 2


def accumulated(made, *, clip):
    """A step of so many passes over parts of a batch; which they are depends on the ranks that have joined it."""

    def step(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        ranks = len(inputs) // ROWS
        for part in range(made):
            rows = [ROWS * rank + 2 * part + row for rank in range(ranks) for row in range(2)]
            mse(net(inputs[rows]), targets[rows]).backward()
        if clip and hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()

    return step


@pytest.mark.parametrize("made", [1, 2, 3])
@pytest.mark.parametrize("passes", [3, 4])
@pytest.mark.parametrize("clip", [False, True])
def test_an_accumulation_that_is_not_complete_is_averaged_by_step_or_before_clipping(made, passes, clip):
    step = accumulated(made, clip=clip)
    same(together(2, step=step, backward_passes_per_step=passes), alone(2, step=step))


def changed_by_clipping(net, optimizer):
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def changed_by_a_scaler(net, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def replaced(net, optimizer):
    for value in net.parameters():
        value.grad = value.grad / 2


@pytest.mark.parametrize("change", [changed_by_clipping, changed_by_a_scaler, replaced])
@pytest.mark.parametrize("ranks", [{0}, {0, 1}])
@pytest.mark.parametrize("how", ["passes", "no_sync"])
def test_gradients_that_are_changed_before_they_are_averaged_are_refused_on_all_ranks(change, ranks, how):
    def body(rank):
        net = model(torch.float32)
        passes = 3 if how == "passes" else 1
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), backward_passes_per_step=passes
        )
        for number in range(3):
            before = {name: value.clone() for name, value in net.state_dict().items()}
            optimizer.zero_grad()
            with local(optimizer) if how == "no_sync" else contextlib.nullcontext():
                for part in range(2):
                    mse(net(batch(rank, part, torch.float32)[0]), batch(rank, part, torch.float32)[1]).backward()
            if number != 1:
                optimizer.step()
                continue
            if rank in ranks:
                change(net, optimizer)
                with pytest.raises(cd.CoorddError, match=r"call optimizer.synchronize\(\) before you clip"):
                    optimizer.step()
            else:
                with pytest.raises(cd.DiscardedStepError, match=r"rank 0 has refused .* call optimizer\.synchronize"):
                    optimizer.step()
            torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)
            assert all(value.grad is None for value in net.parameters())
        return net.state_dict()

    same(each_rank(2, body))


@pytest.mark.parametrize("steps", [1, 3])
def test_ranks_that_make_different_numbers_of_passes_hear_of_it(steps):
    """In the first step, where gradients are reduced one by one, the ranks ask each other, and need not be alike."""

    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net)
        for number in range(steps):
            optimizer.zero_grad()
            for _ in range(2 if rank and number == steps - 1 else 1):
                sum(value.sum() for value in net.values()).backward()
            optimizer.step()
        if steps == 1:
            return net["a"].grad.tolist()
        optimizer.zero_grad()
        sum(value.sum() for value in net.values()).backward()
        return None

    if steps == 1:
        assert each_rank(2, body) == [[1.5] * 3] * 2
        return
    with local_ranks(2) as ranks:
        errors = ranks.errors(body, cd.DiscardedStepError)
    for error in errors:
        assert error.ranks == (1,)
        assert "another backward pass at" in str(error)


def test_an_average_that_counts_who_has_joined_is_not_averaged_twice():
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net)
        for number in range(5):
            optimizer.zero_grad()
            sum(value.sum() for value in net.values()).backward()
            if number == 3 and rank == 2:
                break
            if number == 4:
                with pytest.raises(cd.DiscardedStepError, match="no_sync"):
                    sum(value.sum() for value in net.values()).backward()
            else:
                optimizer.step()
        optimizer.join()
        return net.state_dict()

    same(each_rank(3, body))


@pytest.mark.parametrize("options", [{"op": cd.Sum}, {"compression": "topk"}, {"backward_passes_per_step": 2}], ids=str)
def test_what_cannot_be_reduced_twice_is_refused_on_all_ranks_with_a_way_out(options):
    def body(rank):
        net = weights({"a": 300, "b": 2})
        given = dict(options)
        if "compression" in given:
            given["compression"] = MAKERS[1]()
        optimizer = wrapped(net, **given)
        passes = options.get("backward_passes_per_step", 1)
        for number in range(5):
            optimizer.zero_grad()
            for _ in range(passes):
                sum(value.sum() for value in net.values()).backward()
            if number in {0, 3}:
                with pytest.raises(cd.CoorddError, match=r"optimizer.no_sync\(\)"):
                    sum(value.sum() for value in net.values()).backward()
                with pytest.raises(cd.DiscardedStepError):
                    optimizer.step()
            else:
                optimizer.step()
        return net.state_dict()

    same(each_rank(2, body))


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_sync_is_there_in_a_world_of_one_and_with_adasum(ranks):
    def body(rank):
        found = []
        for op in (cd.Average, cd.Adasum):
            net = weights({"a": 2})
            optimizer = wrapped(net, op=op)
            with optimizer.no_sync():
                net["a"].sum().backward()
            (net["a"] * 2).sum().backward()
            optimizer.step()
            found.append(net["a"].tolist())
        return found

    assert each_rank(ranks, body) == [[[-2.0] * 2] * 2] * ranks


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("accumulates", ["no_sync", "passes"])
def test_what_is_set_by_hand_after_an_accumulation_was_given_up_belongs_to_the_new_step(accumulates, steps):
    passes = 2 if accumulates == "passes" else 1

    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net, backward_passes_per_step=passes)
        for number in range(steps * passes):
            (sum(value.sum() for value in net.values()) / passes).backward()
            if number % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
        before = {name: value.detach().clone() for name, value in net.items()}
        with optimizer.no_sync() if accumulates == "no_sync" else contextlib.nullcontext():
            (net["a"] * 3.0).sum().backward()
        net.zero_grad()
        net["b"].grad = torch.full_like(net["b"], 4.0 * rank)
        for _ in range(passes):
            (net["a"] * (rank + 1)).sum().backward()
        optimizer.step()
        return {name: (before[name] - value).unique().tolist() for name, value in net.items()}

    assert each_rank(2, body) == [{"a": [1.5 * passes], "b": [2.0]}] * 2


def put_after_all_was_cleared(net, optimizer, rank):
    (net["a"] * 3.0 + net["b"].sum()).sum().backward()
    net.zero_grad()
    net["a"].grad = torch.full_like(net["a"], 4.0 * rank)


def put_beside_what_was_cleared(net, optimizer, rank):
    (net["b"] * 3.0).sum().backward()
    net.zero_grad()
    net["a"].grad = torch.full_like(net["a"], 4.0 * rank)


def partly_cleared(net, optimizer, rank):
    """Only what the next pass does not compute first."""
    with optimizer.no_sync():
        (net["a"] * rank + net["b"].sum()).sum().backward()
    net["b"].grad = None
    (net["a"] * (4.0 - rank)).sum().backward()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (put_after_all_was_cleared, {"a": [2.0], "b": [0.0]}),
        (put_beside_what_was_cleared, {"a": [2.0], "b": [0.0]}),
        (partly_cleared, {"a": [4.0], "b": [0.0]}),
    ],
)
def test_what_a_script_does_to_gradients_between_passes_and_step(program, wanted, steps):
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net)
        for _ in range(steps):
            settled(net, optimizer)
        optimizer.zero_grad()
        before = {name: value.detach().clone() for name, value in net.items()}
        program(net, optimizer, rank)
        optimizer.step()
        return {name: (before[name] - value).unique().tolist() for name, value in net.items()}

    assert each_rank(2, body) == [wanted] * 2


def test_what_is_written_in_place_after_an_accumulation_was_given_up_belongs_to_the_new_step():
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net)
        for _ in range(2):
            settled(net, optimizer)
        optimizer.zero_grad()
        (net["b"] * 1.0).sum().backward()
        optimizer.step()
        before = net["b"].detach().clone()
        with optimizer.no_sync():
            (net["a"] * 1.0).sum().backward()
        net["a"].grad = None
        net["b"].grad.fill_(4.0 * rank)
        (net["a"] * 1.0).sum().backward()
        optimizer.step()
        return (before - net["b"]).unique().tolist()

    assert each_rank(2, body) == [[2.0]] * 2


def test_what_was_accumulated_beside_a_sum_that_is_given_up_is_kept():
    def body(rank):
        net = weights({"a": 3, "b": 2, "c": 2})
        optimizer = wrapped(net)
        for _ in range(2):
            settled(net, optimizer)
        optimizer.zero_grad()
        before = net["c"].detach().clone()
        (net["a"] * 1.0).sum().backward()
        with optimizer.no_sync():
            (net["b"].sum() + (net["c"] * (rank + 1)).sum()).backward()
        net["a"].grad = None
        (net["a"].sum() + net["b"].sum()).backward()
        optimizer.step()
        return (before - net["c"]).unique().tolist()

    assert each_rank(2, body) == [[1.5]] * 2


def test_a_gradient_in_a_bucket_is_kept_when_the_step_around_it_is_given_up():
    """What autograd has added to it in place, too."""

    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net)
        for _ in range(2):
            settled(net, optimizer)
        optimizer.zero_grad()
        before = net["b"].detach().clone()
        (net["a"].sum() + net["b"].sum()).backward()
        optimizer.step()
        (net["a"] * 1.0).sum().backward()
        with optimizer.no_sync():
            (net["a"].sum() + (net["b"] * (rank + 1)).sum()).backward()
        net["a"].grad = None
        (net["a"] * 1.0).sum().backward()
        optimizer.step()
        return (before - net["b"]).unique().tolist()

    assert each_rank(2, body) == [[1.0 + 2.5]] * 2
