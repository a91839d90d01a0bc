"""Published architectures through `cd.Pipeline`, compared with one process; `docs/architectures.md` has the result."""
