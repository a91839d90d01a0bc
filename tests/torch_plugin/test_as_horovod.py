"""``--as-horovod``: what Horovod does where coordd on its own would refuse, or do otherwise."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import warnings

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd.config import Config
from coordd.errors import ArgumentError, DuplicateNameError
from tests.local_ranks import each_rank, local_ranks

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SETTINGS = {
    "memory": {},
    "lane": {"shared_memory": False},
    "hosts": {"simulate_hosts": 2},
}


def given(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """This rank's values: of both signs where the type has them, with sums that no number of ranks divides evenly."""
    low = 0 if dtype is torch.uint8 else -20
    return torch.randint(low, 21, (count, 3), generator=torch.Generator().manual_seed(rank)).to(dtype)


def truncated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.double().trunc().to(dtype)


def wanted(size, dtype, count, *, op, prescale_factor, postscale_factor, absent=()):
    """What Horovod's documentation says: scaled in float64, truncated, added, scaled or divided, truncated."""
    parts = [truncated(given(rank, dtype, count).double() * prescale_factor, dtype) for rank in range(size)]
    total = sum(part.to(torch.int64) for rank, part in enumerate(parts) if rank not in absent)
    return truncated(total.double() * postscale_factor / (size if op is cd.Average else 1), dtype)


FORMS = {
    "allreduce": cd.allreduce,
    "allreduce_": lambda tensor, **how: cd.allreduce_(tensor.clone(), **how),
    "allreduce_async": lambda tensor, **how: cd.synchronize(cd.allreduce_async(tensor, **how)),
    "grouped_allreduce": lambda tensor, **how: cd.grouped_allreduce([tensor, tensor], **how)[1],
    "grouped_allreduce_async_": lambda tensor, **how: cd.synchronize(
        cd.grouped_allreduce_async_([tensor.clone(), tensor.clone()], **how)
    )[0],
}
SCATTERING = {
    "reducescatter": cd.reducescatter,
    "grouped_reducescatter": lambda tensor, **how: cd.grouped_reducescatter([tensor, tensor], **how)[0],
}
FACTORS = [(1.0, 1.0), (0.37, 1.0), (1.0, 1.63), (0.37, 1.63)]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("size", [2, 3])
def test_integers_are_averaged_and_scaled_and_truncated(size, settings):
    """Every integer type, form and operation, small and large, with and without factors, in a set and in the world."""
    choices = list(itertools.product(INTEGERS, [cd.Average, cd.Sum], FACTORS, [5, 30_000]))
    group = cd.ProcessSet(range(size))

    def body(rank):
        wrong = []
        for dtype, op, (prescale, postscale), count in choices:
            how = {"op": op, "prescale_factor": prescale, "postscale_factor": postscale}
            whole = wanted(size, dtype, count, **how)
            mine = torch.tensor_split(whole, size)[rank]
            tensor = given(rank, dtype, count)
            forms = FORMS | SCATTERING if count == 5 else {"allreduce": FORMS["allreduce"]}
            for title, form in forms.items():
                found = form(tensor, **how, process_set=group if "grouped" in title else cd.global_process_set)
                if not torch.equal(found, mine if title in SCATTERING else whole):
                    wrong.append((title, dtype, op, prescale, postscale, count))
            assert torch.equal(tensor, given(rank, dtype, count))  # out of place
        return wrong

    assert each_rank(size, body, as_horovod=True, **settings) == [[]] * size


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_rank_that_has_joined_counts_in_an_average_of_integers(settings):
    def body(rank):
        found = []
        if rank != 1:
            for dtype in INTEGERS:
                how = {"op": cd.Average, "prescale_factor": 0.37, "postscale_factor": 1.63}
                result = cd.allreduce(given(rank, dtype, 5), **how)
                found.append(torch.equal(result, wanted(3, dtype, 5, **how, absent=(1,))))
        cd.join()
        return found

    assert each_rank(3, body, as_horovod=True, **settings) == [[True] * 5, [], [True] * 5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_floats_are_scaled_in_32_bits(dtype):
    """Natively, too: a factor that was rounded to sixteen bits first would be wrong in the third digit."""
    values = torch.linspace(-3, 3, 1001).to(dtype)

    def body(rank):
        before = cd.allreduce(values, op=cd.Max, prescale_factor=0.3719)
        after = cd.allreduce(values, op=cd.Max, postscale_factor=0.3719)
        return torch.equal(before, after) and torch.equal(before, (values.float() * 0.3719).to(dtype))

    assert each_rank(2, body) == [True, True]


def test_natively_averages_and_scales_of_integers_stay_refused():
    def body(rank):
        for how in ({"op": cd.Average}, {"op": cd.Sum, "prescale_factor": 0.5}):
            with pytest.raises(ArgumentError, match="would be truncated"):
                cd.allreduce(torch.ones(2, dtype=torch.int64), **how)

    each_rank(2, body)


def test_truth_values_are_not_averaged():
    def body(rank):
        with pytest.raises(ValueError, match="use Max for 'any'"):
            cd.allreduce(torch.ones(2, dtype=torch.bool), op=cd.Average)

    each_rank(2, body, as_horovod=True)


STARTS = {
    "allreduce": lambda name: cd.allreduce_async(torch.ones(4), name=name),
    "allreduce_": lambda name: cd.allreduce_async_(torch.ones(4), name=name),
    "grouped_allreduce": lambda name: cd.grouped_allreduce_async([torch.ones(4), torch.ones(2)], name=name),
    "sparse_allreduce": lambda name: cd.sparse_allreduce_async(torch.eye(3).to_sparse(), name, cd.Sum),
    "allgather": lambda name: cd.allgather_async(torch.ones(4), name=name),
    "grouped_allgather": lambda name: cd.grouped_allgather_async([torch.ones(4), torch.ones(2)], name=name),
    "broadcast": lambda name: cd.broadcast_async(torch.ones(4), 0, name=name),
    "alltoall": lambda name: cd.alltoall_async(torch.ones(4), name=name),
    "reducescatter": lambda name: cd.reducescatter_async(torch.ones(4), name=name),
    "grouped_reducescatter": lambda name: cd.grouped_reducescatter_async([torch.ones(4), torch.ones(2)], name=name),
}


@pytest.mark.parametrize("as_horovod", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_name_in_flight_is_refused_by_the_call_itself(start, keep, as_horovod):
    """On one rank after the other, while the others have not submitted it; the first stays, and barriers match."""
    with local_ranks(2, as_horovod=as_horovod) as ranks:

        def body(rank):
            first = None
            for turn in range(2):
                if rank == turn:
                    handle = start("name")
                    first = handle if keep else None
                    del handle
                    if rank == 0:
                        with pytest.raises(DuplicateNameError, match="same name as another tensor") as caught:
                            start("name")
                        assert isinstance(caught.value, ValueError)
                cd.barrier()
            if first is not None:
                cd.synchronize(first)
                assert cd.synchronize(start("name")) is not None
            return cd.synchronize(start("another")) is not None

        assert ranks.each(body) == [True, True]


def test_part_of_a_group_in_flight_refuses_the_whole_group():
    """Nothing of a group is started if one of its names is in flight, or one of its tensors cannot be reduced."""

    def body(rank):
        first = cd.allreduce_async(torch.ones(2), name="g_1of2", op=cd.Sum) if rank == 0 else None
        if rank == 0:
            with pytest.raises(DuplicateNameError, match="g_1of2"):
                cd.grouped_allreduce_async([torch.ones(2), torch.ones(2)], name="g", op=cd.Sum)
            with pytest.raises(ArgumentError, match="use Max for 'any'"):
                cd.grouped_allreduce_async([torch.ones(2), torch.ones(2) > 0], name="g", op=cd.Sum)
        cd.barrier()
        if rank == 1:
            first = cd.allreduce_async(torch.ones(2), name="g_1of2", op=cd.Sum)
        assert cd.synchronize(first).tolist() == [2.0, 2.0]
        return [value.tolist() for value in cd.grouped_allreduce([torch.ones(1), torch.ones(1)], name="g", op=cd.Sum)]

    assert each_rank(2, body) == [[[2.0], [2.0]]] * 2


def test_objects_that_only_cloudpickle_can_pickle_are_broadcast():
    pytest.importorskip("cloudpickle")

    def body(rank):
        function = cd.broadcast_object((lambda number: number + 5) if rank == 0 else None, 0)
        return function(rank), [each() for each in cd.allgather_object(lambda: rank)]

    assert each_rank(2, body, as_horovod=True) == [(5, [0, 1]), (6, [0, 1])]


def test_ranks_with_and_without_it_do_not_fit_together():
    """The settings of the ranks are compared when they start, and this is one of them."""
    assert Config(as_horovod=True).digest == "as_horovod=True"


class Table(nn.Module):
    """An embedding with sparse gradients, and a layer without."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 3, sparse=True)
        self.register_buffer("unused", torch.zeros(1))

    def forward(self, rows):
        return self.embedding(rows)


def test_sparse_as_dense_leaves_sparse_gradients_for_the_step():
    """In all of several steps, bucketed or not; equal to the mean of the ranks' gradients in one process."""
    torch.manual_seed(1)
    models = [Table() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    rows = [torch.tensor([0, 2, 2]), torch.tensor([2, 5])]

    def losses(model, step):
        return [(model(rows[rank]) ** 2).sum() * (step + 1) for rank in range(2)]

    alone = torch.optim.SparseAdam(models[2].parameters(), lr=0.1)
    for step in range(4):
        alone.zero_grad()
        (sum(losses(models[2], step)) / 2).backward()
        alone.step()

    def body(rank):
        optimizer = torch.optim.SparseAdam(models[rank].parameters(), lr=0.1)
        optimizer = cd.DistributedOptimizer(optimizer, models[rank].named_parameters(), sparse_as_dense=True)
        for step in range(4):
            optimizer.zero_grad()
            losses(models[rank], step)[rank].backward()
            gradient = models[rank].embedding.weight.grad
            assert gradient.is_sparse
            assert sorted(gradient.coalesce().indices().flatten().tolist()) == [0, 2, 5]
            optimizer.step()
        return torch.allclose(models[rank].embedding.weight, models[2].embedding.weight, rtol=1e-5, atol=1e-6)

    assert each_rank(2, body, as_horovod=True) == [True, True]


def small_model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_a_wrapped_optimizer_has_the_attributes_of_horovods():
    models = [small_model() for _ in range(2)]

    def body(rank):
        model = models[rank]
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = cd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
        parameters = dict(model.named_parameters())
        assert optimizer._parameter_names == {parameter: name for name, parameter in parameters.items()}
        assert optimizer._requires_update == {each for each in parameters.values() if each.requires_grad}
        assert (optimizer.backward_passes_per_step, optimizer.op, optimizer.sparse_as_dense) == (2, cd.Average, False)
        assert (optimizer.process_set, optimizer.gradient_predivide_factor) == (cd.global_process_set, 1.0)
        assert (optimizer._compression, optimizer._groups) == (cd.Compression.none, None)
        assert set(optimizer._allreduce_delay.values()) == {2}
        model(torch.ones(1, 2)).sum().backward()
        assert optimizer._allreduce_delay[parameters["0.weight"]] == 1
        assert optimizer._handles == {}
        optimizer.zero_grad()
        optimizer.backward_passes_per_step = 1
        assert optimizer.backward_passes_per_step == 1
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        unnamed = cd.DistributedOptimizer(torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias]}]))
        return list(unnamed._parameter_names.values())

    assert each_rank(2, body, as_horovod=True) == [["allreduce.noname.0.0", "allreduce.noname.1.0"]] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_after_synchronize_warns_in_horovods_words(size):
    """Warnings are of the process, so those of all ranks are counted together."""
    models = [small_model() for _ in range(size)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step(rank, how):
        optimizers[rank].zero_grad()
        models[rank](torch.ones(1, 2)).sum().backward()
        if how != "plain":
            optimizers[rank].synchronize()
        with optimizers[rank].skip_synchronize() if how == "skipped" else contextlib.nullcontext():
            optimizers[rank].step()

    told = []
    with local_ranks(size, as_horovod=True) as ranks:
        ranks.each(lambda rank: cd.DistributedOptimizer(optimizers[rank]))
        for how in ("plain", "twice", "skipped", "plain"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ranks.each(functools.partial(step, how=how))
            texts = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
            told.append(sum("optimizer.step() called without optimizer.skip_synchronize()" in text for text in texts))
    assert told == [0, size, 0, 0]


def test_num_groups_is_told_to_be_groups():
    def body(rank):
        optimizer = torch.optim.SGD(small_model().parameters(), lr=0.1)
        with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`"):
            return cd.DistributedOptimizer(optimizer, num_groups=2)._groups

    assert each_rank(1, body, as_horovod=True) == [2]


def test_a_parameter_without_a_gradient_on_any_rank_gets_zeros_at_the_step():
    """So momentum and weight decay act on it, as in Horovod; natively it keeps None."""
    first = small_model()

    def body(_):
        model = copy.deepcopy(first)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
        before = model[1].weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            model[0](torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return torch.allclose(model[1].weight, before * 0.95**3), model[1].weight.grad is not None

    assert each_rank(2, body, as_horovod=True) == [(True, True)] * 2
    assert each_rank(2, body) == [(False, False)] * 2


def test_integer_frozen_and_missing_entries_are_broadcast():
    """As in Horovod's own example of an index that is a parameter; gradients are there after the state is broadcast."""

    def body(rank):
        index = nn.Parameter(torch.tensor([rank, 3], dtype=torch.int32), requires_grad=False)
        weight = nn.Parameter(torch.full((4,), float(rank)))
        frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
        optimizer = torch.optim.SGD([index, weight, frozen], lr=0.1, momentum=0.9, nesterov=True)
        optimizer = cd.DistributedOptimizer(optimizer, [("index", index), ("weight", weight), ("frozen", frozen)])
        cd.broadcast_parameters({"index": index, "weight": weight, "frozen": frozen, "nothing": None}, root_rank=1)
        cd.broadcast_parameters([index, weight, frozen], root_rank=1)
        cd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert index.grad is None
        assert frozen.grad is None
        return index.tolist(), weight.tolist(), frozen.tolist(), cd.broadcast(weight.grad, 1).tolist()

    assert each_rank(2, body, as_horovod=True) == [([1, 3], [1.0] * 4, [1.0] * 2, [0.0] * 4)] * 2
