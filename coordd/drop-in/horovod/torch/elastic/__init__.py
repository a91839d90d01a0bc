"""Elastic jobs, refused: the ranks of a job of coordd's stay the same."""

from horovod.refused import SAME_RANKS, Refused

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

run = Refused("horovod.torch.elastic.run", SAME_RANKS)
State = Refused("horovod.torch.elastic.State", SAME_RANKS)
ObjectState = Refused("horovod.torch.elastic.ObjectState", SAME_RANKS)
TorchState = Refused("horovod.torch.elastic.TorchState", SAME_RANKS)
ElasticSampler = Refused(
    "horovod.torch.elastic.ElasticSampler",
    "the ranks of a job stay the same here; use torch.utils.data.DistributedSampler",
)
