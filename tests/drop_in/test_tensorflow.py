"""`horovod.tensorflow`, `horovod.tensorflow.keras` and `horovod.keras`: names, calls, and whole scripts."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from coordd_tools.compatibility.judge import differences
from tests.mpi.launch import launch

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
pytest.importorskip("keras", reason="Keras is not installed: pip install 'coordd[tensorflow]'")

_SET = "process_set=global_process_set"
_FACTORS = "prescale_factor=1.0, postscale_factor=1.0"
_DEVICES = "device_dense='', device_sparse=''"
_GROUPS = f"num_groups=0, groups=None, {_SET}, scale_local_gradients=True"
_COMPRESSED = "compression=Compression.none"

TENSORFLOW = {
    "allreduce": f"tensor, average=None, {_DEVICES}, {_COMPRESSED}, op=None, {_FACTORS}, name=None, {_SET}, "
    "ignore_name_scope=False",
    "grouped_allreduce": f"tensors, average=None, {_DEVICES}, {_COMPRESSED}, op=None, {_FACTORS}, {_SET}, "
    "ignore_name_scope=False, name=None",
    "allgather": f"tensor, name=None, ignore_name_scope=False, {_SET}",
    "grouped_allgather": f"tensors, name=None, ignore_name_scope=False, {_SET}",
    "broadcast": f"tensor, root_rank, name=None, ignore_name_scope=False, {_SET}",
    "broadcast_": f"variables, root_rank, name=None, {_SET}",
    "alltoall": f"tensor, splits=None, name=None, ignore_name_scope=False, {_SET}",
    "reducescatter": f"tensor, device_dense='', {_COMPRESSED}, op=Average, name=None, {_SET}, "
    f"ignore_name_scope=False, {_FACTORS}",
    "grouped_reducescatter": f"tensors, device_dense='', {_COMPRESSED}, op=Average, name=None, {_SET}, "
    f"ignore_name_scope=False, {_FACTORS}",
    "join": "",
    "size_op": "process_set_id=0, name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "local_size_op": "name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "broadcast_variables": f"variables, root_rank, {_SET}, inplace=False",
    "broadcast_object": f"obj, root_rank=0, session=None, name=None, {_SET}",
    "allgather_object": f"obj, session=None, name=None, {_SET}",
    "broadcast_object_fn": f"root_rank=0, session=None, name=None, {_SET}",
    "DistributedOptimizer": f"optimizer, name=None, use_locking=False, {_DEVICES}, {_COMPRESSED}, "
    "sparse_as_dense=False, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, "
    "average_aggregated_gradients=False, "
    f"{_GROUPS}",
    "DistributedGradientTape": f"gradtape, {_DEVICES}, {_COMPRESSED}, sparse_as_dense=False, op=Average, "
    f"gradient_predivide_factor=1.0, {_GROUPS}",
    "SyncBatchNormalization": "fused=False",
}
KERAS = {
    "DistributedOptimizer": f"optimizer, name=None, {_DEVICES}, {_COMPRESSED}, sparse_as_dense=False, "
    "gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False, "
    f"{_GROUPS}",
    "allreduce": f"value, name=None, average=None, {_FACTORS}, op=None, {_SET}",
    "allgather": f"value, name=None, {_SET}",
    "broadcast": f"value, root_rank, name=None, {_SET}",
    "broadcast_global_variables": "root_rank",
    "load_model": f"filepath, custom_optimizers=None, custom_objects=None, {_COMPRESSED}, legacy_opts=False",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "callbacks.MetricAverageCallback": "device=''",
    "callbacks.LearningRateScheduleCallback": "initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, "
    "momentum_correction=True, steps_per_epoch=None",
    "callbacks.LearningRateWarmupCallback": "initial_lr, warmup_epochs=5, momentum_correction=True, "
    "steps_per_epoch=None, verbose=0",
}
PACKAGES = {"horovod.tensorflow": TENSORFLOW, "horovod.tensorflow.keras": KERAS, "horovod.keras": KERAS}


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in PACKAGES.items() for name in names]
)
def test_a_name_takes_horovods_calls(package: str, name: str) -> None:
    module = importlib.import_module(package)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    space: dict[str, Any] = {}
    exec(f"def theirs({PACKAGES[package][name]}): ...", dict(vars(module)), space)  # noqa: S102 - our own table
    assert differences(inspect.signature(space["theirs"]), inspect.signature(found)) == []


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "horovod.tensorflow",
            ["init", "rank", "PartialDistributedGradientTape", "allgather_object", "Adasum"],
        ),
        ("horovod.tensorflow", ["HorovodInternalError", "mpi_built", "nccl_built", "ProcessSet", "add_process_set"]),
        ("horovod.tensorflow.mpi_ops", ["allreduce", "size", "init", "Average"]),
        ("horovod.tensorflow.functions", ["broadcast_variables", "broadcast_object", "allgather_object"]),
        ("horovod.tensorflow.compression", ["Compression"]),
        ("horovod.tensorflow.sync_batch_norm", ["SyncBatchNormalization"]),
        ("horovod.tensorflow.keras", ["init", "PartialDistributedOptimizer", "callbacks", "elastic", "Compression"]),
        ("horovod.tensorflow.keras.callbacks", ["BestModelCheckpoint", "MetricAverageCallback"]),
        ("horovod.keras", ["init", "size", "callbacks", "reducescatter", "HorovodInternalError"]),
        ("horovod.keras.callbacks", ["CommitStateCallback", "UpdateEpochStateCallback"]),
    ],
)
def test_scripts_find_names_where_horovod_has_them(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in names)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("horovod.tensorflow", "broadcast_global_variables"),
        ("horovod.tensorflow", "BroadcastGlobalVariablesHook"),
        ("horovod.tensorflow.elastic", "run"),
        ("horovod.tensorflow.elastic", "TensorFlowKerasState"),
        ("horovod.keras.elastic", "KerasState"),
    ],
)
def test_what_is_refused_says_in_one_sentence_what_to_do(module: str, name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{module}\.{name} is refused: [^\n]+$"):
        getattr(importlib.import_module(module), name)(0)


SCRIPTS = {
    "tape": """
        import numpy as np
        import tensorflow as tf
        import horovod.tensorflow as hvd

        hvd.init()
        weight = tf.Variable(np.full((2, 1), hvd.rank() + 1.0))
        hvd.broadcast_variables([weight], root_rank=0)
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.ones((1, 2), tf.float64) @ weight) * hvd.rank()
            tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.none)
            weight.assign_sub(tape.gradient(loss, [weight])[0])
        print("weight", hvd.rank(), weight.numpy().ravel().tolist())
    """,
    "keras": """
        import keras
        import numpy as np
        import horovod.tensorflow.keras as hvd

        hvd.init()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.full((2, 1), hvd.rank() + 1.0)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
        model.compile(optimizer, "mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        model.fit(np.ones((4, 2)), np.ones(4), batch_size=2, verbose=0, callbacks=callbacks)
        print("weight", hvd.rank(), (model.get_weights()[0].ravel() - 2.5).tolist())
    """,
}
EXPECTED = {"tape": "[-0.5, -0.5]", "keras": "[-1.5, -1.5]"}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_horovod_runs_as_it_is(name: str) -> None:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}
    text = inspect.cleandoc(SCRIPTS[name])
    outcome = launch(2, text, launcher="as-horovod", timeout=100, variables=quiet)
    assert outcome.returncode == 0, str(outcome)
    for rank in range(2):
        assert f"weight {rank} {EXPECTED[name]}" in outcome.stdout
