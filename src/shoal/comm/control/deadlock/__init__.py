"""Ranks that wait for each other: what each shows of its waits, and who cannot go on."""
