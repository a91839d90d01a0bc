"""Every name that Horovod documents can be imported from where scripts import it, and is coordd's own object."""

from __future__ import annotations

import importlib
import inspect

import horovod.torch as hvd
import pytest
import torch

import coordd.torch as cd
from coordd.errors import CoorddError
from coordd_tools.compatibility.common import COMMON
from coordd_tools.compatibility.judge import differences, judge, ours, signature
from coordd_tools.compatibility.torch import TORCH
from tests.local_ranks import each_rank

OWN = {"init", "start_timeline", "stop_timeline"}
MODULE = "horovod.torch"
NAMES = [*COMMON.names, *TORCH.names]
CALLED = {name.name: name for name in NAMES if name.signature is not None}

# Something for every parameter of an operation.
GIVEN = {
    "tensor": lambda: torch.ones(2, 2),
    "tensors": lambda: [torch.ones(2), torch.ones(3)],
    "average": lambda: None,
    "name": lambda: "x",
    "compression": lambda: hvd.Compression.fp16,
    "op": lambda: hvd.Sum,
    "prescale_factor": lambda: 0.5,
    "postscale_factor": lambda: 2.0,
    "process_set": lambda: hvd.global_process_set,
    "root_rank": lambda: 0,
    "splits": lambda: torch.tensor([2], dtype=torch.int32),
}


@pytest.mark.parametrize("name", sorted(set(cd.__all__) - OWN))
def test_what_coordd_has_is_the_same_object(name):
    assert getattr(hvd, name) is getattr(cd, name)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.name)
def test_a_name_is_there_with_a_signature_that_takes_horovods_calls(name):
    verdict, why = judge(name, [MODULE])
    if verdict == "missing":
        assert name.name not in hvd.__all__
        pytest.skip("not there yet")
    assert verdict != "differs", why
    assert (verdict == "refused") == (name.name == "ProcessSet.mpi_comm" or name.name.startswith("elastic."))
    assert bool(why) >= (verdict in {"better", "refused"})


def test_a_signature_that_does_not_take_horovods_calls_is_seen():
    theirs = signature(CALLED["allgather"], MODULE)

    def there(tensor, name=None, process_set=hvd.global_process_set, more=1): ...
    def moved(tensor, process_set=hvd.global_process_set, name=None): ...
    def lacks(tensor, name=None): ...
    def defaults(tensor, name="x", process_set=hvd.global_process_set): ...
    def needs(tensor, name=None, process_set=hvd.global_process_set, *, more): ...
    def passes_on(tensor, *args, **kwargs): ...
    def by_name(tensor, *args, process_set=hvd.global_process_set, **kwargs): ...

    told = {each.__name__: differences(theirs, inspect.signature(each)) for each in (there, passes_on, lacks, needs)}
    assert told == {
        "there": [],
        "passes_on": [],
        "lacks": ["there is no `process_set`"],
        "needs": ["`more` is needed"],
    }
    assert differences(theirs, inspect.signature(defaults)) == ["`name` is 'x' by default"]
    assert differences(theirs, inspect.signature(moved)) == ["give `name`, `process_set` by name"]
    assert differences(theirs, inspect.signature(by_name)) == ["give `process_set` by name"]


@pytest.mark.parametrize("by_name", [False, True], ids=["in order", "by name"])
@pytest.mark.parametrize(
    "name", [name for name in TORCH.tables["Operations"] if name.signature], ids=lambda name: name.name
)
def test_an_operation_takes_all_of_horovods_arguments(name, by_name):
    if ours(name.name, MODULE) is None or not set(parameters := signature(name, MODULE).parameters) <= set(GIVEN):
        pytest.skip("not there yet, or not an operation on tensors")
    given = {key: GIVEN[key]() for key in parameters}
    if name.name == "sparse_allreduce_async":
        given["tensor"] = given["tensor"].to_sparse()

    def body(_):
        made = ours(name.name, MODULE)(**given) if by_name else ours(name.name, MODULE)(*given.values())
        if name.name == "sparse_allreduce_async":
            return made().to_dense()
        return hvd.synchronize(made) if "async" in name.name else made

    (found,) = each_rank(1, body)
    if "tensor" in given:
        assert torch.equal(found[0] if isinstance(found, tuple) else found, torch.ones(2, 2))


@pytest.mark.parametrize(("number", "op"), [*enumerate(["Average", "Sum", "Adasum", "Min", "Max", "Product"])])
def test_reductions_may_be_given_by_their_numbers(number, op):
    if not hasattr(hvd, op):
        pytest.skip("not there yet")
    assert getattr(hvd, op) == number
    sent = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]

    def body(rank):
        return hvd.allreduce(sent[rank], op=number).tolist(), hvd.allreduce(sent[rank], op=getattr(hvd, op)).tolist()

    assert {first == second for first, second in each_rank(2, body)} == {True}


def _derived():
    class Mine(hvd.elastic.State): ...

    return Mine


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("horovod", ["run", "__version__"]),
        ("horovod.runner", ["run"]),
        ("horovod.runner.launch", ["run_commandline", "check_build"]),
        ("horovod.data", ["AsyncDataLoaderMixin", "BaseDataLoader"]),
        ("horovod.data.data_loader_base", ["AsyncDataLoaderMixin", "BaseDataLoader"]),
        ("horovod.common.exceptions", ["HorovodInternalError", "HostsUpdatedInterrupt"]),
        ("horovod.common.process_sets", ["ProcessSet", "global_process_set"]),
        ("horovod.common.util", ["check_extension", "gpu_available", "num_rank_is_power_2", "split_list"]),
        ("horovod.common.elastic", ["run_fn", "ObjectState", "State"]),
        ("horovod.torch.mpi_ops", ["allreduce_async_", "synchronize", "Average", "init", "nccl_built"]),
        ("horovod.torch.compression", ["Compression", "Compressor", "NoneCompressor", "FP16Compressor"]),
        ("horovod.torch.functions", ["broadcast_parameters", "broadcast_optimizer_state", "allgather_object"]),
        ("horovod.torch.optimizer", ["DistributedOptimizer"]),
        ("horovod.torch.elastic", ["run", "TorchState", "ElasticSampler"]),
        ("horovod.torch.elastic.state", ["TorchState"]),
        ("horovod.torch.elastic.sampler", ["ElasticSampler"]),
    ],
)
def test_scripts_find_names_where_horovod_has_them(module, names):
    found = vars(importlib.import_module(module))
    assert all(found[name] is getattr(hvd, name, found[name]) for name in names)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("horovod.torch.elastic.run", lambda: hvd.elastic.run(print)),
        ("horovod.torch.elastic.TorchState", lambda: hvd.elastic.TorchState(model=None)),
        ("horovod.torch.elastic.State", _derived),
    ],
)
def test_what_is_refused_says_in_one_sentence_what_to_do(name, use):
    with pytest.raises(NotImplementedError, match=rf"^{name} is refused: [^\n]+$"):
        use()


@pytest.mark.parametrize("package", ["mxnet", "spark", "ray"])
def test_packages_that_are_not_there_say_so(package):
    with pytest.raises(ImportError, match=rf"^horovod.{package} is refused: ") as caught:
        importlib.import_module(f"horovod.{package}")
    assert caught.value.name == f"horovod.{package}"


def test_errors_are_caught_under_horovods_names():
    assert hvd.HorovodInternalError is CoorddError
    assert issubclass(hvd.PeerError, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert hvd.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    error = hvd.HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert (error.version, error.installed_version, isinstance(error, ImportError)) == ("1.0", "2.0", True)
