"""What Horovod's elastic jobs are made of, refused."""

from horovod.torch.elastic import ObjectState, State, run

__all__ = ["ObjectState", "State", "run_fn"]

run_fn = run
