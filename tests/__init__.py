"""Tests; a package, so that ``tests.mpi`` means the same module in pytest and in a rank."""
