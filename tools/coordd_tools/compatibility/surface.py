"""The public names of ``horovod.torch`` 0.28, with their signatures, and in what coordd is better; data only."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SURFACE", "Name"]


class Name(NamedTuple):
    """One public name.

    Attributes:
        name: with its owner, as in ``ProcessSet.ranks``.
        signature: the parameters, as Python writes them; None if it is not called.
        better: what coordd does that Horovod does not.
        note: what else is to be said.
        refused: why it is not there at all.
    """

    name: str
    signature: str | None = None
    better: str = ""
    note: str = ""
    refused: str = ""


_SET = "process_set=global_process_set"
_FACTORS = "prescale_factor=1.0, postscale_factor=1.0"
_REDUCE = f"average=None, name=None, op=None, {_FACTORS}, {_SET}"
_COMPRESSED = f"average=None, name=None, compression=Compression.none, op=None, {_FACTORS}, {_SET}"
_SCATTER = f"name=None, compression=Compression.none, op=Average, {_SET}, {_FACTORS}"
_SCATTER_ASYNC = f"name=None, op=Average, {_SET}, {_FACTORS}"

_BF16 = "bf16 too; 16-bit values are added in fp32; an average of integers, which would be truncated, is refused"
_HANDLE = "the handle is an object: `result`, `wait(seconds)`, `poll`"

SURFACE: dict[str, tuple[Name, ...]] = {
    "Life cycle": (
        Name(
            "init", "comm=None, process_sets=None", "a fork, a second launcher or ranks that do not come are explained"
        ),
        Name("shutdown", "", "waits until all ranks leave in step"),
        Name("is_initialized", ""),
        Name("start_timeline", "file_path, mark_cycles=False", "of all ranks, clocks aligned"),
        Name("stop_timeline", ""),
    ),
    "Ranks": (
        Name("rank", ""),
        Name("size", ""),
        Name("local_rank", ""),
        Name("local_size", ""),
        Name("cross_rank", ""),
        Name("cross_size", ""),
        Name("is_homogeneous", ""),
    ),
    "Build": (
        Name("mpi_threads_supported", "", note="whether the script may call mpi4py, too"),
        Name("mpi_enabled", ""),
        Name("mpi_built", "verbose=False", note="whether mpi4py is installed"),
        Name("gloo_enabled", "", note="no"),
        Name("gloo_built", "verbose=False", note="no"),
        Name("nccl_built", "verbose=False", note="0"),
        Name("ddl_built", "verbose=False", note="no"),
        Name("ccl_built", "verbose=False", note="no"),
        Name("cuda_built", "verbose=False", note="no"),
        Name("rocm_built", "verbose=False", note="no"),
    ),
    "Reductions": (
        Name("Average"),
        Name("Sum"),
        Name("Adasum", None, "any number of ranks, any process set"),
        Name("Min"),
        Name("Max"),
        Name("Product"),
    ),
    "Operations": (
        Name("allreduce", f"tensor, {_COMPRESSED}", _BF16),
        Name("allreduce_async", f"tensor, {_REDUCE}", _HANDLE),
        Name("allreduce_", f"tensor, {_REDUCE}"),
        Name("allreduce_async_", f"tensor, {_REDUCE}", _HANDLE),
        Name("grouped_allreduce", f"tensors, {_COMPRESSED}"),
        Name("grouped_allreduce_async", f"tensors, {_REDUCE}", _HANDLE),
        Name("grouped_allreduce_", f"tensors, {_REDUCE}"),
        Name("grouped_allreduce_async_", f"tensors, {_REDUCE}", _HANDLE),
        Name("sparse_allreduce_async", f"tensor, name, op, {_SET}"),
        Name("allgather", f"tensor, name=None, {_SET}"),
        Name("allgather_async", f"tensor, name=None, {_SET}", _HANDLE),
        Name("grouped_allgather", f"tensors, name=None, {_SET}"),
        Name("grouped_allgather_async", f"tensors, name=None, {_SET}", _HANDLE),
        Name("broadcast", f"tensor, root_rank, name=None, {_SET}"),
        Name("broadcast_async", f"tensor, root_rank, name=None, {_SET}", _HANDLE),
        Name("broadcast_", f"tensor, root_rank, name=None, {_SET}"),
        Name("broadcast_async_", f"tensor, root_rank, name=None, {_SET}", _HANDLE),
        Name("alltoall", f"tensor, splits=None, name=None, {_SET}"),
        Name("alltoall_async", f"tensor, splits=None, name=None, {_SET}", _HANDLE),
        Name("reducescatter", f"tensor, {_SCATTER}"),
        Name("reducescatter_async", f"tensor, {_SCATTER_ASYNC}", _HANDLE),
        Name("grouped_reducescatter", f"tensors, {_SCATTER}"),
        Name("grouped_reducescatter_async", f"tensors, {_SCATTER_ASYNC}", _HANDLE),
        Name("poll", "handle"),
        Name("synchronize", "handle", "what is no handle is refused, where Horovod returns None"),
        Name("join", "device=-1", "for every operation, not allreduce alone"),
        Name("barrier", _SET),
    ),
    "Process sets": (
        Name("global_process_set"),
        Name("ProcessSet", "ranks_or_comm", "a value: equal members make an equal set, usable without being added"),
        Name("ProcessSet.ranks", note="ascending; none for all ranks"),
        Name("ProcessSet.process_set_id", note="a text made of the members, in place of a number"),
        Name(
            "ProcessSet.mpi_comm",
            refused="a set is made of ranks; mpi4py's `COMM_WORLD.Create_group` makes a communicator",
        ),
        Name("ProcessSet.size", ""),
        Name("ProcessSet.rank", ""),
        Name("ProcessSet.included", ""),
        Name("add_process_set", "process_set"),
        Name("remove_process_set", "process_set"),
    ),
    "State": (
        Name("broadcast_parameters", "params, root_rank", "within a process set, too"),
        Name(
            "broadcast_optimizer_state", "optimizer, root_rank, model=None", "makes no step; any optimizer, LBFGS too"
        ),
        Name("broadcast_object", f"obj, root_rank=0, name=None, {_SET}"),
        Name("allgather_object", "obj, name=None", "within a process set, too"),
    ),
    "Training": (
        Name(
            "DistributedOptimizer",
            "optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average, "
            f"gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, {_SET}",
            "gradients are final when `backward()` returns; several optimizers need no names of their own",
        ),
        Name("DistributedOptimizer.synchronize", "self", "never needed"),
        Name("DistributedOptimizer.skip_synchronize", "self"),
        Name("DistributedOptimizer.step", "self, closure=None", "reduces after each call of the closure"),
        Name("DistributedOptimizer.zero_grad", "self", "takes `set_to_none`; allowed at any time"),
        Name("DistributedOptimizer.set_backward_passes_per_step", "self, passes"),
        Name("DistributedOptimizer.load_state_dict", "self, state_dict"),
        Name(
            "SyncBatchNorm",
            "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
            "on a CPU, too; running variance without bias",
        ),
    ),
    "Compression": (
        Name("Compression.none"),
        Name("Compression.fp16", None, "sums are made in fp32; `bf16`, `int8`, `topk` and `powersgd` beside it"),
    ),
    "Errors": (
        Name("HorovodInternalError", None, "every error of coordd's is one, and says who, what and where"),
        Name("HostsUpdatedInterrupt", "skip_sync=False"),
        Name("HorovodVersionMismatchError", "name, version, installed_version"),
    ),
    "Elastic jobs": (
        Name("elastic.run", "func"),
        Name("elastic.TorchState", "model=None, optimizer=None, **kwargs"),
        Name("elastic.ElasticSampler", "dataset, shuffle=True, seed=0"),
    ),
}
"""By what they are for."""
