"""Which samples a rank gets: its part of each global batch, every sample once an epoch.

[Note: global batches]
An epoch is one order of all samples, the same on every rank, cut into *global batches*. A rank
takes its contiguous part of each; where a batch does not divide, the first ranks get one sample
more. So what is trained does not depend on the ranks, and a position in the epoch is a number of
samples, whatever the number of ranks.

Every rank has a part in every batch: a rank without samples would have nothing to call the model
with, and one batch less than the others. So a last batch with fewer samples than there are ranks
is joined to the one before.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Sampler

from shoal.comm.backend import Backend
from shoal.comm.operation.partition import offsets, split_sizes
from shoal.comm.world import World, find_current
from shoal.errors import ClosedError
from shoal.launch.joining.environment import discover
from shoal.torch_internals.optimizers import num_yielded, reads_ahead


class GlobalBatchSampler(Sampler[list[int]]):
    """Yields lists of indices for ``DataLoader(dataset, batch_sampler=...)``; see `sampler`."""

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        world: World | Backend | None = None,
    ) -> None:
        """Use `sampler`."""
        if length < 1 or batch_size < 1:
            raise ValueError(
                f"need at least one sample and one sample a batch; got {length} samples and "
                f"batch_size={batch_size}"
            )
        self.length, self.batch_size = length, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._world = world
        self._begin = 0  # where in the epoch this iteration began
        self._position = 0  # samples of the epoch that all ranks together were given
        self._is_resumed = self._is_named = self._is_over = False
        self._reader: Callable[[], Any] | None = None  # a loader that fetches ahead

    def __getstate__(self) -> dict[str, Any]:
        """Whoever reads from it does not read from its copies."""
        return {**self.__dict__, "_reader": None}

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of each global batch of an epoch."""
        rank, size = self._place()
        if self._is_over or self._is_resumed_at_the_end(size):
            self._go_to(self.epoch + 1)
        elif not self._is_resumed:
            self._begin = 0
        self._is_resumed = self._is_named = self._is_over = False
        self._position = self._begin
        order, cuts = self._order(), self._cuts(self._begin, size)
        self._reader = _prefetching_reader(sys._getframe(1))
        for begin, end in pairwise(cuts):
            low, high = offsets(split_sizes(end - begin, size))[rank : rank + 2]
            self._position = end
            yield order[begin + low : begin + high].tolist()
        # Workers of a loader come here while the last batches are still trained on: only the
        # next iteration takes the next epoch.
        self._is_over = True

    def __len__(self) -> int:
        """Global batches in a whole epoch, also while one is resumed in the middle."""
        return len(self._cuts(0, self._place()[1])) - 1

    @property
    def num_ranks(self) -> int:
        """How many parts each batch is divided into."""
        return self._place()[1]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch; without it each iteration takes the next epoch's.

        Naming the epoch that was resumed leaves the position in it as it is: if nothing is left of
        it, its iteration is empty, and the next epoch is the next one to train on.
        """
        if epoch != self.epoch:
            self._warn_of_gap(epoch)
            self._go_to(epoch)
        self._is_named, self._is_over = True, False

    def _go_to(self, epoch: int) -> None:
        """The beginning of an epoch."""
        self.epoch, self._begin, self._position, self._is_resumed = epoch, 0, 0, False

    def _is_resumed_at_the_end(self, size: int) -> bool:
        """Whether a state was loaded of which nothing is left, and its epoch was not asked for."""
        return self._is_resumed and not self._is_named and len(self._cuts(self._begin, size)) == 1

    def _warn_of_gap(self, epoch: int) -> None:
        due = self.epoch + (self._begin == self.length)
        if self._is_resumed and epoch != due:
            warnings.warn(
                f"the state that was loaded is at sample {self._begin} of {self.length} of epoch "
                f"{self.epoch}, and set_epoch({epoch}) goes elsewhere: epochs or parts of them are "
                f"left out or trained on again. Begin the loop over epochs with epoch {due}",
                stacklevel=3,
            )

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Where in which epoch training is; the same on every rank.

        Args:
            num_batches: How many batches of this iteration were trained on. A `DataLoader` with
                workers fetches ahead; while it is iterated over, what it has handed out counts.
        """
        position = self._position
        if num_batches is None and self._reader is not None and position > self._begin:
            num_batches = self._num_handed_out(self._reader())
        if num_batches is not None:
            position = self._cuts(self._begin, self._place()[1])[num_batches]
        if self.drop_last and self.length - position < self.batch_size:
            position = self.length  # what is dropped does not come any more
        return {
            "epoch": self.epoch,
            "position": position,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _num_handed_out(self, reader: Any) -> int | None:
        """None for all samples."""
        if reader is None and self._is_over:  # a loop that has come to its end
            return None
        if reader is None:
            raise ValueError(
                "a loader with workers has fetched ahead and is gone, so only the caller knows how "
                "many batches were trained on: pass sampler.state_dict(num_batches=n)"
            )
        count: int = num_yielded(reader)
        return count

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, at any number of ranks and any batch size.

        After the end of an epoch the next one begins. If more ranks go on than there are samples
        left in the epoch, these few are left out.
        """
        if state["length"] != self.length:
            raise ValueError(
                f"the state is of a dataset of {state['length']} samples; this one has "
                f"{self.length}"
            )
        self.epoch, self.seed, self.shuffle = state["epoch"], state["seed"], state["shuffle"]
        self._begin = self._position = state["position"]
        self._is_resumed, self._is_named, self._is_over = True, False, False

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.length, generator=generator)

    def _cuts(self, begin: int, num_ranks: int) -> list[int]:
        """Where global batches begin, and the end of the last; see [Note: global batches]."""
        cuts = list(range(begin, self.length + 1, self.batch_size))
        rest = self.length - cuts[-1]
        if rest and not self.drop_last:
            if rest >= num_ranks:
                cuts.append(self.length)
            elif len(cuts) > 1:
                cuts[-1] = self.length
        return cuts

    def _place(self) -> tuple[int, int]:
        """Rank and number of ranks, from the world of the moment if none was given."""
        world = self._world or find_current()
        rank, size = (0, 1) if world is None else (world.rank, world.size)
        if world is None and discover().size > 1:
            # As a world of one every rank would train on everything.
            raise ClosedError(
                f"this process was started as one of {discover().size} ranks, but there is no "
                "world yet: call shoal.init() or shoal.as_distributed() before using the sampler"
            )
        if min(self.batch_size, self.length) < size:
            raise ValueError(
                f"every rank needs a sample of each batch; got batch_size={self.batch_size} and "
                f"{self.length} samples for {size} ranks (batch_size counts all ranks' samples)"
            )
        return rank, size


def _prefetching_reader(frame: FrameType) -> Callable[[], Any] | None:
    """The iterator of a `DataLoader` that asks for the first batch, if it has workers."""
    reader = frame.f_locals.get("self")
    is_ahead = reads_ahead(reader)
    return weakref.ref(reader) if is_ahead else None


def sampler(
    dataset: Sized | int,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    world: World | Backend | None = None,
) -> GlobalBatchSampler:
    """A batch sampler over *global* batches: each sample once an epoch over all ranks.

    Each rank gets its contiguous part of every batch, so all ranks make the same number of steps.
    Parts differ by at most one sample, which `train_step` weights right. Without samples to spare
    the last batch is smaller, or up to ``ranks - 1`` larger: every rank has a part in it.

    Args:
        dataset: What is sampled from, or its length.
        batch_size: Samples in a global batch, of all ranks together.
        shuffle: Whether each epoch has an order of its own.
        seed: Chooses the orders; must be the same on every rank.
        drop_last: Leaves out a last batch that is smaller than the others.
        world: The ranks, for example the data axis of a mesh; by default the current world.

    Example:
        >>> import shoal
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_sampler=shoal.sampler(10, 4, shuffle=False))
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    length = dataset if isinstance(dataset, int) else len(dataset)
    return GlobalBatchSampler(
        length, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, world=world
    )
