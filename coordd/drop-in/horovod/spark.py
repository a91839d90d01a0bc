"""Is not there; says so."""

from horovod.refused import refusal

raise refusal(
    "horovod.spark",
    "coordd starts scripts itself; write the data to files, and use `coordd run --as-horovod -n N python script.py`",
)
