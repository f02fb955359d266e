"""What is loaded, read and checked beside the model: nothing of the model changes before `commit`.

Anything can be wrong with a file. So one rank's part is read whole into memory of its own, with
every checksum compared; only when all ranks have got that far is it copied into the model. State of
an optimizer becomes its own without another copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint import training_state
from shoal.checkpoint.disk.checkpoint_folder import MANIFEST
from shoal.checkpoint.format import plain_json
from shoal.checkpoint.load import matching
from shoal.checkpoint.load.matching import Match, Misfits
from shoal.checkpoint.load.optimizer_loading import OptimizerLoading
from shoal.checkpoint.load.slice_reader import read, read_tensors
from shoal.checkpoint.load.tensor_source import StateDictSource, TensorSource, Wanted
from shoal.checkpoint.training_state import Companions, prepared_companions
from shoal.errors import CheckpointMismatchError, CorruptCheckpointError
from shoal.sharding.extent import Extent
from shoal.strategies import ShardedModel
from shoal.torch_support.concurrency import run_concurrently
from shoal.torch_support.random_state import RandomState


@dataclass(frozen=True)
class Target:
    """What is loaded into.

    Attributes:
        model: The model.
        optimizers: Its optimizers.
        companions: Schedulers and the like.
        strict: Whether everything must fit.
        with_random: Whether random generators are restored.
        rank: This rank's number.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    companions: Companions
    strict: bool
    with_random: bool
    rank: int


@dataclass
class LoadTransaction:
    """One rank's part of a load: found, read and checked, then committed or dropped."""

    source: TensorSource
    target: Target
    match: Match = field(default_factory=Match)
    misfits: Misfits = field(default_factory=Misfits)
    extra: dict[str, Any] = field(default_factory=dict)
    _commits: list[Callable[[], None]] = field(default_factory=list)
    _parameter_commits: list[Callable[[], None]] = field(default_factory=list)
    apply_companions: Callable[[], None] = lambda: None

    def resolve(self) -> list[Any]:
        """Finds the model's names; returns what the other ranks need to know of it."""
        model = self.target.model
        training_state.check_has_memory(model)
        module = training_state.plain_module(model)
        shapes = {held.name: held.extent.shape for held in training_state.held_parameters(model)}
        shapes |= {name: buffer.shape for name, buffer in training_state.buffers(model).items()}
        stored = {key: record.shape for key, record in self.source.tensors.items()}
        with self.reading_values():
            self.match = matching.match(shapes, training_state.aliases(module), stored, self.ties)
        return [self.match.keys, self.match.missing, self.match.misshapen, self.match.known]

    @property
    def ties(self) -> dict[str, str]:
        """The checkpoint's further names of tensors, each with the first."""
        ties = self.source.values.get("model", {}).get("aliases", {})
        if not all(isinstance(first, str) for first in ties.values()):
            raise ValueError("aliases must be names")
        return dict(ties)

    def check(self, everybodys: Sequence[Sequence[Any]]) -> None:
        """Raises if what all ranks have found does not fit the checkpoint."""
        matches = [Match(*found) for found in everybodys]
        self.misfits = matching.compare(matches, self.source.tensors, self.ties)
        self.misfits.check(str(self.source.folder), strict=self.target.strict)

    def read(self) -> None:
        """Reads this rank's part and checks it; the model stays as it is."""
        parameters = [*self._stage_parameters(), *self._stage_buffers()]
        if isinstance(self.source, StateDictSource):
            self.source.read([*parameters, *self._stage_rest()])
            return
        # The disk begins with what is known already.
        rest, _ = run_concurrently(
            [lambda _: self._stage_rest(), partial(read, self.source, parameters)]
        )
        read(self.source, rest)

    def _stage_rest(self) -> list[Wanted]:
        with self.reading_values():
            wanted = list(self._stage_optimizers())
            self._stage_values()
        return wanted

    def _stage_parameters(self) -> Iterator[Wanted]:
        for held in training_state.held_parameters(self.target.model):
            key = self.match.keys.get(held.name)
            if key is not None:
                wanted = self._room(key, held.extent)
                put = partial(training_state.put_parameter, self.target.model, held, wanted.memory)
                self._parameter_commits.append(put)
                yield wanted

    def _stage_buffers(self) -> Iterator[Wanted]:
        for name, buffer in training_state.buffers(self.target.model).items():
            key = self.match.keys.get(name)
            if key is not None:
                wanted = self._room(key, Extent.whole(buffer.shape))
                self._commits.append(partial(_overwrite, buffer, wanted.memory))
                yield wanted

    def _room(self, key: str, extent: Extent) -> Wanted:
        record = self.source.tensors[key]
        return Wanted(key, extent, torch.empty(extent.num_elements, dtype=record.dtype))

    # Optimizers -------------------------------------------------------------------------

    def _stage_optimizers(self) -> Iterator[Wanted]:
        optimizers = self.target.optimizers
        saved = self.source.values.get("optimizers", [])
        if optimizers and len(saved) != len(optimizers):
            if not self.target.strict and not saved:
                return
            raise CheckpointMismatchError(
                f"{self.source.folder} has the state of {len(saved)} optimizers, and "
                f"{len(optimizers)} are to be loaded"
            )
        for number, optimizer in enumerate(optimizers):
            loading = OptimizerLoading(
                self.source,
                saved[number],
                number,
                self.target.strict,
                {**self.ties, **self._own_ties()},
                set(self.misfits.misshapen),
            )
            reception = loading.receive(optimizer, self.target.model)
            self._commits.append(reception.accept)
            for key, held in reception.wanted:
                tensor = loading.key(held.name, key)
                if self.source.tensors[tensor].shape != held.extent.shape:
                    raise ValueError(f"{tensor} has not the shape of its parameter")
                dtype = self.source.tensors[tensor].dtype
                if held.memory.is_cpu and held.memory.dtype is dtype:
                    yield Wanted(tensor, held.extent, held.memory)
                else:
                    wanted = self._room(tensor, held.extent)
                    self._commits.append(partial(_overwrite, held.memory, wanted.memory))
                    yield wanted

    def _own_ties(self) -> dict[str, str]:
        """Names of the model that the checkpoint has under another one."""
        found = {name: key.removeprefix(matching.PREFIX) for name, key in self.match.keys.items()}
        return {name: other for name, other in found.items() if name != other}

    # The rest ---------------------------------------------------------------------------

    def _stage_values(self) -> None:
        # [Note: random numbers at another number of ranks]
        # A checkpoint has the generators of each rank that wrote it. Rank r takes those of rank r;
        # where there were fewer ranks, it takes those of rank r modulo their number and seeds them
        # anew from their own state and r, so that no two ranks draw the same.
        saved = self.source.values
        states = saved.get("random", [])
        own = [states[self.target.rank % len(states)]] if self.target.with_random and states else []
        module = training_state.plain_module(self.target.model)
        known = dict(training_state.modules_with_extra_state(module))
        extra_state = dict(saved.get("model", {}).get("extra_state", {}))
        self._check_extra_state(set(known), set(extra_state))
        chosen = {name: saved[name] for name, _ in self.target.companions.items() if name in saved}
        tensors = read_tensors(
            self.source, plain_json.references([own, extra_state, chosen, saved.get("extra", {})])
        )
        decoded = partial(plain_json.decode, tensors=tensors)
        self.extra = decoded(saved.get("extra", {}))
        if not isinstance(self.extra, dict):
            raise ValueError("extra must be a dict")
        self.apply_companions = prepared_companions(
            self.target.companions,
            {name: decoded(states) for name, states in chosen.items()},
            str(self.source.folder),
            strict=self.target.strict,
        )
        for name, state in decoded(extra_state).items():
            if name in known:
                self._commits.append(partial(known[name].set_extra_state, state))
        if own:
            state, rank = RandomState.from_plain(decoded(own[0])), self.target.rank
            is_shared = rank >= len(states)
            restore = partial(state.restore_branch, rank) if is_shared else state.restore
            self._commits.append(restore)

    def _check_extra_state(self, known: set[str], saved: set[str]) -> None:
        if self.target.strict and self.source.is_checked and known != saved:
            names = ", ".join(sorted(known ^ saved))
            raise CheckpointMismatchError(
                f"{self.source.folder} and the model differ in who has extra state: {names}"
            )

    @contextmanager
    def reading_values(self) -> Iterator[None]:
        """Inside, values that are not what they should be count as damage."""
        try:
            yield
        except (CheckpointMismatchError, CorruptCheckpointError):
            raise
        except torch.OutOfMemoryError:
            raise
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
            OverflowError,
        ) as error:
            reason = f"its values make no sense: {type(error).__name__}: {str(error)[:200]}"
            raise CorruptCheckpointError(str(self.source.folder / MANIFEST), reason) from error

    # The end ----------------------------------------------------------------------------

    def commit(self) -> None:
        """Copies what was read into the model and all else; every rank calls it."""
        model = self.target.model
        with model.receiving() if isinstance(model, ShardedModel) else torch.no_grad():
            for commit in self._parameter_commits:
                commit()
        for commit in self._commits:
            commit()


@torch.no_grad()
def _overwrite(memory: Tensor, values: Tensor) -> None:
    memory.copy_(values.view(memory.shape))
