"""What is loaded, read and checked beside the model: nothing of the model changes before `commit`.

Anything can be wrong with a file. So one rank's part is read whole into memory of its own, with
every checksum compared; only when all ranks have got that far is it copied into the model. State of
an optimizer becomes its own without another copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from shoal.checkpoint.load.compression_loading import CompressionLoading
from shoal.checkpoint.load.matching import Match, Misfits
from shoal.checkpoint.load.slice_reader import read, read_tensors
from shoal.checkpoint.load.tensor_source import MemorySource, TensorSource, Wanted
from shoal.checkpoint.training_state import Companions, prepared_companions
from shoal.errors import CheckpointMismatchError, CorruptCheckpointError
from shoal.optim.state import Reception, receive_whole
from shoal.sharding.extent import Extent
from shoal.sharding.holding import FullState
from shoal.strategies import ShardedModel
from shoal.torch_support.concurrency import run_concurrently
from shoal.torch_support.random_state import RandomState

_NONSENSE = LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError


@dataclass(frozen=True)
class Target:
    """What is loaded into, on this rank; `strict` if everything must fit."""

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
        if isinstance(self.source, MemorySource):
            self.source.read([*parameters, *self._stage_rest()])
            return
        # The disk begins with what is known already.
        rest, _ = run_concurrently(
            [lambda _: self._stage_rest(), partial(read, self.source, parameters)]
        )
        read(self.source, rest)

    def _stage_rest(self) -> list[Wanted]:
        with self.reading_values():
            wanted = [*self._stage_optimizers(), *self._stage_compression()]
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
            loading = self._loading_of(saved[number], number, training_state.own_state(optimizer))
            yield from self._staged(loading, loading.receive(optimizer, self.target.model))
            outer = training_state.outer_of(optimizer)
            if outer is not None and "outer" in saved[number]:
                loading = self._loading(saved[number]["outer"], f"outer/{number}")
                yield from self._staged(loading, loading.receive_outer(*outer))

    def _loading_of(
        self, saved: Mapping[str, Any], number: int, own: object | None
    ) -> OptimizerLoading:
        """A rank goes on with its own state, where it had one and there were as many ranks."""
        ranks, former = training_state.ranks_of(self.target.model), saved.get("own")
        if own is None or former is None or len(former) != (1 if ranks is None else ranks.size):
            return self._loading(saved, f"optimizer/{number}")
        rank = self.target.rank
        return self._loading({**saved, "state": former[rank]}, f"own/{rank}/{number}")

    def _loading(self, saved: Mapping[str, Any], path: str) -> OptimizerLoading:
        ties = {**self.ties, **self._own_ties()}
        new = set(self.misfits.misshapen)
        return OptimizerLoading(self.source, saved, path, self.target.strict, ties, new)

    def _staged(self, loading: OptimizerLoading, reception: Reception) -> Iterator[Wanted]:
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

    def _stage_compression(self) -> Iterator[Wanted]:
        state = training_state.compression_state(self.target.model)
        if state is not None and self.target.optimizers:
            loading = CompressionLoading(self.source, state, {**self.ties, **self._own_ties()})
            yield from loading.wanted(self.target.rank)
            self._commits.append(loading.accept)

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
        except (CheckpointMismatchError, CorruptCheckpointError, torch.OutOfMemoryError):
            raise
        except _NONSENSE as error:
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


@dataclass
class OptimizerLoading:
    """One optimizer's saved state.

    Attributes:
        saved: What the source's manifest says of this optimizer.
        path: What its keys begin with; see [Note: keys].
        strict: Whether it must be of the same class.
        ties: From a name here to the one in the checkpoint, where they differ.
        new: Names of parameters that are not those of the checkpoint: they keep their state.
    """

    source: TensorSource
    saved: Mapping[str, Any]
    path: str
    strict: bool
    ties: Mapping[str, str] = field(default_factory=dict)
    new: Collection[str] = ()

    def receive(self, optimizer: Optimizer, model: nn.Module) -> Reception:
        """Makes room for the state."""
        self._check_class(optimizer)
        groups = training_state.held_groups(optimizer, model)
        states = self._full_states(groups, training_state.held_dtypes(model))
        options = [self._options(which, *group) for which, group in enumerate(groups)]
        return training_state.receive(optimizer, model, states, options, _streams(self.saved))

    def receive_outer(self, optimizer: Optimizer, names: Mapping[int, str]) -> Reception:
        """Makes room for the state of an outer optimizer; ``names`` are by parameters' ids."""
        self._check_class(optimizer)
        groups = training_state.named_groups(optimizer, names)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        states = self._full_states(groups, {names[id(each)]: each.dtype for each in parameters})
        options = [self._options(which, *group) for which, group in enumerate(groups)]
        return receive_whole(optimizer, names, states, options)

    def _full_states(
        self, groups: training_state.Groups, dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, FullState]:
        known = {name for group in self.saved["groups"] for name in group["parameters"]}
        tensors = read_tensors(self.source, plain_json.references(self._shared_of(groups)))
        return {
            name: self._full_state(name, tensors, dtypes[name])
            for names, _ in groups
            for name in names
            if self._saved_name(name) in known and name not in self.new
        }

    def _saved_name(self, name: str) -> str:
        return self.ties.get(name, name)

    def key(self, name: str, state_key: str) -> str:
        """Where the files have what each element of a parameter has."""
        return f"{self.path}/{self._saved_name(name)}/{state_key}"

    def _check_class(self, optimizer: Optimizer) -> None:
        wanted, found = training_state.class_name(optimizer), self.saved["class"]
        if self.strict and found != wanted:
            raise CheckpointMismatchError(
                f"{self.source.folder} has the state of {found} where {wanted} is to be loaded; "
                "pass strict=False if one can go on with the other's state"
            )

    def _shared_of(self, groups: training_state.Groups) -> list[Any]:
        names = {self._saved_name(name) for own, _ in groups for name in own}
        states = [about["shared"] for name, about in self.saved["state"].items() if name in names]
        return [states, [group["options"] for group in self.saved["groups"]]]

    def _full_state(
        self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype
    ) -> FullState:
        about = self.saved["state"].get(self._saved_name(name))
        if about is None:
            return FullState()
        stored = self.source.tensors.get(f"model/{self._saved_name(name)}")
        dtypes = {}
        for key in about["elements"]:
            found = self.source.tensors[self.key(name, key)].dtype
            # State that has the parameter's own dtype follows it, where that is another now.
            follows = stored is not None and found is stored.dtype and found.is_floating_point
            dtypes[key] = dtype if follows else found
        return FullState(dtypes, plain_json.decode(about["shared"], tensors))

    def _options(self, index: int, names: list[str], own: Mapping[str, Any]) -> Mapping[str, Any]:
        """Hyperparameters of the saved group that has these parameters."""
        groups = self.saved["groups"]
        members = {name: which for which, own in enumerate(groups) for name in own["parameters"]}
        found = {members[self._saved_name(n)] for n in names if self._saved_name(n) in members}
        if len(found) > 1:
            raise CheckpointMismatchError(
                f"parameter group {index} of the optimizer has parameters of the groups "
                f"{sorted(found)} of {self.source.folder}: build it with the same groups"
            )
        if not found and (names or index >= len(groups)):
            return own  # all of its parameters are new
        which = found.pop() if found else index
        saved = groups[which]["options"]  # read for each: groups must not share tensors
        options = plain_json.decode(saved, read_tensors(self.source, plain_json.references(saved)))
        if not isinstance(options, dict) or "params" in options:
            raise ValueError("hyperparameters must be a dict")
        return options


def _streams(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where random draws go on, in the form that `training_state.streams` gives it."""
    found = saved.get("streams", {})
    numbers = [number for each in found.values() for number in each.values()]
    if not all(type(number) is int for number in numbers):
        raise ValueError("what an optimizer draws from must be given in whole numbers")
    return found  # type: ignore[no-any-return]
