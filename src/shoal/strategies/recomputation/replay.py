"""What a block's second call must find as its first did; see [Note: recomputed blocks]."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.strategies.layers.module_snapshot import Attributes
from shoal.torch_internals.modules import buffers_of
from shoal.torch_internals.tensors import keeping_version, version_of

# Longer buffers (masks, tables of positions) are not copied: changing one is an error.
_LONG_BUFFER = 1 << 16


class BlockReplay:
    """Generators of Python and numpy, buffers, and which parts train, before a first call."""

    def __init__(self, block: nn.Module) -> None:
        """Before the first call."""
        self._block, self._random = block, _random_state()
        self._short: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._long: list[tuple[str, Tensor, int]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        for part in block.modules():
            self._modes.append((part, part.training))
            for name, buffer in buffers_of(part).items():
                if buffer is None:
                    continue
                if buffer.numel() > _LONG_BUFFER:
                    self._long.append((name, buffer, version_of(buffer)))
                else:
                    entry = (buffers_of(part), name, buffer, buffer.detach().clone())
                    self._short.append(entry)

    @contextlib.contextmanager
    def restored(self, block: str) -> Iterator[None]:
        """Inside, everything is as it was; afterwards as it has become.

        What the block writes into attributes meanwhile is undone: lists that losses are appended
        to, counters. Its caller has seen that once, from the first call.
        """
        for name, buffer, version in self._long:
            if version_of(buffer) != version:
                raise RuntimeError(
                    f"the buffer {name!r} of block {block!r} was changed after forward used it, "
                    "and is too long to be kept: the block cannot be computed again. Leave it out "
                    "of the blocks of activations="
                )
        attributes = Attributes(self._block)
        for part, is_training in self._modes:
            part.training = is_training
        random_now, swapped = _random_state(), []
        for owner, name, buffer, value in self._short:
            swapped.append((owner, name, owner[name], buffer, buffer.detach().clone()))
            owner[name] = buffer
            _write(buffer, value)
        _set_random_state(self._random)
        try:
            yield
        finally:
            _set_random_state(random_now)
            for owner, name, now, buffer, value in swapped:
                _write(buffer, value)
                owner[name] = now
            attributes.restore()


def _write(buffer: Tensor, value: Tensor) -> None:
    """Not a change for autograd: what it has saved of the buffer is not used in between."""
    with torch.no_grad(), keeping_version(buffer):
        buffer.copy_(value)


def _random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
