"""A rank's part of each batch of indices, and of each batch that a dataset makes itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import BatchSampler, Sampler

from shoal.comm.operation.partition import offsets, split_sizes
from shoal.data.draws import Draws
from shoal.torch_internals.trees import tree_leaves, tree_map
from shoal.torch_support.fingerprint import fingerprint


class Position(NamedTuple):
    """Which part of a batch is this rank's."""

    rank: int
    size: int

    def bounds(self, length: int) -> slice:
        """Contiguous; the first ranks get one more where it does not divide."""
        low, high = offsets(split_sizes(length, self.size))[self.rank : self.rank + 2]
        return slice(low, high)


class SameOrderSampler(Sampler[Any]):
    """A user's sampler whose order is the same on every rank."""

    def __init__(self, inner: Iterable[Any], draws: Draws) -> None:
        self.inner, self._draws = inner, draws
        self.num_to_skip = 0
        """How many items the next iteration leaves out: what was trained on before."""
        self.num_rows: dict[int, int] = {}
        """Of batches that were not divided evenly, by their number: how long they are."""

    def __iter__(self) -> Iterator[Any]:
        """The same on every rank, from where training goes on."""
        num_to_skip, self.num_to_skip = self.num_to_skip, 0
        for number, item in enumerate(self._draws.drawn(lambda: iter(self.inner))):
            if number == 0:
                self._draws.compare("the first batch of indices", str(item)[:200])
            if number >= num_to_skip:
                yield item

    def move_to(self, position: Position) -> None:
        """Another part of each batch is this rank's from the next iteration on."""

    def num_drawn(self, num_given: int) -> int:
        """How many of the user's were drawn for those that were given to the loader."""
        return num_given

    def was_joined(self, number: int) -> bool:
        """Whether the batch of this number is two of the user's."""
        return self.num_drawn(number + 1) > number + 1

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]


class RankBatches(SameOrderSampler):
    """This rank's part of each batch of a user's batch sampler."""

    def __init__(self, inner: Iterable[Any], draws: Draws, position: Position) -> None:
        """See [Note: global batches] in `shoal.sampling` for the last batch."""
        super().__init__(inner, draws)
        self._position = position
        self._joined_at: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Lists of indices; every rank has at least one of each batch."""
        first, self._joined_at = self.num_to_skip, None
        self.num_rows.clear()
        batches = joined(super().__iter__(), self._position.size)
        for number, (batch, is_joined) in enumerate(batches, start=first):
            if is_joined:
                self._joined_at = number
            if len(batch) % self._position.size:
                self.num_rows[number] = len(batch)
            yield batch[self._position.bounds(len(batch))]

    def move_to(self, position: Position) -> None:
        """Another part of each batch is this rank's from the next iteration on."""
        self._position = position

    def num_drawn(self, num_given: int) -> int:
        """One more, once a last batch was given that two were joined to."""
        is_beyond = self._joined_at is not None and num_given > self._joined_at
        return num_given + is_beyond

    def __len__(self) -> int:
        """Batches of an epoch; of a batch sampler of one's own perhaps one more than there are."""
        length = len(self.inner)  # type: ignore[arg-type]
        if type(self.inner) is not BatchSampler or self.inner.drop_last:
            return length
        rest = len(self.inner.sampler) % self.inner.batch_size  # type: ignore[arg-type]
        return length - (0 < rest < self._position.size and length > 1)


def joined(batches: Iterable[Any], size: int) -> Iterator[tuple[list[Any], bool]]:
    """Batches of at least ``size`` samples: a smaller last one goes with the one before.

    Each comes with whether it was joined so.
    """
    iterator = map(list, batches)
    held, is_joined = next(iterator, None), False
    for number, batch in enumerate(iterator, start=1):
        assert held is not None
        if len(batch) < size and next(iterator, None) is None:
            held, is_joined = held + batch, True
            break
        _check_size(held, size, number - 1)
        yield held, False
        held = batch
    if held is not None:
        _check_size(held, size, -1)
        yield held, is_joined


def _check_size(batch: list[Any], size: int, number: int) -> None:
    if len(batch) < size:
        which = "the last batch" if number < 0 else f"batch {number}"
        raise ValueError(
            f"every rank needs a sample of each batch; {which} of the loader has {len(batch)} for "
            f"{size} ranks (the loader's batches are those of all ranks together)"
        )


class BatchPart(NamedTuple):
    """What a rank takes of a batch that all of them have seen, or nothing of one too small."""

    value: Any
    is_there: bool
    num_rows: int
    """Of the whole batch."""
    seen: str
    """A fingerprint of the whole, for the first batch of a process; else empty."""


class ItemsOfBatch:
    """A user's ``collate_fn``, for this rank's items of each batch of a stream."""

    def __init__(self, collate: Callable[[Any], Any], position: Position) -> None:
        """In workers it is a copy."""
        self._collate, self._position, self._is_first = collate, position, True

    def move_to(self, position: Position) -> None:
        """Another part of each batch is this rank's from now on."""
        self._position, self._is_first = position, True

    def __call__(self, data: Any) -> BatchPart:
        """The items of a whole batch."""
        seen = fingerprint(data) if self._is_first else ""
        self._is_first = False
        return self._take(data, seen)

    def _take(self, data: Any, seen: str) -> BatchPart:
        if len(data) < self._position.size:
            warnings.warn(
                f"a last batch of {len(data)} samples is left out, because every one of the "
                f"{self._position.size} ranks needs at least one; with drop_last=True it is, too",
                stacklevel=2,
            )
            return BatchPart(None, False, len(data), seen)
        value = self._collate(data[self._position.bounds(len(data))])
        return BatchPart(value, True, len(data), seen)


class RowsOfBatch(ItemsOfBatch):
    """As `ItemsOfBatch`, where what comes from the dataset is a batch already."""

    def _take(self, data: Any, seen: str) -> BatchPart:
        whole = self._collate(data)
        counts = {len(leaf) for leaf in tree_leaves(whole) if _has_rows(leaf)}
        if len(counts) != 1 or min(counts) < self._position.size:
            found = f"tensors of {', '.join(map(str, sorted(counts)))} rows" if counts else "none"
            raise ValueError(
                f"with batch_size=None what the dataset gives is a batch of all ranks, so all of "
                f"its tensors must have as many rows, at least {self._position.size}; got {found}. "
                "Give the loader a batch_size, or divide the data yourself and do not pass the "
                "loader"
            )
        num_rows = counts.pop()
        bounds = self._position.bounds(num_rows)

        def cut(leaf: Any) -> Any:
            return leaf[bounds] if _has_rows(leaf) else leaf

        return BatchPart(tree_map(cut, whole), True, num_rows, seen)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0
