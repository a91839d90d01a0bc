"""`horovod.tensorflow`, `horovod.tensorflow.keras` and `horovod.keras`: names, calls, and whole scripts."""

from __future__ import annotations

import importlib
import inspect

import pytest

from coordd_tools.compatibility.judge import judge
from coordd_tools.compatibility.name import Name
from coordd_tools.compatibility.surface import SURFACE
from tests.mpi.launch import launch

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
pytest.importorskip("keras", reason="Keras is not installed: pip install 'coordd[tensorflow]'")

PLACES = [
    (module, name) for part in SURFACE for module in part.modules for name in part.names if module != "horovod.torch"
]
DIFFERENT = {
    "horovod.keras.DistributedOptimizer",
    "horovod.keras.PartialDistributedOptimizer",
    "horovod.keras.allreduce",
    "horovod.keras.broadcast_global_variables",
    "horovod.keras.callbacks.BestModelCheckpoint",
    "horovod.tensorflow.DistributedGradientTape",
    "horovod.tensorflow.DistributedGradientTape.gradient",
    "horovod.tensorflow.DistributedOptimizer",
    "horovod.tensorflow.PartialDistributedGradientTape",
    "horovod.tensorflow.keras.broadcast_global_variables",
    "horovod.tensorflow.keras.callbacks.BestModelCheckpoint",
}
REFUSED = ("BroadcastGlobalVariablesHook", "DistributedOptimizer.register_local_var", "ProcessSet.mpi_comm", "elastic.")


@pytest.mark.parametrize(("module", "name"), PLACES, ids=[f"{module}.{name.name}" for module, name in PLACES])
def test_a_name_takes_horovods_calls_or_the_page_tells_which_it_does_not(module: str, name: Name) -> None:
    verdict, why = judge(name, [module])
    place = f"{module}.{name.name}"
    assert verdict in {"better", "differs", "refused", "same"}
    assert (verdict == "differs") == (place in DIFFERENT), why
    refused = name.name.startswith(REFUSED) or place == "horovod.tensorflow.broadcast_global_variables"
    assert (verdict == "refused") == refused
    assert bool(why) >= (verdict != "same")


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
        ("horovod.tensorflow.elastic", "TensorFlowState"),
        ("horovod.tensorflow.elastic", "TensorFlowKerasState"),
        ("horovod.keras.elastic", "KerasState"),
    ],
)
def test_what_is_refused_says_in_one_sentence_what_to_do(module: str, name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{module}\.{name} is refused: [^\n]+$"):
        getattr(importlib.import_module(module), name)(0)


@pytest.mark.parametrize("module", ["horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"])
def test_exceptions_are_made_as_horovods(module: str) -> None:
    hvd = importlib.import_module(module)
    for given in ((), ("lost a rank",), (ValueError("lost a rank"),), ("lost", "a rank")):
        error = hvd.HorovodInternalError(*given)
        assert isinstance(error, RuntimeError)
        assert error.args == given
    assert hvd.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    assert not hvd.HostsUpdatedInterrupt().skip_sync
    told = str(hvd.HorovodVersionMismatchError("tensorflow", "2.18", "2.19"))
    assert "2.18" in told
    assert "2.19" in told


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
