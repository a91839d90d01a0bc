"""The path from which some scripts take `TorchState`."""

from horovod.torch.elastic import TorchState

__all__ = ["TorchState"]
