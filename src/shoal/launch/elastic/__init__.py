"""Starts and replaces the processes of a run whose ranks come and go; see `crew` first."""
