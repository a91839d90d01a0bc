"""Elastic jobs, refused: the ranks of a job of coordd's stay the same."""

from horovod.refused import Refused

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

_WHY = (
    "the ranks of a job stay the same here; save checkpoints, as keras.callbacks.BackupAndRestore does on rank 0, and "
    "start the job anew when it has failed"
)

run = Refused("horovod.keras.elastic.run", _WHY)
KerasState = Refused("horovod.keras.elastic.KerasState", _WHY)
CommitStateCallback = Refused("horovod.keras.elastic.CommitStateCallback", _WHY)
UpdateBatchStateCallback = Refused("horovod.keras.elastic.UpdateBatchStateCallback", _WHY)
UpdateEpochStateCallback = Refused("horovod.keras.elastic.UpdateEpochStateCallback", _WHY)
