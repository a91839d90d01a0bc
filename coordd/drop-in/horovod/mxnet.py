"""Is not there; says so."""

from horovod.refused import refusal

raise refusal("horovod.mxnet", "MXNet is retired, and coordd does not know it; port the script to PyTorch")
