"""Elastic jobs, refused: the ranks of a job of coordd's stay the same."""

from horovod.refused import SAME_RANKS, Refused

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

run = Refused("horovod.tensorflow.elastic.run", SAME_RANKS)
TensorFlowState = Refused("horovod.tensorflow.elastic.TensorFlowState", SAME_RANKS)
TensorFlowKerasState = Refused("horovod.tensorflow.elastic.TensorFlowKerasState", SAME_RANKS)
