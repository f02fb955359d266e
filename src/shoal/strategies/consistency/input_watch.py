"""Notices that all ranks train on the same batches, which is training on copies.

In the first rounds of training each rank keeps a fingerprint of what the model was called with.
It is compared in a header where gradients are averaged: all ranks do that together, however often
each of them has called the model before.
"""

from __future__ import annotations

import warnings
from typing import Any

from shoal.comm import Backend
from shoal.strategies.consistency.progress import Progress
from shoal.strategies.consistency.rounds import Vote
from shoal.torch_support.fingerprint import fingerprint, fingerprint_number

NUM_ROUNDS = 3
# Of a round with more calls of the model, the first ones tell enough.
_MOST_CALLS = 16


class InputWatch:
    """The inputs of one model on one rank, for the first few rounds."""

    def __init__(self, backend: Backend, progress: Progress) -> None:
        """``backend`` are the ranks that should see different data."""
        self._backend, self._progress = backend, progress
        self.rounds_left = NUM_ROUNDS if backend.size > 1 else 0
        """How many more rounds are compared."""
        self._seen: list[str] = []

    def stop(self) -> None:
        """The inputs are equal on purpose; every rank calls it."""
        self.rounds_left = 0

    def see(self, inputs: Any) -> None:
        """The model is called, in training, and rounds are left."""
        if len(self._seen) < _MOST_CALLS:
            self._seen.append(fingerprint(inputs))

    def compare(self) -> None:
        """Gradients were averaged, every rank is here, and rounds are left."""
        is_unknown = not all(self._seen) or not self._seen
        own = fingerprint_number(self._seen)
        self._seen = []
        doing = "the end of a backward, inputs compared"
        vote = Vote.cast(self._backend, self._progress, doing, wish=is_unknown, numbers=[own])
        is_same = not vote.is_wanted and len(vote.united) == 1
        # One round with different inputs is enough to know that this is not the mistake.
        self.rounds_left = self.rounds_left - 1 if is_same else 0
        if is_same and not self.rounds_left and self._backend.rank == 0:
            warnings.warn(
                f"all {self._backend.size} ranks were given identical inputs in the first "
                f"{NUM_ROUNDS} steps, so they train on copies and not on more data. Let shoal "
                "divide the data (model, optimizer, loader = shoal.as_distributed(model, optimizer,"
                " loader)), use shoal.sampler, or seed what makes batches differently on each rank",
                stacklevel=2,
            )
