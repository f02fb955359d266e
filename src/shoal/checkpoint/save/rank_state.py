"""All that one rank has to save: references to its tensors, and plain values.

[Note: keys]
A parameter or buffer is `model/<name>`; what an optimizer has for each element of a parameter is
`optimizer/<number>/<name>/<key>`. Where every rank has a state of its own that is the average, and
`own/<rank>/<number>/<name>/<key>` a rank's; what an outer optimizer has begins with `outer`. Of
compressed gradients, `residual/<rank>/<name>` is what a rank has left out so far, and
`factor/<name>` what a factored one goes on from. Tensors inside of plain values have the path of
the value.

[Note: values of all ranks]
Values that belong to the whole run are the first rank's. Names and state of parameters are merged,
since a rank of a pipeline knows its own only. Random states are kept rank by rank, and so
are the numbers of compressed gradients and the states that are a rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint import training_state
from shoal.checkpoint.format import plain_json
from shoal.checkpoint.save.division import Claim
from shoal.checkpoint.save.writing import Outgoing
from shoal.checkpoint.training_state import Companions
from shoal.optim.state import held_whole
from shoal.sharding.extent import Extent
from shoal.sharding.holding import HeldState
from shoal.strategies import ShardedModel
from shoal.torch_support.random_state import RandomState


@dataclass
class HeldTensor:
    """What this rank holds of one full tensor, in runs that may lie anywhere in memory."""

    dtype: torch.dtype
    shape: torch.Size
    pieces: list[tuple[Extent, Tensor]]
    is_same_everywhere: bool

    def claim(self) -> Claim:
        """Which elements, neighbours joined."""
        joined: list[Extent] = []
        for extent, _ in self.pieces:
            last = joined[-1] if joined else None
            if last is not None and last.split == extent.split and last.stop == extent.start:
                joined[-1] = last.narrowed(last.start, extent.stop)
            else:
                joined.append(extent)
        return Claim(self.dtype, self.shape, tuple(joined), self.is_same_everywhere)

    def parts(self, wanted: Extent) -> Iterator[Tensor]:
        """The elements of an extent, in order, one run of memory after the other."""
        for extent, memory in self.pieces:
            start, stop = max(extent.start, wanted.start), min(extent.stop, wanted.stop)
            if extent.split == wanted.split and start < stop:
                yield memory[start - extent.start : stop - extent.start]


@dataclass
class RankState:
    """What one rank has to save.

    Attributes:
        tensors: By key; see [Note: keys].
        values: The rest, as JSON; see `collect` for what it consists of.
    """

    tensors: dict[str, HeldTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, key: str, extent: Extent, memory: Tensor, *, is_same_everywhere: bool) -> None:
        """Takes note of elements of a tensor."""
        plain_json.checked_dtype(memory, key)  # an error now, and not on the way
        known = self.tensors.get(key)
        if known is None:
            known = self.tensors[key] = HeldTensor(
                memory.dtype, extent.shape, [], is_same_everywhere
            )
        known.pieces.append((extent, memory))

    def add_whole(self, key: str, tensor: Tensor) -> None:
        """Takes note of a whole tensor, of which the first rank's values count."""
        plain_json.checked_dtype(tensor, key)
        flat = tensor.detach().reshape(-1)
        self.add(key, Extent.whole(tensor.shape), flat, is_same_everywhere=False)

    def encode(self, value: Any, path: str) -> Any:
        """A plain value as JSON; tensors inside are taken note of."""
        return plain_json.encode(value, path, self._add_inner)

    def _add_inner(self, path: str, tensor: Tensor) -> str:
        """Keys with a slash in them make equal paths of different tensors: "a/b", "a" and "b"."""
        key = path
        while key in self.tensors:
            key += "'"
        self.add_whole(key, tensor)
        return key

    def finish(self) -> None:
        """Puts the pieces of each tensor in order."""
        for held in self.tensors.values():
            held.pieces.sort(key=lambda piece: (repr(piece[0].split), piece[0].start))

    def outgoing(self, work: Mapping[str, Sequence[Extent]]) -> list[Outgoing]:
        """What this rank writes, once that is assigned."""
        return [
            Outgoing(key, held.dtype, extent, partial(held.parts, extent))
            for key, extents in work.items()
            for held in [self.tensors[key]]
            for extent in extents
        ]


def collect(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    companions: Companions,
    extra: Mapping[str, Any],
    rank: int,
) -> RankState:
    """Looks at everything there is to save; copies nothing."""
    if isinstance(model, ShardedModel):
        model.engine.steps.check()
    state = RankState()
    _add_model(state, model)
    state.values["optimizers"] = [
        _add_optimizer(state, number, optimizer, model, rank)
        for number, optimizer in enumerate(optimizers)
    ]
    _add_compression(state, model)
    # The first rank's count; others' are refused for the same reasons, and may differ.
    of_run = state if rank == 0 else RankState()
    for name, objects in companions.items():
        # A state that the caller has taken is saved as it is.
        states = [each if isinstance(each, Mapping) else each.state_dict() for each in objects]
        of_run.values[name] = of_run.encode(states, name)
    of_run.values["extra"] = of_run.encode(dict(extra), "extra")
    state.values["random"] = state.encode(RandomState.capture().to_plain(), f"random/{rank}")
    state.finish()
    return state


def _add_model(state: RankState, model: nn.Module) -> None:
    module = training_state.plain_module(model)
    is_same_everywhere = training_state.is_same_everywhere(model)
    for held in training_state.held_parameters(model):
        state.add(
            f"model/{held.name}", held.extent, held.memory, is_same_everywhere=is_same_everywhere
        )
    for name, buffer in training_state.buffers(model).items():
        state.add_whole(f"model/{name}", buffer)
    extra = {
        name: inner.get_extra_state()
        for name, inner in training_state.modules_with_extra_state(module)
    }
    state.values["model"] = {
        "aliases": training_state.aliases(module),
        "extra_state": state.encode(extra, "extra_state"),
    }


def _add_optimizer(
    state: RankState, number: int, optimizer: Optimizer, model: nn.Module, rank: int
) -> dict[str, Any]:
    is_same = training_state.is_same_everywhere(model)
    path = f"optimizer/{number}"
    held = training_state.held_state(optimizer, model)
    about = {
        "class": training_state.class_name(optimizer),
        "groups": _add_groups(state, path, training_state.held_groups(optimizer, model)),
        "state": _add_state(state, path, held, is_same_everywhere=is_same),
        "streams": training_state.streams(optimizer),
    }
    own, outer = training_state.own_state(optimizer), training_state.outer_of(optimizer)
    if own is not None:
        about["own"] = _add_state(state, f"own/{rank}/{number}", own, is_same_everywhere=True)
    if outer is not None:
        about["outer"] = _add_outer(state, f"outer/{number}", *outer)
    return about


def _add_outer(
    state: RankState, path: str, optimizer: Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    held = held_whole(optimizer, names)
    return {
        "class": training_state.class_name(optimizer),
        "groups": _add_groups(state, path, training_state.named_groups(optimizer, names)),
        "state": _add_state(state, path, held, is_same_everywhere=True),
    }


def _add_groups(state: RankState, path: str, groups: training_state.Groups) -> list[dict[str, Any]]:
    return [
        {"parameters": names, "options": state.encode(options, f"{path}/group/{which}")}
        for which, (names, options) in enumerate(groups)
    ]


def _add_state(
    state: RankState, path: str, held: Iterable[HeldState], *, is_same_everywhere: bool
) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for each in held:
        for key, memory in each.tensors.items():
            own = f"{path}/{each.name}/{key}"
            state.add(own, each.extent, memory, is_same_everywhere=is_same_everywhere)
        if each.name not in states:
            shared = state.encode(dict(each.shared), f"{path}/{each.name}")
            states[each.name] = {"elements": sorted(each.tensors), "shared": shared}
    return states


def _add_compression(state: RankState, model: nn.Module) -> None:
    compression = training_state.compression_state(model)
    if compression is None:
        return
    state.values["compression"] = compression.numbers()
    for held in compression.held_residual():
        key = f"residual/{compression.rank}/{held.name}"
        state.add(key, held.extent, held.memory, is_same_everywhere=True)
    for name, factor in compression.held_factors():
        state.add_whole(f"factor/{name}", factor)


def merge_values(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One set of values from those of each rank; see [Note: values of all ranks]."""
    first = by_rank[0]
    merged = {
        key: first[key] for key in ("scheduler", "scaler", "sampler", "extra") if key in first
    }
    merged["random"] = [values["random"] for values in by_rank]
    if "compression" in first:
        merged["compression"] = [values["compression"] for values in by_rank]
    merged["model"] = {
        part: _union([values["model"][part] for values in by_rank])
        for part in ("aliases", "extra_state")
    }
    counts = {len(values["optimizers"]) for values in by_rank}
    if len(counts) != 1:
        raise ValueError(f"ranks save different numbers of optimizers: {sorted(counts)}")
    merged["optimizers"] = [
        _merge_optimizer([values["optimizers"][number] for values in by_rank])
        for number in range(counts.pop())
    ]
    return merged


def _merge_optimizer(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    longest = max(by_rank, key=lambda own: len(own["groups"]))
    groups = []
    for which, group in enumerate(longest["groups"]):
        named = [own["groups"][which] for own in by_rank if which < len(own["groups"])]
        names = dict.fromkeys(name for each in named for name in each["parameters"])
        groups.append({"parameters": list(names), "options": group["options"]})
    state = _union([own["state"] for own in by_rank])
    about = {key: longest[key] for key in ("class", "streams", "outer") if key in longest}
    if "own" in longest:
        about["own"] = [own["own"] for own in by_rank]
    return {**about, "groups": groups, "state": state}


def _union(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All entries; of several for one key the first rank's."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            merged.setdefault(key, value)
    return merged
