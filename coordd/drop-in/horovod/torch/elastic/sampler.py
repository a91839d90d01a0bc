"""The path from which some scripts take `ElasticSampler`."""

from horovod.torch.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
