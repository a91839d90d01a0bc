"""Elastic jobs, refused: the ranks of a job of coordd's stay the same."""

from horovod.refused import Refused

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

_WHY = (
    "the ranks of a job stay the same here; save a checkpoint every epoch, and start the job anew when it has failed "
    "(docs/migrating-from-horovod.md shows how)"
)

run = Refused("horovod.torch.elastic.run", _WHY)
State = Refused("horovod.torch.elastic.State", _WHY)
ObjectState = Refused("horovod.torch.elastic.ObjectState", _WHY)
TorchState = Refused("horovod.torch.elastic.TorchState", _WHY)
ElasticSampler = Refused(
    "horovod.torch.elastic.ElasticSampler",
    "the ranks of a job stay the same here; use torch.utils.data.DistributedSampler",
)
