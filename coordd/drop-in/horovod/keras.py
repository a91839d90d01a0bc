"""Is not there; says so."""

from horovod.refused import refusal

raise refusal("horovod.keras", "coordd stands in for horovod.torch only; run this script without --as-horovod")
