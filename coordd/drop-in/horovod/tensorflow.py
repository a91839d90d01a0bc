"""Is not there; says so."""

from horovod.refused import refusal

raise refusal("horovod.tensorflow", "coordd stands in for horovod.torch only; run this script without --as-horovod")
