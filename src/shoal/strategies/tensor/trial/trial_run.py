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
from shoal.strategies.tensor.trial.trial_call import TrialCall, is_hugging_face
from shoal.strategies.tensor.trial.watching import watching
from shoal.torch_internals.trees import tree_leaves
from shoal.torch_support.random_state import torch_states


@dataclass(frozen=True)
class SplitTrial:
    """A way to split a block.

    Attributes:
        block: The module that is called with one tensor.
        columns: Layers that take what the region begins with.
        row: The layer that ends it.
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
        self._dropped: list[torch.Size] = []

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
        undropped = Undropped(lambda: self._is_inside)
        try:
            block.train(self._way.training)
            with self._hooked(at_row), self._undrawn(undropped):
                buffers = {name: buffer.clone() for name, buffer in block.named_buffers()}
                with self._watched():
                    result = functional_call(block, {**self._weights, **buffers}, (), self._call)
            kept = snapshot.new_tensors()
        finally:
            snapshot.restore()
        self._dropped = undropped.shapes
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # Of Hugging Face's results only the first goes on; others are shown on request.
        seen = leaves[:1] if is_hugging_face(block) else [*leaves, *kept, *buffers.values()]
        return [leaf if leaf.is_floating_point() else leaf.to(torch.float64) for leaf in seen]

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """The whole block must not use what will be split without calling the layers."""
        if self._rank is not None:
            yield
            return
        guarded = {name: self._weights[name] for name in self._trial.splits}
        with watching(self._trial.block, guarded) as guard:
            yield
        if guard.was_used:
            raise SplitDiffers

    @contextlib.contextmanager
    def _undrawn(self, undropped: Undropped) -> Iterator[None]:
        """In training nothing is dropped, and other random numbers would differ between ranks."""
        if not self._way.training:
            yield
            return
        before = torch_states()
        with undropped:
            yield
        if not all(map(torch.equal, before, torch_states())):
            raise SplitDiffers

    @property
    def drops(self) -> bool:
        """Whether anything between the columns and the row was to be dropped."""
        return bool(self._dropped)

    def check_dropped(self, whole: TrialRun) -> None:
        """Raises if parts are dropped of something whose split dropout would not recognise."""
        if len(self._dropped) != len(whole._dropped):
            raise SplitDiffers
        for own, expected in zip(self._dropped, whole._dropped, strict=True):
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
        handles = [
            part.register_forward_pre_hook(self._note)
            for part in trial.block.modules()
            if part is not trial.block and part is not trial.row and part not in trial.columns
        ]
        handles += [column.register_forward_pre_hook(self._enter) for column in trial.columns]
        handles += [trial.row.register_forward_pre_hook(self._leave)]
        handles += [trial.row.register_forward_hook(at_row)]
        self._is_inside = False
        try:
            with _numbers(trial.numbers, self._rank):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._is_inside = True
        return tuple(tensor.detach() for tensor in inputs)

    def _note(self, module: nn.Module, _: object) -> None:
        if self._is_inside:
            self.inside[module] = None

    def _leave(self, _: nn.Module, __: object) -> None:
        self._is_inside = False


@contextlib.contextmanager
def _numbers(
    numbers: Sequence[tuple[nn.Module, str, Sequence[int]]], rank: int | None
) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in numbers]
    try:
        if rank is not None:
            for module, name, values in numbers:
                setattr(module, name, values[rank])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
