"""Measures coordd beside its peers: the same ranks, the same run, engine by engine in short alternating blocks."""
