"""One run of a block in a trial: whole, or as one rank would run it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.sharding.split import Split
from shoal.strategies.layers.module_snapshot import Snapshot
from shoal.strategies.tensor.layers.dropout import Undropped
from shoal.strategies.tensor.trial.trial_call import TrialCall, is_hugging_face, watching
from shoal.torch_internals.trees import tree_leaves
from shoal.torch_support.random_state import torch_states


@dataclass(frozen=True)
class SplitTrial:
    """A way to split a block, to be tried.

    Attributes:
        block: The module that is called with one tensor.
        splits: Every rank's part of each parameter that is split, by name in the block.
        numbers: What becomes of attributes: module, attribute, and a value for each rank.
        attends: Whether there are heads in between; they are looked for in dimension 1 of 4.
    """

    block: nn.Module
    columns: Sequence[nn.Module]
    row: nn.Module
    splits: Mapping[str, Sequence[Split]]
    numbers: Sequence[tuple[nn.Module, str, Sequence[int]]] = ()
    attends: bool = False


class SplitDiffers(Exception):
    """The parts do not add up to the whole."""


class TrialRun:
    """The block with some weights, as one process or as one rank would run it."""

    def __init__(
        self,
        trial: SplitTrial,
        weights: dict[str, Tensor],
        call: dict[str, Any],
        way: TrialCall,
        rank: int | None = None,
    ) -> None:
        self._trial, self._weights, self._call, self._rank = trial, weights, call, rank
        self._way = way
        self._is_inside = False
        self.inside: dict[nn.Module, None] = {}
        """Modules that were called between the columns and the row."""
        self.dropped: list[torch.Size] = []
        """What was to be dropped between the columns and the row."""

    def carry_out_partially(self) -> Tensor:
        """What this rank's row gives, without its bias."""
        seen: list[Tensor] = []

        def look(row: nn.Module, _: Any, output: Tensor) -> None:
            bias = getattr(row, "bias", None)
            seen.append((output if bias is None else output - bias).detach())

        self._call_block(look)
        if len(seen) != 1:
            raise SplitDiffers
        return seen[0]

    def carry_out(self, total: Tensor | None = None) -> list[Tensor]:
        """All results; ``total`` takes the place of what the row gives."""

        def replace(row: nn.Module, _: Any, output: Tensor) -> Tensor:
            if total is None:
                return output
            bias = getattr(row, "bias", None)
            known = total if bias is None else total + bias
            return known.detach() + (output - output.detach())

        return self._call_block(replace)

    def _call_block(self, at_row: Any) -> list[Tensor]:
        block, snapshot = self._trial.block, Snapshot(self._trial.block)
        is_training, nothing = self._way.training, contextlib.nullcontext()
        undropped = Undropped(lambda: self._is_inside)
        states = torch_states() if is_training else []
        try:
            block.train(is_training)
            if self._rank is not None:
                for module, name, values in self._trial.numbers:
                    setattr(module, name, values[self._rank])
            buffers = {name: buffer.clone() for name, buffer in block.named_buffers()}
            guarded = {name: self._weights[name] for name in self._trial.splits}
            watched = watching(block, guarded) if self._rank is None else nothing
            with self._hooked(at_row), undropped if is_training else nothing, watched as guard:
                result = functional_call(block, {**self._weights, **buffers}, (), self._call)
            kept = snapshot.new_tensors()
        finally:
            snapshot.restore()
        # The whole block must not use what will be split without calling the layers.
        if guard is not None and guard.was_used:
            raise SplitDiffers
        # In training nothing is dropped, and other random numbers would differ between ranks.
        if is_training and not all(map(torch.equal, states, torch_states())):
            raise SplitDiffers
        self.dropped = undropped.shapes
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # Of Hugging Face's results only the first goes on; others are shown on request.
        seen = leaves[:1] if is_hugging_face(block) else [*leaves, *kept, *buffers.values()]
        return [leaf if leaf.is_floating_point() else leaf.to(torch.float64) for leaf in seen]

    def check_dropped(self, whole: TrialRun) -> None:
        """Raises if parts are dropped of something whose split dropout would not recognise."""
        if len(self.dropped) != len(whole.dropped):
            raise SplitDiffers
        for own, expected in zip(self.dropped, whole.dropped, strict=True):
            by_head = self._trial.attends and len(own) == 4
            split_dim = 1 if by_head else len(own) - 1
            if any(size != expected[dim] for dim, size in enumerate(own) if dim != split_dim):
                raise SplitDiffers

    def gradients(self, outputs: list[Tensor], signal: list[Tensor]) -> dict[str, Tensor | None]:
        """Of every parameter, with inputs of the region held fixed."""
        weighed = [
            (out * weight).sum()
            for out, weight in zip(outputs, signal, strict=True)
            if out.requires_grad
        ]
        total = torch.stack(weighed).sum()
        found = torch.autograd.grad(total, list(self._weights.values()), allow_unused=True)
        return dict(zip(self._weights, found, strict=True))

    @contextlib.contextmanager
    def _hooked(self, at_row: Any) -> Iterator[None]:
        trial = self._trial

        def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            self._is_inside = True
            return tuple(tensor.detach() for tensor in inputs)

        def note(module: nn.Module, _: object) -> None:
            if self._is_inside:
                self.inside[module] = None

        def leave(*_: object) -> None:
            self._is_inside = False

        handles = [
            part.register_forward_pre_hook(note)
            for part in trial.block.modules()
            if part is not trial.block and part is not trial.row and part not in trial.columns
        ]
        handles += [column.register_forward_pre_hook(enter) for column in trial.columns]
        handles += [trial.row.register_forward_pre_hook(leave)]
        handles += [trial.row.register_forward_hook(at_row)]
        self._is_inside = False
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
