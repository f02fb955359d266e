"""Any `DataLoader`, divided over the ranks that see different data.

[Note: a loader's batches]
A script that works in one process has batches of some size, and trains the same on any number of
ranks if that is the size of the *global* batch. So a loader stays what it is, batch by batch, and
each rank takes its contiguous part of every batch. Ranks that hold parts of one replica of the
model take the same part.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from shoal.comm import Backend
from shoal.data.draws import Draws
from shoal.data.rank_batches import (
    BatchPart,
    ItemsOfBatch,
    Position,
    RankBatches,
    RowsOfBatch,
    SameOrderSampler,
)
from shoal.errors import MismatchError, ShoalError
from shoal.sampling import GlobalBatchSampler
from shoal.strategies import ShardedModel
from shoal.torch_internals.optimizers import LOADER_READER

T = TypeVar("T")
_END: Any = object()


class ElasticRun(Protocol):
    """What a loader needs of an optimizer whose attempts may be void."""

    def become_member(self) -> None:
        """One that has come late takes part from here on."""

    def before_batch(self, loader: Any) -> None:
        """What follows can be done again from here."""

    def no_batch(self) -> None:
        """There was none: what follows is not done again from there."""

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error says that the world has lost a rank."""

    def recover(self) -> None:
        """Goes on in the next world."""


class DividedLoader(DataLoader[T]):
    """What `divide` makes of a loader, beside the class that it was.

    Its attributes are the user's: ``batch_size`` is that of the global batch.
    """

    _draws: Draws
    _position: Position
    _model: weakref.ref[ShardedModel]
    _num_batches = 0
    """How many of the iteration under way were handed out."""
    _num_to_skip = 0
    _has_warned = False

    epoch = 0
    """The number of the epoch that is iterated over, or of the next one."""
    _is_numbered = _is_rewound = _has_ended = False
    _run: ElasticRun | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """This rank's part of each batch; all ranks iterate equally often."""
        self._num_batches = 0  # an epoch that was left early counts no more
        if self._run is not None:
            yield from self._elastic_epoch(self._run, super().__iter__)
        else:
            resumed_at = self._num_to_skip
            yield from self._epoch(super().__iter__)
            is_empty = resumed_at and self._num_batches == resumed_at  # nothing was left of it
            if is_empty and not self._is_numbered:
                self.epoch += 1
                yield from self._epoch(super().__iter__)
        self.epoch, self._num_batches, self._has_ended = self.epoch + 1, 0, True

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are left of so many, for a loop around the loader.

        After a state was loaded, and for a rank that joined an elastic run, it begins with the
        epoch that is under way.

        Example:
            >>> for epoch in loader.epochs(10):
            ...     for inputs, targets in loader:
            ...         ...
        """
        if self._run is not None:
            self._run.become_member()
        self._is_numbered = True
        try:
            while self.epoch < count:
                self._has_ended = False
                yield self.epoch
                if not self._has_ended:  # the loop over it was left early
                    self.epoch, self._num_batches, self._num_to_skip = self.epoch + 1, 0, 0
                    self._draws.forget_resumed()
        finally:
            self._is_numbered = False
            if self._run is not None:
                # Workers that stay end here. An elastic optimizer has its loaders, and is itself
                # part of a cycle: where a cycle is collected, torch waits for workers in vain.
                vars(self)[LOADER_READER] = None

    # Ranks that come and go -------------------------------------------------------------------

    def follow(self, run: ElasticRun) -> None:
        """Hands samples out again where an attempt at training on them was void."""
        self._run = run

    def move_to(self, model: ShardedModel) -> None:
        """Divides batches over other ranks from now on; all of them call it."""
        self._position = Position(model.data_group.rank, model.data_group.size)
        self._draws.move_to(model.all_ranks)
        for each in (self.sampler, self.batch_sampler, self.collate_fn):
            if isinstance(each, SameOrderSampler | ItemsOfBatch):
                each.move_to(self._position)
        vars(self)[LOADER_READER] = None  # workers that stay have the old position

    def _elastic_epoch(self, run: ElasticRun, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        def begin_again() -> Iterator[Any]:
            return begin() if self._draws_seed else self._begun_apart(begin)

        run.become_member()
        self._is_rewound, parts = False, self._epoch(begin_again)
        while True:
            try:
                run.before_batch(self)
                if self._is_rewound:
                    self._is_rewound, parts = False, self._epoch(begin_again)
                batch = next(parts, _END)
            except ShoalError as error:
                if not run.is_loss(error):
                    raise
                run.recover()
                continue
            if batch is _END:
                run.no_batch()
                return
            yield batch

    @property
    def _draws_seed(self) -> bool:
        """Whether torch draws one for the workers here, where nobody was lost.

        It does so for each iteration; for workers that stay only for the first. In the middle of an
        epoch it was drawn before, but a stream is drawn again from its beginning, with the seed.
        """
        if self.num_workers and self.persistent_workers and self.epoch > 0:
            return False
        return self._num_batches == 0 or _is_stream(self)

    def _begun_apart(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begins to iterate, with a seed for workers that nothing else depends on."""
        own = self.generator
        seed = torch.initial_seed() + self.epoch + self._num_batches
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        try:
            return begin()
        finally:
            self.generator = own

    def _epoch(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self._num_batches, self._num_to_skip = self._num_to_skip, 0
        for batch, num_rows in self._parts(begin):
            self._num_batches += 1
            model = self._model()
            if model is not None:
                model.uneven_rows = num_rows if num_rows % self._position.size else 0
            if not _is_stream(self) and self._same_order.was_joined(self._num_batches - 1):
                self._warn_of_joined()
            yield batch

    def _warn_of_joined(self) -> None:
        """A script that trained alone makes one step more."""
        model = self._model()
        is_training = model is not None and model.training and torch.is_grad_enabled()
        if self._has_warned or not is_training or self._position.rank:
            return
        self._has_warned = True
        warnings.warn(
            f"the last batch has fewer samples than there are ranks ({self._position.size}), so it "
            "is joined to the one before: an epoch has one step less than in one process. With "
            "drop_last=True both leave it out; or choose a batch_size that leaves at least as many",
            stacklevel=3,
        )

    def _parts(self, begin: Callable[[], Iterator[Any]]) -> Iterator[tuple[Any, int]]:
        """This rank's part of each batch, and how many rows the whole has if it is uneven."""
        if _is_stream(self):
            yield from islice(self._stream(begin), self._num_batches, None)
            return
        self._same_order.num_to_skip = self._num_batches
        for number, batch in enumerate(begin(), start=self._num_batches):
            if isinstance(batch, BatchPart):
                yield batch.value, batch.num_rows
            else:
                yield batch, self._same_order.num_rows.get(number, 0)

    def _stream(self, begin: Callable[[], Iterator[Any]]) -> Iterator[tuple[Any, int]]:
        for number, part in enumerate(self._draws.drawn(lambda: iter(begin()))):
            if number == 0:
                self._draws.compare("the first batch of the dataset", part.seen)
            if part.is_there:
                yield part.value, part.num_rows

    @property
    def _same_order(self) -> SameOrderSampler:
        sampler: Any = self.sampler if self.batch_sampler is None else self.batch_sampler
        return cast(SameOrderSampler, sampler)

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        length = super().__len__()
        if not _is_stream(self) or self.batch_size is None or self.drop_last:
            return length
        rest = len(self.dataset) % self.batch_size  # type: ignore[arg-type]
        return length - (0 < rest < self._position.size)

    def state_dict(self) -> dict[str, Any]:
        """Where in the data training is, the same on every rank; for `shoal.save` as ``sampler``.

        What workers have fetched ahead and was not handed out does not count.
        """
        num_batches = self._num_to_skip or self._num_batches
        if not _is_stream(self) and not self._num_to_skip:
            num_batches = self._same_order.num_drawn(num_batches)
        return {
            "epoch": self.epoch,
            "batches": num_batches,
            "batch_size": self.batch_size,
            "start": self._draws.start if num_batches else None,
            "generators": self._draws.own_states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, at any number of ranks; every rank calls it.

        In the middle of an epoch with the next batch, after its end with the next epoch.
        """
        if state["batch_size"] != self.batch_size:
            raise ValueError(
                f"the state is of a loader with batch_size={state['batch_size']}, and this one has "
                f"{self.batch_size}: its batches are others. shoal.sampler can be resumed with "
                "another batch size"
            )
        self._num_to_skip, self._num_batches = state["batches"], 0
        self.epoch, self._is_rewound = state.get("epoch", 0), True
        self._draws.resume(state["start"], state["generators"])


def divide(loader: Any, model: ShardedModel) -> Any:
    """Divides a loader, or each of a list of them."""
    if isinstance(loader, list | tuple):
        return [_divide(each, model) for each in loader]
    return _divide(loader, model)


def _divide(loader: DataLoader[T], model: ShardedModel) -> DataLoader[T]:
    """A copy that gives each rank its part; see [Note: a loader's batches]. All ranks call it."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"loader must be a torch DataLoader, or a list of them; got a {type(loader).__name__}. "
            "Other sources of batches are yours to divide: by model.data_group.rank and .size, or "
            "with shoal.sampler"
        )
    if _is_divided(loader, model.data_group):
        return loader
    _check_alike(loader, model.all_ranks)
    position = Position(model.data_group.rank, model.data_group.size)
    draws = Draws(_generators(loader), model.all_ranks)
    divided = copy.copy(loader)
    divided.__class__ = _divided_class(cast(Any, type(loader)))
    own = {"_model": weakref.ref(model), "_draws": draws, "_position": position}
    vars(divided).update(
        own | {LOADER_READER: None} | _changes(loader, draws, position)
    )  # setattr refuses some of them
    return divided


def _changes(loader: DataLoader[Any], draws: Draws, position: Position) -> dict[str, Any]:
    """Which attributes a divided loader has another of."""
    if _is_stream(loader):
        kind = RowsOfBatch if loader.batch_size is None else ItemsOfBatch
        return {"collate_fn": kind(loader.collate_fn, position)}
    if loader.batch_sampler is not None:
        return {"batch_sampler": RankBatches(loader.batch_sampler, draws, position)}
    rows = RowsOfBatch(loader.collate_fn, position)
    return {"sampler": SameOrderSampler(loader.sampler, draws), "collate_fn": rows}


def _is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


@cache
def _divided_class(kind: Any) -> Any:
    return type(f"Divided{kind.__name__}", (DividedLoader, kind), {})


def _is_divided(loader: DataLoader[Any], data: Backend) -> bool:
    """Whether it is divided already, over as many ranks as see different data."""
    if isinstance(loader, DividedLoader):
        return True
    batches: Any = loader.batch_sampler
    inner = getattr(batches, "sampler", loader.sampler)
    if isinstance(batches, GlobalBatchSampler):
        num_parts = batches.num_ranks
    elif isinstance(inner, DistributedSampler) and inner.num_replicas > 1:
        num_parts = inner.num_replicas
    else:
        return False
    if num_parts != data.size:
        raise ValueError(
            f"the loader's sampler divides the data into {num_parts} parts, and {data.size} ranks "
            "see different data: pass the loader without it, or make it for model.data_group "
            "(shoal.sampler(..., world=model.data_group))"
        )
    return True


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """What the order is drawn from, besides the generators that everything draws from."""
    holders: list[Any] = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    holders += [loader.sampler, loader if _is_stream(loader) else None]
    found = [each for holder in holders for each in getattr(holder, "__dict__", {}).values()]
    unique = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return list(unique.values())


def _check_alike(loader: DataLoader[Any], ranks: Backend) -> None:
    """Ranks that have other loaders would divide other batches."""
    is_sized = not _is_stream(loader) and hasattr(loader.dataset, "__len__")
    length = len(loader.dataset) if is_sized else "any number of"  # type: ignore[arg-type]
    own = f"{length} samples, batch_size={loader.batch_size}, drop_last={loader.drop_last}"
    own += f", num_workers={loader.num_workers}" if _is_stream(loader) else ""
    for rank, other in enumerate(ranks.all_gather_object(own)):
        if other != own:
            raise MismatchError(
                f"the ranks' loaders differ: rank {ranks.rank} has {own}, rank {rank} has {other}. "
                "Make the same loader on every rank; shoal divides it"
            )
