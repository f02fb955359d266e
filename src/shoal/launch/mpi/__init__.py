"""Ranks that are started through `mpiexec`."""
