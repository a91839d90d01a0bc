"""Process sets and grids of ranks, and calls that all ranks of one make together."""
