"""The public names of `horovod.tensorflow` 0.28, with their signatures and coordd's improvements; data only."""

from __future__ import annotations

from coordd_tools.compatibility.name import BF16, FACTORS, PROCESS_SET, Name, Part

__all__ = ["TENSORFLOW"]

_DEVICES = "device_dense='', device_sparse=''"
_COMPRESSED = "compression=Compression.none"
_SCOPED = f"name=None, ignore_name_scope=False, {PROCESS_SET}"
_CHOICES = f"num_groups=0, groups=None, {PROCESS_SET}, scale_local_gradients=True"
_TAPE = f"gradtape, {_DEVICES}, {_COMPRESSED}, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0"
_NO_ADASUM = "`op=Adasum` is refused: Average, AveragePresent or Sum"

TENSORFLOW = Part(
    "horovod.tensorflow",
    ("horovod.tensorflow",),
    {
        "Operations": (
            Name(
                "allreduce",
                f"tensor, average=None, {_DEVICES}, {_COMPRESSED}, op=None, {FACTORS}, name=None, {PROCESS_SET}, "
                "ignore_name_scope=False",
                BF16,
            ),
            Name(
                "grouped_allreduce",
                f"tensors, average=None, {_DEVICES}, {_COMPRESSED}, op=None, {FACTORS}, {PROCESS_SET}, "
                "ignore_name_scope=False, name=None",
                "dense tensors and `tf.IndexedSlices` in one call keep each its shape",
            ),
            Name("allgather", f"tensor, {_SCOPED}"),
            Name("grouped_allgather", f"tensors, {_SCOPED}"),
            Name("broadcast", f"tensor, root_rank, {_SCOPED}"),
            Name("broadcast_", f"variables, root_rank, name=None, {PROCESS_SET}", note="of Keras, too"),
            Name("alltoall", f"tensor, splits=None, {_SCOPED}"),
            Name(
                "reducescatter",
                f"tensor, device_dense='', {_COMPRESSED}, op=Average, name=None, {PROCESS_SET}, "
                f"ignore_name_scope=False, {FACTORS}",
            ),
            Name(
                "grouped_reducescatter",
                f"tensors, device_dense='', {_COMPRESSED}, op=Average, {PROCESS_SET}, {FACTORS}",
                "takes a name",
            ),
            Name("join", "", "for every operation, not allreduce alone; in a graph, too"),
        ),
        "Operations of a graph": (
            Name("size_op", "process_set_id=0, name=None", note="0 or a `ProcessSet.process_set_id`"),
            Name("rank_op", "name=None"),
            Name("local_rank_op", "name=None"),
            Name("local_size_op", "name=None"),
            Name("process_set_included_op", "process_set_id=0, name=None", note="as `size_op`"),
        ),
        "Variables and objects": (
            Name(
                "broadcast_variables",
                f"variables, root_rank, {PROCESS_SET}, inplace=False",
                "ranks with different variables are told which, before anything is copied",
            ),
            Name("broadcast_global_variables", "root_rank"),
            Name("BroadcastGlobalVariablesHook", "root_rank, device=''"),
            Name("broadcast_object", f"obj, root_rank=0, session=None, name=None, {PROCESS_SET}"),
            Name("broadcast_object_fn", f"root_rank=0, session=None, name=None, {PROCESS_SET}"),
            Name("allgather_object", f"obj, session=None, name=None, {PROCESS_SET}"),
        ),
        "Training": (
            Name(
                "DistributedOptimizer",
                f"optimizer, name=None, use_locking=False, {_DEVICES}, {_COMPRESSED}, sparse_as_dense=False, "
                "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, "
                f"average_aggregated_gradients=False, {_CHOICES}",
                differs="an optimizer of TensorFlow 1 is refused: take one of Keras, or wrap the tape; there is no "
                "`use_locking` in `coordd.tensorflow`",
            ),
            Name(
                "DistributedOptimizer.register_local_var",
                refused="of optimizers of TensorFlow 1; give layers to `coordd.keras.PartialDistributedOptimizer`",
            ),
            Name("DistributedGradientTape", f"{_TAPE}, {_CHOICES}", differs=_NO_ADASUM),
            Name(
                "DistributedGradientTape.gradient",
                "self, target, sources, output_gradients=None, use_generic_names=False",
                note="`unconnected_gradients` is where `tf.GradientTape` has it",
            ),
            Name("DistributedGradientTape.register_local_source", "self, source", note="a variable of Keras, too"),
            Name(
                "DistributedGradientTape.get_local_and_global_gradients",
                "self, target, sources, output_gradients=None, use_generic_names=False",
                "sources in any structure",
            ),
            Name(
                "PartialDistributedGradientTape",
                f"{_TAPE}, num_groups=0, groups=None, {PROCESS_SET}, local_layers=None, scale_local_gradients=True",
                differs=_NO_ADASUM,
            ),
            Name("SyncBatchNormalization", "fused=False, **kwargs", "within a process set, too; by what is not masked"),
        ),
        "Compression": (
            Name("Compression.none"),
            Name("Compression.fp16", None, "sums are made in fp32; `bf16` beside it"),
        ),
        "Elastic jobs": (
            Name("elastic.run", "func"),
            Name("elastic.TensorFlowState", "variables=None, session=None, **kwargs"),
            Name("elastic.TensorFlowKerasState", "model, optimizer=None, backend=None, **kwargs"),
        ),
    },
)
