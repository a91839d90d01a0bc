"""The public names of `horovod.tensorflow.keras` and `horovod.keras` 0.28, with their signatures; data only."""

from __future__ import annotations

from coordd_tools.compatibility.name import BF16, FACTORS, PROCESS_SET, Name, Part

__all__ = ["KERAS", "KERAS_ALONE", "TENSORFLOW_KERAS_ALONE"]

_OPTIMIZER = (
    "optimizer, name=None, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False, "
    "gradient_predivide_factor=1.0, op=Average"
)
_IN_A_SET = "within a process set, too"
_FROM_SPARK = "Horovod's has its path from Spark"
_OF_KERAS = "any optimizer of Keras 3, on TensorFlow and PyTorch"

KERAS = Part(
    "horovod.tensorflow.keras and horovod.keras",
    ("horovod.tensorflow.keras", "horovod.keras"),
    {
        "Values and variables": (
            Name("allgather", "value, name=None", _IN_A_SET),
            Name("broadcast", "value, root_rank, name=None", _IN_A_SET),
            Name("reducescatter", "value, name=None, op=Average", _IN_A_SET),
            Name(
                "broadcast_global_variables",
                "root_rank",
                differs="Keras 3 keeps no list of all variables: give the model, "
                "as in `broadcast_global_variables(0, model)`",
            ),
        ),
        "Saved models": (
            Name(
                "load_model",
                "filepath, custom_optimizers=None, custom_objects=None, compression=Compression.none, "
                "legacy_opts=False",
            ),
        ),
        "Callbacks": (
            Name("callbacks.BroadcastGlobalVariablesCallback", "root_rank, device='', local_variables=None"),
            Name("callbacks.MetricAverageCallback", "device=''"),
            Name(
                "callbacks.LearningRateScheduleCallback",
                "initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True, "
                "steps_per_epoch=None",
            ),
            Name(
                "callbacks.LearningRateWarmupCallback",
                "initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0",
            ),
        ),
        "Compression": (
            Name("Compression.none"),
            Name("Compression.fp16", None, "sums are made in fp32; `bf16` beside it"),
        ),
        "Elastic jobs": (
            Name("elastic.run", "func"),
            Name("elastic.KerasState", "model, optimizer=None, **kwargs"),
            Name("elastic.CommitStateCallback", "state, batches_per_commit=1"),
            Name("elastic.UpdateBatchStateCallback", "state"),
            Name("elastic.UpdateEpochStateCallback", "state"),
        ),
    },
)

TENSORFLOW_KERAS_ALONE = Part(
    "horovod.tensorflow.keras alone",
    ("horovod.tensorflow.keras",),
    {
        "What horovod.keras has otherwise": (
            Name(
                "allreduce",
                f"value, name=None, average=None, {FACTORS}, op=None, compression=Compression.none",
                f"{_IN_A_SET}; {BF16}",
            ),
            Name(
                "DistributedOptimizer",
                f"{_OPTIMIZER}, backward_passes_per_step=1, average_aggregated_gradients=False, num_groups=0, "
                f"groups=None, {PROCESS_SET}, scale_local_gradients=True",
                _OF_KERAS,
            ),
            Name(
                "callbacks.BestModelCheckpoint",
                "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', save_freq='epoch'",
                note=_FROM_SPARK,
            ),
        ),
    },
)

KERAS_ALONE = Part(
    "horovod.keras alone",
    ("horovod.keras",),
    {
        "What horovod.tensorflow.keras has otherwise": (
            Name(
                "allreduce",
                f"value, name=None, average=True, {FACTORS}, op=None, compression=Compression.none",
                note="which averages, too, and need not be turned off for `op`",
            ),
            Name("DistributedOptimizer", f"{_OPTIMIZER}, num_groups=0, groups=None", note=_OF_KERAS),
            Name(
                "PartialDistributedOptimizer",
                f"{_OPTIMIZER}, groups=None, {PROCESS_SET}, local_layers=None, scale_local_gradients=True",
                differs="give what follows `op` by name",
            ),
            Name(
                "callbacks.BestModelCheckpoint",
                "monitor='val_loss', verbose=0, mode='auto', save_freq='epoch'",
                note=_FROM_SPARK,
            ),
        ),
    },
)
