"""The public names of `horovod.torch` 0.28, with their signatures and coordd's improvements; data only."""

from __future__ import annotations

from coordd_tools.compatibility.name import BF16, FACTORS, PROCESS_SET, Name, Part

__all__ = ["TORCH"]

_REDUCE = f"average=None, name=None, op=None, {FACTORS}, {PROCESS_SET}"
_COMPRESSED = f"average=None, name=None, compression=Compression.none, op=None, {FACTORS}, {PROCESS_SET}"
_SCATTER = f"name=None, compression=Compression.none, op=Average, {PROCESS_SET}, {FACTORS}"
_SCATTER_ASYNC = f"name=None, op=Average, {PROCESS_SET}, {FACTORS}"

_HANDLE = "the handle is an object: `result`, `wait(seconds)`, `poll`"

TORCH = Part(
    "horovod.torch",
    ("horovod.torch",),
    {
        "Operations": (
            Name("allreduce", f"tensor, {_COMPRESSED}", BF16),
            Name("allreduce_async", f"tensor, {_REDUCE}", _HANDLE),
            Name("allreduce_", f"tensor, {_REDUCE}"),
            Name("allreduce_async_", f"tensor, {_REDUCE}", _HANDLE),
            Name("grouped_allreduce", f"tensors, {_COMPRESSED}"),
            Name("grouped_allreduce_async", f"tensors, {_REDUCE}", _HANDLE),
            Name("grouped_allreduce_", f"tensors, {_REDUCE}"),
            Name("grouped_allreduce_async_", f"tensors, {_REDUCE}", _HANDLE),
            Name("sparse_allreduce_async", f"tensor, name, op, {PROCESS_SET}"),
            Name("allgather", f"tensor, name=None, {PROCESS_SET}"),
            Name("allgather_async", f"tensor, name=None, {PROCESS_SET}", _HANDLE),
            Name("grouped_allgather", f"tensors, name=None, {PROCESS_SET}"),
            Name("grouped_allgather_async", f"tensors, name=None, {PROCESS_SET}", _HANDLE),
            Name("broadcast", f"tensor, root_rank, name=None, {PROCESS_SET}"),
            Name("broadcast_async", f"tensor, root_rank, name=None, {PROCESS_SET}", _HANDLE),
            Name("broadcast_", f"tensor, root_rank, name=None, {PROCESS_SET}"),
            Name("broadcast_async_", f"tensor, root_rank, name=None, {PROCESS_SET}", _HANDLE),
            Name("alltoall", f"tensor, splits=None, name=None, {PROCESS_SET}"),
            Name("alltoall_async", f"tensor, splits=None, name=None, {PROCESS_SET}", _HANDLE),
            Name("reducescatter", f"tensor, {_SCATTER}"),
            Name("reducescatter_async", f"tensor, {_SCATTER_ASYNC}", _HANDLE),
            Name("grouped_reducescatter", f"tensors, {_SCATTER}"),
            Name("grouped_reducescatter_async", f"tensors, {_SCATTER_ASYNC}", _HANDLE),
            Name("poll", "handle"),
            Name("synchronize", "handle", "what is no handle is refused, where Horovod returns None"),
            Name("join", "device=-1", "for every operation, not allreduce alone"),
            Name("barrier", PROCESS_SET),
        ),
        "State": (
            Name("broadcast_parameters", "params, root_rank", "within a process set, too"),
            Name(
                "broadcast_optimizer_state",
                "optimizer, root_rank, model=None",
                "makes no step; any optimizer, LBFGS too; to the last type",
            ),
            Name("broadcast_object", f"obj, root_rank=0, name=None, {PROCESS_SET}"),
            Name("allgather_object", "obj, name=None", "within a process set, too"),
        ),
        "Training": (
            Name(
                "DistributedOptimizer",
                "optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, "
                "op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, "
                f"{PROCESS_SET}",
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
        "Elastic jobs": (
            Name("elastic.run", "func"),
            Name("elastic.TorchState", "model=None, optimizer=None, **kwargs"),
            Name("elastic.ElasticSampler", "dataset, shuffle=True, seed=0"),
        ),
    },
)
