"""Is not there; says so."""

from horovod.refused import refusal

raise refusal("horovod.ray", "coordd starts scripts itself; use `coordd run --as-horovod -n N python script.py`")
