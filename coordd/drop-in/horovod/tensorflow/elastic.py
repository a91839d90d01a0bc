"""Elastic jobs, refused: the ranks of a job of coordd's stay the same."""

from horovod.refused import Refused

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

_WHY = (
    "the ranks of a job stay the same here; save a checkpoint every epoch, and start the job anew when it has failed "
    "(docs/migrating-from-horovod.md shows how)"
)

run = Refused("horovod.tensorflow.elastic.run", _WHY)
TensorFlowState = Refused("horovod.tensorflow.elastic.TensorFlowState", _WHY)
TensorFlowKerasState = Refused("horovod.tensorflow.elastic.TensorFlowKerasState", _WHY)
